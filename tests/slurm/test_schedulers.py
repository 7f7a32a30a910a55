"""Job scripts for PBS Pro, LSF and Flux, with commands that answer and note their words."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, executable, until

from mpips.errors import UserError
from mpips.launch.sbatch import make_parser, script, write
from mpips.planning.needs import Needs

SCHEDULERS = ("pbs", "lsf", "flux")
NEED = Needs(1, 3, server_bytes=3.3e8, worker_bytes=3.9e8, save_s=0.4, seconds=127)
# What each scheduler is asked for, for a job with all that a site may want.
HEADS = {
    "pbs": "PBS -N long, -l select=2:ncpus=8:mpiprocs=2:mem=1200MB, -l place=scatter, "
    "-l walltime=3600, -q wide, -A ml",
    "lsf": 'BSUB -J long, -n 16, -R "span[ptile=8] rusage[mem=1200MB/host]", -W 60, -q wide, '
    '-P ml, -Q "85"',
    "flux": "flux: --job-name=long, --nodes=2, --nslots=4, --cores-per-slot=4, --time-limit=3600s, "
    "--queue=wide, --bank=ml",
}
TWO_BY_TWO = "--nodes 2 --ntasks-per-node 2 --time 1:00:00 --job-name long"
RUNS = {"pbs": "runs/long-17.pbs", "lsf": "runs/long-17", "flux": "runs/long-f17"}

CALLED = '#!/bin/bash\necho "$(basename "$0") $*" >>calls\n'
# As ssh.
RSH = f"""{CALLED}
while [[ $1 == -* ]]; do shift; done
exec sh -c "${{*:2}}"
"""
FLUX = f"""{CALLED}
case $* in
    "job id "*) echo f17 ;;
    "job timeleft") cat left ;;
    "hostlist --expand --delimiter=:2, instance") paste -sd , hosts | sed 's/,/:2,/g' ;;
    "overlay lookup "*) grep -nx "$3" hosts | cut -d : -f 1 ;;
    "exec --rank="*" sh -c "*) exec rsh "$(sed -n "${{2#--rank=}}p" hosts)" "$5" ;;
    "--parent batch "*) if [ -e refused ]; then exit 1; fi; echo "MPIPS_RUN=$MPIPS_RUN" >>calls ;;
esac
"""
PYTHON = f"""{CALLED}
printf '%s\\0' "$@" >args
trap 'echo asked by USR1; exit 85' USR1
trap 'echo asked by TERM; exit 85' TERM
if [ -e code ]; then exit "$(cat code)"; fi
touch begun
while :; do sleep 0.1; done
"""
COMMANDS = {
    "python": PYTHON,
    "rsh": RSH,
    "blaunch": RSH,
    "flux": FLUX,
    "qsub": CALLED.replace("echo", "[ ! -e refused ] && echo"),
    "qstat": "#!/bin/bash\n"
    """awk '{printf "    Resource_List.walltime = 00:%02d:%02d\\n", $1 / 60, $1 % 60}' left\n""",
    "bjobs": '#!/bin/bash\nawk \'{print "0:" int($1 / 60) " L"}\' left\n',
}


def text_of(scheduler: str, words: list[str], options: str = TWO_BY_TWO) -> str:
    args = make_parser().parse_args(["--scheduler", scheduler, *options.split()])
    return script(args, NEED, words, Path("/home/ada/mpips/slurm"))


class Job:
    """A job of a scheduler that only answers, in a folder of its own."""

    def __init__(self, folder: Path, scheduler: str, hosts: list[str]) -> None:
        self.folder, self.scheduler = folder, scheduler
        text = text_of(scheduler, ["--lr", "0.1"])
        self.text = re.sub(r"^export PATH=.*\n", "", text, flags=re.M)
        (folder / "bin").mkdir()
        for name, program in COMMANDS.items():
            executable(folder / "bin" / name, program)
        (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
        self.left(3590)
        (folder / "nodes").write_text("".join(f"{host}\n" * 2 for host in hosts))
        self.env = {
            **environment(), "PBS_JOBID": "17.pbs", "PBS_O_WORKDIR": str(folder),
            "PBS_NODEFILE": str(folder / "nodes"), "LSB_JOBID": "17",
            "LSB_MCPU_HOSTS": " ".join(f"{host} 2" for host in hosts),
            "FLUX_ENCLOSING_ID": "f17", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip

    def left(self, seconds: int) -> None:
        """Say how much is left of the job's time."""
        (self.folder / "left").write_text(f"{seconds}\n")

    def start(self, text: str, run: str = "") -> subprocess.Popen[bytes]:
        """Start the script as the scheduler would; the log is that of LSF's script, too."""
        executable(self.folder / "script", text)
        self.log_file.unlink(missing_ok=True)
        with open(self.log_file, "w") as log:
            return subprocess.Popen(
                ["bash", "script"], cwd=self.folder, env={**self.env, "MPIPS_RUN": run},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ends(self, code: int, text: str = "", run: str = "") -> str:
        """Run the script to its end, by this code; returns its log."""
        assert self.start(text or self.text, run).wait(60) == code, self.log_file.read_text()
        return self.log_file.read_text()

    @property
    def log_file(self) -> Path:
        return self.folder / "long-17.out"

    def calls(self, program: str) -> list[str]:
        """Return how a program was called, without its name."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(program)]

    def submitted(self) -> list[str]:
        """Return the runs with which the script was submitted again."""
        if self.scheduler == "pbs":
            words = [re.fullmatch(r"-v MPIPS_RUN=(\S+) script", c) for c in self.calls("qsub")]
            return [found[1] for found in words if found]
        return [line.removeprefix("MPIPS_RUN=") for line in self.calls("MPIPS_RUN")]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_text(scheduler: str, tmp_path: Path) -> None:
    """Of a job file; shellcheck has nothing to say."""
    options = f"{TWO_BY_TWO} --cpus-per-task 4 --partition wide --account ml"
    text = text_of(scheduler, ["my jobs/a.toml", "--lr", "0.1"], options)
    prefix, _, asked = HEADS[scheduler].partition(" ")
    head = "".join(f"#{prefix} {words}\n" for words in asked.split(", "))
    assert text.startswith(f"#!/bin/bash\n{head}")
    for line in (
        "# 1 server and 3 workers: about 390 MB a worker, 330 MB a server, and 00:02:07 to the end",
        f"export PATH={sys.prefix}/bin:$PATH ",
        "export OMP_NUM_THREADS=4 OPENBLAS_NUM_THREADS=4\n",
    ):
        assert f"\n{line}" in text
    assert " -- 'my jobs/a.toml' --lr 0.1 --out \"$run\" --resume auto &\n" in text
    if shutil.which("shellcheck"):
        (tmp_path / "job.sh").write_text(text)
        check = ["shellcheck", str(tmp_path / "job.sh")]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_program() -> None:
    """Its time and memory are not known, and its folder is its own to name."""
    text = write(["--nodes", "2", "--job-name", "mine", "--", "python", "my model/train.py", "--x"])
    assert text.endswith("\nprepare\ntrain 'my model/train.py' --x\n")
    for line in ("time=24:00:00", "mem-per-cpu=2G", "job-name=mine", "signal=B:USR1@180"):
        assert f"\n#SBATCH --{line}\n" in text
    text = write(["--scheduler", "pbs", "--time", "30", "--", "-m", "my.training", "--x"])
    assert "\n#PBS -N my.training\n" in text
    assert " -- -m my.training --x &\n" in text
    assert "\n#PBS -l walltime=1800\n" in text
    for words, told in (
        (["--", "ls"], "-- ls, expected program.py or -m MODULE behind --"),
        (["--lr", "1", "--", "a.py"], "--lr with a program, expected options of sbatch"),
        (["--sweep", "t", "--", "a.py"], "--sweep with a program"),
        (["--scheduler", "lsf", "--gres", "gpu:1"], "--gres with --scheduler lsf, expected SLURM"),
        (["--scheduler", "pbs", "--sweep", "slurm/sweep.txt"], "--sweep with --scheduler pbs"),
        (["--scheduler", "nqs"], "invalid choice: 'nqs'"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            write(words)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_how_a_job_ends(scheduler: str, tmp_path: Path) -> None:
    """By the code of the supervisor; asked to save, it is submitted again, but not if killed."""
    job, out = Job(tmp_path, scheduler, ["east"]), RUNS[scheduler]
    again = [out] if scheduler != "lsf" else []
    for code in (0, 1, 2, 85):
        (tmp_path / "code").write_text(f"{code}")
        job.ends(code)
        assert job.submitted() == (again if code == 85 else [])
    words = f"--timeout 0 --restarts 100 -- --lr 0.1 --out {out} --resume auto"
    assert job.calls("python")[-1] == f"-m mpips.launch -n 2 {words}"
    if again:
        (tmp_path / "refused").touch()
        assert f"submit it with MPIPS_RUN={out} in its" in job.ends(1)
        (tmp_path / "refused").unlink()
        (tmp_path / "code").write_text("0")
        job.ends(0, run="runs/other")
        assert job.calls("python")[-1].endswith("--lr 0.1 --out runs/other --resume auto")
    (tmp_path / "code").write_text("85")
    (tmp_path / f"{out}.links").write_text("17\n" * 100)
    job.ends(1)
    (tmp_path / f"{out}.links").unlink()

    (tmp_path / "code").unlink()  # it runs until it is asked to end
    job.left(180)
    assert "180 s left, expected more than 181, as the ranks need 121" in job.ends(2)
    late = job.text.replace("((seconds <= 181))", "((seconds <= 0))").replace("- 121", "-178")
    assert "asked by USR1" in job.ends(85, late)
    job.left(3590)
    (tmp_path / "begun").unlink()
    shell = job.start(job.text)
    until((tmp_path / "begun").exists, 30, job.log_file.read_text)
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(60) == 143
    assert "asked by TERM" in job.log_file.read_text()
    assert job.submitted() == again * 2


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_hosts_of_a_job(scheduler: str, tmp_path: Path) -> None:
    """The supervisor is told of them, and how to run a command there, if not by ssh."""
    job = Job(tmp_path, scheduler, ["east", "west"])
    (tmp_path / "code").write_text("0")
    job.ends(0)
    words = (tmp_path / "args").read_text().split("\0")[2:]
    assert words[:2] == ["--hosts", "east:2,west:2"]
    assert ("--rsh" in words) is (scheduler != "pbs")
    if "--rsh" in words:
        rsh = shlex.split(words[words.index("--rsh") + 1])
        command = [*rsh, "-q", "west", "echo", "'a  b'"]
        told = subprocess.check_output(command, env=job.env, cwd=tmp_path, text=True)
        assert told == "a  b\n"
        assert [call for name in ("blaunch", "rsh") for call in job.calls(name) if "west" in call]
