"""Job scripts in a shell, with schedulers that only answer: what they decide, and what they say.

`mpips.launch` is the lines of a test in the place of a supervisor. Programs of a scheduler note how
they are called.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launch import ROOT, environment, executable, until
from test_sbatch import NEED, SCHEDULERS, TWO_BY_TWO, text_of

from mpips.launch.mpirun import family

SCRIPTS = ROOT / "slurm"
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>calls
told() { rm "$1" 2>/dev/null && kill -TERM $PPID $$; }    # by SLURM, as all processes of the job
case $* in
    "-o show job "*)
        told cancelled && sed -i 's/^JobState=.*/JobState=COMPLETING/' job
        paste -sd ' ' job ;;
    "show job "*) cat job ;;
    "show config") echo "TaskPlugin = task/none" ;;
    requeue*)
        if [ -e refused ]; then exit 1; fi
        if rm late 2>/dev/null; then echo "Unexpected message received for job 17" >&2; exit 1; fi
        sed -i 's/^Restarts=.*/Restarts=9/' job; (sleep 0.5; kill -TERM $PPID) &
        told queued ;;
esac
"""
SRUN = """#!/bin/bash
echo "$(basename "$0") $*" >>calls
case $* in
    --mpi=list) echo "MPI plugin types are... none pmi2 pmix" ;;
    *" bash -c "*)
        while [ "$1" != bash ]; do shift; done
        exec "$@" ;;
esac
"""
PYTHON = f"""#!/bin/bash
case $* in    # what takes long and is the same in every test
    "-c import mpips, mpi4py") ;;
    "-c import jinja2, matplotlib") [ -e draws ] ;;
    "-m mpips report "*) echo "report ${{*:3}}" >>calls; cat draws; [ -s draws ] ;;
    "-c import mpi4py"*)
        if rm asked 2>/dev/null; then kill -TERM $PPID $$; fi
        echo "${{LIBRARY-MPICH Version: 5.0.2}}" ;;
    "-m mpips.train --lr"?*" --print-config") echo "eval_only = false" ;;
    "-m mpips.launch.job "*)
        if rm early 2>/dev/null; then kill -USR1 $PPID; exec sleep 20; fi
        if [ -e late.py ]; then exec {sys.executable} late.py "${{@:3}}"; fi
        exec {sys.executable} "$@" ;;
    "-m mpips.launch "*)
        echo "launch ${{*:3}}" >>calls
        for word; do if [ "$last" = --out ]; then out=$word; fi; last=$word; done
        begin() {{ mkdir -p "$out"; touch "$out/config.toml"; }}
        save() {{
            at=$out/checkpoints/$(printf "step-%012d" "$((10#$1))")
            mkdir -p "$at"; touch "$at/index.h5"
        }}
        . ./ranks ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
SHOWN = {
    "JobState": "RUNNING", "Reason": "None", "Restarts": "0", "TimeLimit": "01:00:00",
    "PreemptTime": "None", "Command": "",
}  # fmt: skip


class Shell:
    """A folder in which a job script runs in a shell, with programs that only answer."""

    def __init__(self, folder: Path, programs: Mapping[str, str], log: str = "log") -> None:
        self.folder, self.log_file = folder, folder / log
        (folder / "bin").mkdir()
        for name, text in programs.items():
            executable(folder / "bin" / name, text)

    def begin(self, text: str, env: Mapping[str, str], *words: str) -> subprocess.Popen[bytes]:
        """Start a script as a scheduler would."""
        (self.folder / "script").write_text(text)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        with open(self.log_file, "w") as log:
            return subprocess.Popen(
                ["bash", "script", *words], cwd=self.folder,
                env={**environment(), "PATH": path, **env},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def calls(self, program: str) -> list[str]:
        """Return how a program was called, without its name."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(program)]


class Batch(Shell):
    """A batch shell of job 17, once it has run: exit code or signal, output, processes left."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {"scontrol": SCONTROL, "srun": SRUN, "python": PYTHON})
        self.out = folder / "runs" / "mpips-17"
        self.code, self.log, self.left = 0, "", list[int]()

    @property
    def requeued(self) -> list[str]:
        """The jobs that were put back into the queue."""
        return [c.split()[1] for c in self.calls("scontrol") if c.startswith("requeue")]

    def run(
        self, *words: str, ranks: str = "", script: Path = SCRIPTS / "train.sbatch",
        copy: str = "", env: dict[str, str] | None = None, shown: dict[str, str] | None = None,
    ) -> "Batch":  # fmt: skip
        """Run a script, or its `copy`, as SLURM would; `ranks`, in bash, are the supervisor."""
        fields = {**SHOWN, "Command": " ".join([str(script), *words]), **(shown or {})}
        (self.folder / "job").write_text("".join(f"{k}={v}\n" for k, v in fields.items()))
        (self.folder / "ranks").write_text(ranks)
        known = {
            "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "mpips", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_SUBMIT_DIR": f"{self.folder}",
        }  # fmt: skip
        env = {**known, "LAUNCHER": "srun", **(env or {})}
        shell = self.begin(copy or script.read_text(), env, *words)
        self.code, self.log = shell.wait(60), self.log_file.read_text()
        self.left = family(shell.pid)
        return self


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


LATE = """
import os, runpy, sys

class Late:
    def __del__(self, kill=os.kill, shell=os.getppid(), job=os.getpid()):
        kill(shell, 15)
        kill(job, 15)

sys.late = Late()
runpy.run_module("mpips.launch.job", run_name="__main__", alter_sys=True)
"""
SAVED, END = "begin; save 0000000003; exit 85", r"\n\Z"  # of a log


ONWARD = "--out runs/mpips-17"
NOT_DONE = rf"not done: (step \d+|nothing) is saved in runs/mpips-17\n(.|\n)* requeued{END}"
ASKED_LATE = "begin; save 3; trap '' USR1; kill -USR1 $PPID; sleep 0.3; exit 1"
COMPLETING = {"JobState": "COMPLETING"}
SHORT, NODE_DOWN = {"TimeLimit": "00:04:00"}, {"Reason": "NodeDown", "Restarts": "1"}
ONCE = {"SLURM_RESTART_COUNT": "1", "MPIPS_MAX_REQUEUES": "1"}


@pytest.mark.parametrize(
    ("ranks", "known", "code", "requeued", "told"),
    [
        # The supervisor has tried again what is worth it.
        ("begin; save 5; exit 1", {}, 1, [], "ended with 1\n"),
        ("exit 2", {}, 2, [], "ended with 2\n"),
        # What is left to do is requeued.
        (SAVED, {"TimeLimit": "UNLIMITED"}, 85, ["17"], NOT_DONE),
        (ASKED_LATE, {}, 85, ["17"], NOT_DONE),
        (SAVED, ONCE, 85, [], f"requeued 1 time, MPIPS_MAX_REQUEUES is 1; go on with {ONWARD}"),
        (SAVED, {"MPIPS_MAX_REQUEUES": "many"}, 2, [], "mpips: MPIPS_MAX_REQUEUES 'many', exp"),
        # SLURM asks the ranks to save as soon as they begin, in each of a hundred tries.
        (SAVED, SHORT, 2, [], "a time limit of 240 s, expected more than 240 s, as the .*; give "),
        (SAVED, {**SHORT, "SBATCH_SIGNAL": "B:USR1@30"}, 85, ["17"], NOT_DONE),
        # SLURM ends the job, also as it is asked about: by signals to all of its processes.
        (SAVED, {**COMPLETING, **NODE_DOWN}, 85, [], f" requeued{END}"),
        (SAVED, {"Restarts": "1"}, 85, [], f" requeued{END}"),  # and runs on another node
        (SAVED, COMPLETING, 1, [], f"cancelled; go on with {ONWARD}{END}"),
        (f"touch cancelled; {SAVED}", {}, 1, [], f"cancelled; go on with {ONWARD}{END}"),
        (f"touch queued; {SAVED}", {}, 85, ["17"], NOT_DONE),
        (f"touch refused; {SAVED}", {}, 85, ["17"], f"cannot be requeued; submit .* {ONWARD}"),
        (f"touch late; {SAVED}", {}, 85, ["17"] * 2, NOT_DONE),  # a controller with much to do
    ],
)
def test_how_a_job_ends(
    ranks: str, known: dict[str, str], code: int, requeued: list[str], told: str, batch: Batch
) -> None:
    """By its supervisor's exit code and by what SLURM says; no process is left."""
    shown = {name: value for name, value in known.items() if name in SHOWN}
    env = {name: value for name, value in known.items() if name not in SHOWN}
    batch.run("--lr", "0.1", ranks=ranks, env=env, shown=shown)
    assert (batch.code, batch.requeued) == (code, requeued), batch.log
    assert re.search(told, batch.log), batch.log
    assert "cannot be requeued" in told or "cannot be requeued" not in batch.log
    assert bool(batch.calls("launch")) is (code != 2 or "exit 2" in ranks)
    assert not batch.left
    assert not [call for call in batch.calls("launch") if "--elastic" in call]


def test_what_the_supervisor_is_told(batch: Batch) -> None:
    """With --elastic only if that is asked for: it changes what is computed."""
    batch.run("--lr", "0.1", ranks="exit 0", env={"MPIPS_ELASTIC": "6"})
    how = "--hosts slurm --timeout 0 --restarts 100 --elastic 6 --mpirun srun --mpi=pmi2"
    words = f"{how} --kill-on-bad-exit=0 --wait=15 -- --lr 0.1 --out runs/mpips-17"
    assert batch.calls("launch") == [words]
    assert batch.run(ranks="exit 3", script=SCRIPTS / "doctor.sbatch").code == 3
    assert batch.calls("launch")[1].endswith("-- -m mpips doctor")
    done = 'begin; touch "$out/DONE"; exit 0'
    batch.run("--lr", "0.1", ranks=done, env={"SLURM_JOB_NAME": "a/b c"})
    assert (batch.folder / "runs" / "a-b c-17" / "DONE").exists()
    assert "done: runs/a-b c-17\n" in batch.log


def test_run_that_has_ended_is_drawn(batch: Batch) -> None:
    """Done or failed, where there is a run and the extra; it changes no exit code."""
    draws = batch.folder / "draws"
    draws.write_text("page.html: 1 run\n")
    batch.run("--lr", "0.1", ranks=SAVED)
    assert not batch.calls("report")
    for code, told in ((0, "page.html: 1 run\n"), (1, "no report of runs/mpips-17\n")):
        assert batch.run("--lr", "0.1", ranks=f"begin; exit {code}").code == code
        assert f" {told}" in batch.log
        draws.write_text("")  # drawing fails
    assert batch.calls("report") == ["report runs/mpips-17 -o runs/mpips-17/report.html"] * 2
    draws.unlink()
    assert "report" not in batch.run("--lr", "0.1", ranks="begin; exit 0").log


def tries(batch: Batch, ranks: str) -> None:
    """Run a job three times, as SLURM does that puts it back into the queue."""
    for k in range(3):
        env, shown = {"SLURM_RESTART_COUNT": f"{k}"}, {"Restarts": f"{k}"}
        batch.run("--lr", "0.1", ranks=f"k={k}; {ranks}", env=env, shown=shown)
        assert ("giving up" in batch.log) is (k == 2)
    assert batch.requeued == ["17", "17"]


def test_job_that_is_asked_to_save_at_once_gives_up(batch: Batch) -> None:
    """Though each try gets a little further: a notice that only SLURM knows is too long."""
    tries(batch, "begin; save $k; kill -USR1 $(ps -o ppid= $$); sleep 0.3; exit 85")
    assert "SIGUSR1: asking the ranks to save" in batch.log
    assert "within a minute of its start 3 times: giving up; give a longer --time" in batch.log


def test_job_that_crashes_in_each_try_gives_up(batch: Batch) -> None:
    """In the start, before there is a run; a try that is ended from outside does not count."""
    noted = Path(f"{batch.out}.tries")
    for how in ("kill -USR1 $PPID; sleep 5", "kill -KILL $PPID"):
        batch.run("--lr", "0.1", ranks=how)
        assert (batch.requeued, noted.exists()) == (["17"], False)
        assert "--mem-per-cpu" not in batch.log
    (batch.folder / "calls").unlink()
    tries(batch, "exit 137")
    assert "nothing is saved in 3 tries that ended by themselves: giving up; see" in batch.log
    assert "--mem-per-cpu" in batch.log
    noted.unlink()
    (batch.folder / "calls").unlink()
    tries(batch, "exit 85")  # its nodes cannot be used
    assert batch.code == 1
    assert not batch.out.exists(), "a run begins in an empty folder"
    assert noted.exists()
    batch.run("--lr", "0.1", ranks="begin; exit 0")
    assert not noted.exists()


def test_signal_before_the_ranks_start_or_at_the_end(batch: Batch) -> None:
    """Before there is a process that could note it, and before that process can."""
    text = (SCRIPTS / "train.sbatch").read_text()
    batch.run("--lr=1", copy=text.replace("\nprepare\n", "\nprepare\nkill -USR1 $$\n"))
    assert batch.requeued == ["17"]
    (batch.folder / "early").touch()
    batch.run("--lr=1")
    assert batch.requeued == ["17", "17"]
    assert "SIGUSR1 before the ranks were started\n" in batch.log
    (batch.folder / "asked").touch()
    batch.run("--lr=1")
    assert batch.requeued == ["17"] * 3, "SLURM signals all processes of a job"
    assert not batch.calls("launch")
    assert not batch.left
    (batch.folder / "late.py").write_text(LATE)
    batch.run("--lr", "0.1", ranks="begin; exit 0")
    assert (batch.code, len(batch.calls("launch"))) == (0, 1), "nothing begins again"


def test_texts_and_evaluations_are_not_tried_again(batch: Batch) -> None:
    """A text is printed and nothing else; an explanation is that of the world."""
    batch.run("--seed", "1", "--lr", "0.1", "--print-config", ranks=SAVED)
    assert (batch.code, batch.calls("launch"), batch.requeued) == (0, [], [])
    assert "\nlr = 0.1" in batch.log
    batch.run("--explain", "--ranks", "8")
    assert (batch.code, batch.calls("launch")) == (0, [])
    assert "the bottleneck is" in batch.log
    batch.run("--explain", ranks="echo explained")
    assert (batch.code, batch.requeued) == (0, [])
    assert "explained" in batch.log
    assert "--out" not in batch.calls("launch")[-1]
    batch.run("--lr=1", "--eval-only", "--init-from", "x", ranks="exit 85")
    assert (batch.code, batch.requeued) == (85, []), "there is no run that could go on"


def test_chain(batch: Batch) -> None:
    """Each link goes on from the one before, and one that comes too late has nothing to do."""
    done = 'begin; touch "$out/DONE"; exit 0'
    for ranks, code in (("begin; exit 1", 1), (SAVED, 0), (done, 0), ("exit 1", 0)):
        assert batch.run("--lr=1", ranks=ranks, script=SCRIPTS / "chain.sbatch").code == code
    assert "runs/mpips is done; for another run" in batch.log
    assert len(batch.calls("launch")) == 3
    assert all(" -- --lr=1 --out runs/mpips" in call for call in batch.calls("launch"))
    assert batch.requeued == []


@pytest.mark.parametrize("place", ["beside", "submitted", "installed"])
def test_scripts_anywhere(place: str, batch: Batch) -> None:
    """Below a folder with a space, a copy of one, and `sbatch < script`."""
    own = batch.folder / "my clone" / "slurm"
    shutil.copytree(SCRIPTS, own)
    script, shown, env = own / "train.sbatch", {}, {}
    if place == "submitted":
        shown, env = {"Command": "(null)"}, {"SLURM_SUBMIT_DIR": str(own.parent)}
    if place == "installed":
        script = Path(shutil.copy(script, batch.folder / "copied.sh"))
    batch.run("jobs/no.toml", script=script, shown=shown, env=env)
    assert batch.code == 2
    assert "'jobs/no.toml' not found" in batch.log


@pytest.mark.parametrize(
    ("launcher", "ranks_a_node", "pinned"),
    [("srun", "4000", "off"), ("mpirun", str(len(os.sched_getaffinity(0))), "domain 1")],
)
def test_intel_mpi(launcher: str, ranks_a_node: str, pinned: str, batch: Batch) -> None:
    """It pins ranks unless told; of its launchers mpirun, a script, would die of a signal."""
    env = {"LIBRARY": "Intel(R) MPI Library 2021.18.1", "LAUNCHER": launcher}
    env |= {"SLURM_NTASKS_PER_NODE": ranks_a_node}
    batch.run("--lr=1", ranks='echo "pins ${I_MPI_PIN-domain $I_MPI_PIN_DOMAIN}"', env=env)
    assert f"\npins {pinned}\n" in batch.log
    words = "srun --mpi=pmi2 " if launcher == "srun" else "mpiexec.hydra -- "
    assert f"--mpirun {words}" in batch.calls("launch")[0]


def test_library_that_only_the_site_knows(batch: Batch) -> None:
    """Its launcher is that of site.sh, with the plugin that is named there."""
    known = {"LIBRARY": "MPI VERSION : CRAY", "LAUNCHER_FLAGS": "--mpi=cray_shasta"}
    batch.run("--lr=1", ranks="exit 0", env=known)
    words = "--mpirun srun --kill-on-bad-exit=0 --wait=15 --mpi=cray_shasta -- "
    assert words in batch.calls("launch")[0]
    assert batch.run("--lr=1", env={**known, "LAUNCHER": ""}).code == 2
    assert "library 'MPI VERSION : CRAY', expected MPICH, Open MPI or one of their" in batch.log


def test_environment_of_the_ranks(batch: Batch) -> None:
    """It is that of the shell, and what slurm/site.sh sets, where mpips can be imported."""
    batch.run("--lr=1", ranks="echo to ${SLURM_EXPORT_ENV-all}", env={"SLURM_EXPORT_ENV": "NONE"})
    assert "\nto all\n" in batch.log
    site = batch.folder / "my clone" / "slurm" / "site.sh"
    shutil.copytree(SCRIPTS, site.parent)
    odd = "trap 'echo removes its files' EXIT\nfalse\n[ -d no ] && cd no\n"
    site.write_text(f"LAUNCHER=mpirun LAUNCHER_FLAGS='-genv A B'\n{odd}")
    batch.run("--lr=1", ranks="exit 2", script=site.with_name("train.sbatch"))
    assert re.search(r"4 ranks on \S+ by mpirun .*-genv A B$", batch.log, re.M)
    assert batch.log.endswith("\nremoves its files\n")
    site.write_text("exit\n")
    batch.run("--lr=1", script=site.with_name("train.sbatch"))
    assert batch.code == 2, "it would look as if it had trained"
    assert f"mpips: {site} ends this shell, expected no exit\n" in batch.log
    site.write_text("PATH=/usr/bin:/bin\n")
    batch.run("--lr=1", script=site.with_name("train.sbatch"))
    assert batch.code == 2
    assert re.search(r"mpips: .* cannot import mpips, expected one that can; act", batch.log)


def test_program_of_the_user(batch: Batch) -> None:
    """Requeued if it was asked to save, and only then; its folder is its own to name."""
    for code, requeued in ((0, []), (1, []), (85, ["17"])):
        batch.run("mine.py", "--x", ranks=f"exit {code}")
        assert (batch.code, batch.requeued) == (code, requeued), batch.log
    batch.run("mine.py", "--x", ranks=ASKED_LATE)
    assert batch.requeued == ["17"] * 2, "it has not saved, and goes on from an earlier step"
    assert batch.calls("launch")[-1].endswith(" -- mine.py --x")
    batch.run("mine.py", ranks="touch refused; exit 85")
    assert "cannot be requeued; submit it again with the same command" in batch.log


ROW_2 = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NAME": "sweep"}


def test_row_of_a_sweep(batch: Batch) -> None:
    """Words in quotes; a row that is refused, or fails, is in the table of results."""
    table, sweep = batch.folder / "my table", batch.folder / "runs" / "sweep-17"

    def row(*more: str, ranks: str = "", **env: str) -> Batch:
        words = (str(ROOT / "jobs" / "digits.toml"), "my table", "--problem", "softmax", *more)
        script = SCRIPTS / "sweep.sbatch"
        return batch.run(*words, ranks=ranks, script=script, env={**ROW_2, **env})

    table.write_bytes(b"--lr 1\r\n# no row\r\n--init-from 'a b' --lr -1\r\n")
    assert row().code == 2
    assert "row 2 of my table: --init-from 'a b' --lr -1\n" in batch.log
    assert "failed (exit code 2)" in (sweep / "results.txt").read_text()
    table.write_text("--lr 1\n--init-from 'a b' --lr 2\n")
    row(ranks=SAVED)
    assert (batch.requeued, list(sweep.glob("*.failed"))) == (["17_2"], [])
    assert "digits.toml --problem softmax --init-from a b --lr 2 --out" in batch.calls("launch")[-1]
    (batch.folder / "draws").write_text("drawn")
    both = {"SLURM_ARRAY_TASK_COUNT": "2"}
    row("--out", "x", ranks="exit 1", **both)
    assert "failed (exit code 1)" in (batch.folder / "x" / "results.txt").read_text()
    assert not batch.calls("report"), "one row of two has ended"
    row("--out", "x", ranks="begin; touch $out/DONE; exit 0", SLURM_ARRAY_TASK_ID="1", **both)
    assert batch.calls("report") == ["report x -o x/report.html"]
    assert row(SLURM_ARRAY_TASK_ID="0").code == 2, "rows are counted from 1"


def test_scratch(batch: Batch) -> None:
    """Copied once, again when it has changed or was cut; Python starts from the copy."""
    home, disk = batch.folder / "my home", batch.folder / "disk"
    (home / "venv" / "bin").mkdir(parents=True)
    script = f'#!/bin/bash\n. "{batch.folder}/bin/python"\n'
    python = executable(home / "venv" / "bin" / "python", script)
    data = home / "x.h5"
    data.write_text("one")
    text = (SCRIPTS / "train.sbatch").read_text()
    paths = f"'{disk}' '{home}/venv' '{data}'"
    text = text.replace("\nprepare\n", f"\nprepare\nscratch {paths}\n")
    copy = Path(f"{disk}{data}")

    def run() -> str:
        batch.run("--lr=1", ranks="begin; command -v python; exit 2", copy=text)
        assert f"{disk}{python}\n" in batch.log
        return copy.read_text()

    assert run() == "one"
    data.write_text("three")
    half, left = Path(f"{disk}{home}/venv.copied"), Path(f"{disk}{home}/venv/left")
    half.unlink()  # it was killed as it copied
    left.touch()
    assert run() == "three"
    assert not left.exists()
    written = copy.stat().st_ino
    assert run() == "three"
    assert copy.stat().st_ino == written, "copied once"
    disk.rename(batch.folder / "gone")
    disk.write_text("")
    batch.run("--lr=1", copy=text)
    assert batch.code == 2
    assert f"mpips: --scratch {disk} cannot be filled, expected a folder" in batch.log


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
WAITS = f"""{CALLED}
printf '%s\\0' "$@" >args
trap 'echo asked by USR1; exit 85' USR1
trap 'echo asked by TERM; exit 85' TERM
if [ -e code ]; then exit "$(cat code)"; fi
touch begun
while :; do sleep 0.1; done
"""
COMMANDS = {
    "python": WAITS,
    "rsh": RSH,
    "blaunch": RSH,
    "flux": FLUX,
    "qsub": CALLED.replace("echo", "[ ! -e refused ] && echo"),
    "qstat": "#!/bin/bash\n"
    """awk '{printf "    Resource_List.walltime = 00:%02d:%02d\\n", $1 / 60, $1 % 60}' left\n""",
    "bjobs": '#!/bin/bash\nawk \'{print "0:" int($1 / 60) " L"}\' left\n',
}


class Job(Shell):
    """A job of a scheduler other than SLURM."""

    def __init__(self, folder: Path, scheduler: str, *hosts: str) -> None:
        super().__init__(folder, COMMANDS, "long-17.out")  # as LSF's script names its log
        self.scheduler = scheduler
        text = text_of(f"--scheduler {scheduler} {TWO_BY_TWO}", NEED, ["--lr", "0.1"])
        self.text = re.sub(r"^export PATH=.*\n", "", text, flags=re.M)
        (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
        (folder / "nodes").write_text("".join(f"{host}\n" * 2 for host in hosts))
        self.time_left(3590)
        self.env = {
            "PBS_JOBID": "17.pbs", "PBS_O_WORKDIR": str(folder),
            "PBS_NODEFILE": str(folder / "nodes"), "LSB_JOBID": "17",
            "LSB_MCPU_HOSTS": " ".join(f"{host} 2" for host in hosts), "FLUX_ENCLOSING_ID": "f17",
        }  # fmt: skip

    def time_left(self, seconds: int) -> None:
        """Say how much is left of the job's time."""
        (self.folder / "left").write_text(f"{seconds}\n")

    def ends(self, code: int, text: str = "", run: str = "") -> str:
        """Run the script to its end, by this code; returns its log."""
        shell = self.begin(text or self.text, {**self.env, "MPIPS_RUN": run})
        assert shell.wait(60) == code, self.log_file.read_text()
        return self.log_file.read_text()

    def submitted(self) -> list[str]:
        """Return the runs with which the script was submitted again."""
        if self.scheduler == "pbs":
            words = [re.fullmatch(r"-v MPIPS_RUN=(\S+) script", c) for c in self.calls("qsub")]
            return [found[1] for found in words if found]
        return [line.removeprefix("MPIPS_RUN=") for line in self.calls("MPIPS_RUN")]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_how_a_job_of_another_scheduler_ends(scheduler: str, tmp_path: Path) -> None:
    """By the code of the supervisor; asked to save, it is submitted again, but not if killed."""
    job, out = Job(tmp_path, scheduler, "east"), RUNS[scheduler]
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
    job.time_left(180)
    assert "180 s left, expected more than 181, as the ranks need 121" in job.ends(2)
    late = job.text.replace("((seconds <= 181))", "((seconds <= 0))").replace("- 121", "-178")
    assert "asked by USR1" in job.ends(85, late)
    job.time_left(3590)
    (tmp_path / "begun").unlink()
    shell = job.begin(job.text, job.env)
    until((tmp_path / "begun").exists, 30, job.log_file.read_text)
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(60) == 143
    assert "asked by TERM" in job.log_file.read_text()
    assert job.submitted() == again * 2


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_hosts_of_a_job(scheduler: str, tmp_path: Path) -> None:
    """The supervisor is told of them, and how to run a command there, if not by ssh."""
    job = Job(tmp_path, scheduler, "east", "west")
    (tmp_path / "code").write_text("0")
    job.ends(0)
    words = (tmp_path / "args").read_text().split("\0")[2:]
    assert words[:2] == ["--hosts", "east:2,west:2"]
    assert ("--rsh" in words) is (scheduler != "pbs")
    if "--rsh" in words:
        rsh = shlex.split(words[words.index("--rsh") + 1])
        command = [*rsh, "-q", "west", "echo", "'a  b'"]
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        env = {**environment(), **job.env, "PATH": path}
        assert subprocess.check_output(command, env=env, cwd=tmp_path, text=True) == "a  b\n"
        assert [call for name in ("blaunch", "rsh") for call in job.calls(name) if "west" in call]
