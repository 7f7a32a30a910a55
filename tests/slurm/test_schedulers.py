"""Job scripts for PBS Pro, LSF and Flux: their text, and what they do beside commands that answer.

The commands of a scheduler note how they are called, and run what is for another host there, in
namespaces of its own.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, executable, until
from runs import shared_out, summary
from slurm_jobs import HELD, TEN, newest_step

from mpips.errors import UserError
from mpips.launch.sbatch import make_parser, script, write
from mpips.planning.needs import Needs
from tests.chaos.hosts import UNSHARE, give_an_address, missing

GOLDEN = Path(__file__).parent / "golden"
SCHEDULERS = ("pbs", "lsf", "flux")
NEED = Needs(1, 3, server_bytes=3.3e8, worker_bytes=3.9e8, save_s=0.4, seconds=127)
TWO_BY_TWO = "--nodes 2 --ntasks-per-node 2 --time 1:00:00 --job-name long"
RUNS = {"pbs": "runs/long-17.pbs", "lsf": "runs/long-17", "flux": "runs/long-f17"}

CALLED = '#!/bin/bash\necho "$(basename "$0") $*" >>calls\n'
# As ssh; a host has its name and its shared memory.
RSH = f"""{CALLED}
while [[ $1 == -* ]]; do if [ "$1" = -o ]; then shift; fi; shift; done
exec {" ".join(UNSHARE)} sh -c '
    hostname "$1" && mount -t tmpfs -o mode=1777 shm /dev/shm && exec /bin/sh -c "$2"
' sh "$1" "${{*:2}}"
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
COMMANDS = {
    "ssh": RSH,
    "rsh": RSH,
    "blaunch": RSH,
    "flux": FLUX,
    "qsub": CALLED.replace("echo", "[ ! -e refused ] && echo"),
    "qstat": "#!/bin/bash\n"
    """awk '{printf "    Resource_List.walltime = 00:%02d:%02d\\n", $1 / 60, $1 % 60}' left\n""",
    "bjobs": '#!/bin/bash\nawk \'{print "0:" int($1 / 60) " L"}\' left\n',
}
# Asks for the end of the job as soon as there is a file called limit.
TIMEOUT = f"""{CALLED}
"${{@:5}}" &
pid=$!
trap 'kill -TERM $pid' TERM
while kill -0 $pid 2>/dev/null; do
    if rm limit 2>/dev/null; then kill -USR1 $pid; fi
    sleep 0.1
done
wait $pid
"""
PYTHON = f"""{CALLED}
trap 'echo asked by USR1; exit 85' USR1
trap 'echo asked by TERM; exit 85' TERM
if [ -e code ]; then exit "$(cat code)"; fi
touch begun
while :; do sleep 0.1; done
"""


def text_of(scheduler: str, words: list[str], options: str = TWO_BY_TWO, out: str = "") -> str:
    args = make_parser().parse_args(["--scheduler", scheduler, *options.split()])
    return script(args, NEED, words, Path("/home/ada/mpips/slurm"), out)


class Job:
    """A job of a scheduler that only answers, in a folder of its own."""

    def __init__(self, folder: Path, scheduler: str, hosts: list[str]) -> None:
        self.folder, self.scheduler, self.log = folder, scheduler, ""
        (folder / "bin").mkdir()
        for name, text in COMMANDS.items():
            executable(folder / "bin" / name, text)
        (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
        self.left(3590)
        (folder / "nodes").write_text("".join(f"{host}\n" * 2 for host in hosts))
        self.known = {
            "PBS_JOBID": "17.pbs", "PBS_O_WORKDIR": str(folder),
            "PBS_NODEFILE": str(folder / "nodes"), "LSB_JOBID": "17",
            "LSB_MCPU_HOSTS": " ".join(f"{host} 2" for host in hosts),
            "FLUX_ENCLOSING_ID": "f17",
        }  # fmt: skip

    def left(self, seconds: int) -> None:
        """Say how much is left of the job's time."""
        (self.folder / "left").write_text(f"{seconds}\n")

    def start(self, text: str, run: str = "") -> subprocess.Popen[bytes]:
        """Start the script as the scheduler would; the log is that of LSF's script, too."""
        executable(self.folder / "script", text)
        self.log_file.unlink(missing_ok=True)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = {**environment(), **self.known, "PATH": path, **({"MPIPS_RUN": run} if run else {})}
        with open(self.log_file, "w") as log:
            return subprocess.Popen(
                ["bash", "script"], cwd=self.folder, env=env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

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
    """Of a job file with all that a site may want; shellcheck has nothing to say."""
    options = f"{TWO_BY_TWO} --cpus-per-task 4 --partition wide --account ml"
    text = text_of(scheduler, ["my jobs/a.toml", "--lr", "0.1"], options)
    text = text.replace(f"{sys.prefix}/bin", "/home/ada/.venv/bin")
    assert text == "".join((GOLDEN / name).read_text() for name in (f"{scheduler}.sh", "chain.sh"))
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
    job = Job(tmp_path, scheduler, ["east"])
    text = text_of(scheduler, ["--lr", "0.1"])
    executable(tmp_path / "bin" / "python", PYTHON)
    text = re.sub(r"^export PATH=.*\n", "", text, flags=re.M)
    again = [RUNS[scheduler]] if scheduler != "lsf" else []
    for code in (0, 1, 2, 85):
        (tmp_path / "code").write_text(f"{code}")
        assert job.start(text).wait(60) == code, job.log_file.read_text()
        assert job.submitted() == (again if code == 85 else [])
    words = f"--timeout 0 --restarts 100 -- --lr 0.1 --out {RUNS[scheduler]} --resume auto"
    assert job.calls("python")[-1] == f"-m mpips.launch -n 2 {words}"
    if again:
        (tmp_path / "refused").touch()
        assert job.start(text).wait(60) == 1
        assert f"submit it with MPIPS_RUN={again[0]} in its" in job.log_file.read_text()
        (tmp_path / "refused").unlink()
    (tmp_path / f"{RUNS[scheduler]}.links").write_text("17\n" * 100)
    assert job.start(text).wait(60) == 1
    (tmp_path / f"{RUNS[scheduler]}.links").unlink()

    (tmp_path / "code").unlink()  # it runs until it is asked to end
    job.left(180)
    assert job.start(text).wait(60) == 2
    assert "180 s left, expected more than 181, as the ranks need 121" in job.log_file.read_text()
    shell = job.start(
        text.replace("((seconds <= 181))", "((seconds <= 0))").replace("- 121", "-178")
    )
    assert shell.wait(60) == 85
    assert "asked by USR1" in job.log_file.read_text()
    job.left(3590)
    (tmp_path / "begun").unlink()
    shell = job.start(text)
    until((tmp_path / "begun").exists, 30, job.log_file.read_text)
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(60) == 143
    assert "asked by TERM" in job.log_file.read_text()
    assert job.submitted() == again * 2


@pytest.mark.launch
@pytest.mark.parametrize("scheduler", shared_out(SCHEDULERS, ()))
@pytest.mark.skipif(bool(missing()), reason="namespaces take root")
def test_chain_on_two_nodes(scheduler: str, tmp_path: Path, hold: Path) -> None:
    """Asked to save before the limit, the next link ends the run."""
    give_an_address()
    job = Job(tmp_path, scheduler, ["east", "west"])
    executable(tmp_path / "bin" / "timeout", TIMEOUT)
    text = text_of(scheduler, [*HELD, *TEN])
    shell = job.start(text)
    out = tmp_path / RUNS[scheduler]
    until(lambda: newest_step(out) > 0, 60, job.log_file.read_text)
    (tmp_path / "limit").touch()
    assert shell.wait(60) == 85, job.log_file.read_text()
    saved = newest_step(out)
    left = 3540 if scheduler == "lsf" else 3590
    assert job.calls("timeout")[0].startswith(
        f"--foreground --preserve-status --signal=USR1 {left - 121} python -m mpips.launch --hosts "
        "east:2,west:2 "
    )
    assert job.submitted() == ([] if scheduler == "lsf" else [RUNS[scheduler]])
    hold.unlink()
    shell = job.start(text, *job.submitted())
    assert shell.wait(90) == 0, job.log_file.read_text()
    found = summary(out)
    assert [node["host"] for node in found["nodes"]] == ["east", "west"]
    assert f"resumed at step {saved}" in job.log_file.read_text()
    assert (out / "DONE").exists()
    assert len(Path(f"{out}.links").read_text().splitlines()) == 2
    remote = {"pbs": "ssh", "lsf": "blaunch", "flux": "rsh"}[scheduler]
    assert {"east", "west"} <= {word for call in job.calls(remote) for word in call.split()}
