"""The job scripts on a real SLURM of three nodes: they train, are stopped, go on, and finish."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT
from runs import MODELS, assert_same_state, final, list_checkpoints, newest, summary
from slurm_cluster import SlurmCluster, missing, until

from mpips.launch import is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long]

SCRIPTS = ROOT / "slurm"
TRAIN = str(SCRIPTS / "train.sbatch")
LAUNCHERS = ("srun", "mpirun")
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=5")
# 90 rounds an epoch, of 0.2 s while a file called hold is there; `mlp` does the same without.
SYNC = ("--mode", "sync", "--batch-size", "4", "--hidden", "16", "--eval-every", "0")
HELD = ("--problem", f"{MODELS}:HeldMLP", *SYNC, "--checkpoint-every", "1")
TEN = ("--epochs", "10", "--seed", "3")
HOLDS = "bitwise equality with an uninterrupted run holds"


@pytest.fixture(scope="module")
def slurm(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    why = missing()
    if why and request.config.getoption("--need-slurm"):
        pytest.fail(why)
    if why:
        pytest.skip(why)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """The file that holds the jobs of this test."""
    path = tmp_path / "hold"
    path.touch()
    return path


class Submitted:
    """A job in the queue, its log and its run."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *words: str, launcher: str = "srun"):
        self.slurm, self.folder = slurm, folder
        self.id = slurm.submit(f"--export=ALL,LAUNCHER={launcher}", *words, cwd=folder)
        self.out = folder / "runs" / f"mpips-{self.id}"

    def log(self) -> str:
        """Return what it has printed."""
        path = self.folder / f"mpips-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, text: str, timeout_s: float = 90) -> None:
        """Wait until it has printed a text."""
        until(lambda: text in self.log(), timeout_s, self.told)

    def wait_until_saved(self) -> None:
        """Wait until there is a checkpoint beside that of step 0."""
        until(lambda: newest_step(self.out) > 0, 90, self.told)

    def wait(self, state: str = "COMPLETED", timeout_s: float = 150) -> dict[str, str]:
        """Wait for the end, which must be `state`; returns what SLURM says of the job."""
        found = self.slurm.wait(self.id, timeout_s, self.log)
        assert found == state, self.told()
        return self.slurm.show(self.id)

    def resumed_steps(self) -> list[int]:
        """Return the steps at which its runs went on."""
        return [int(s) for s in re.findall(r"resumed at step (\d+)", self.log())]

    def told(self) -> str:
        """Return all that is known of it."""
        return f"{self.slurm.show(self.id)}\n{self.log()}\n{self.slurm.logs()}"


def newest_step(out: Path) -> int:
    """Return the step of the newest committed checkpoint, -1 if there is none."""
    whole = [p for p in list_checkpoints(out) if (p / "index.h5").exists()]
    return int(whole[-1].name.partition("-")[2]) if whole else -1


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("nodes", [2, 3])
def test_digits(nodes: int, launcher: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Trained as the README says, from another folder than the scripts'."""
    words = (f"--nodes={nodes}", "--ntasks-per-node=3", "--mem-per-cpu=600M")
    job = Submitted(slurm, tmp_path, *words, TRAIN, f"{ROOT}/jobs/digits.toml", launcher=launcher)
    job.wait()
    found = summary(job.out)
    assert found["world"] == 3 * nodes
    assert [len(node["ranks"]) for node in found["nodes"]] == [3] * nodes
    assert {node["host"] for node in found["nodes"]} <= set(slurm.names)
    assert found["accuracy"] >= 0.95, job.log()
    assert (job.out / "DONE").exists()
    plugin = "pmix" if is_open_mpi() else "pmi2"
    assert (f"by srun --mpi={plugin}" if launcher == "srun" else "by mpirun -n") in job.log()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_time_limit(launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """Saved before its limit, requeued, and as if nothing had happened in the end."""
    words = (*TWO_BY_TWO, "--signal=B:USR1@40", TRAIN, *HELD, *TEN)
    job = Submitted(slurm, tmp_path, *words, launcher=launcher)
    job.wait_until_saved()
    slurm.ask("scontrol", "update", f"jobid={job.id}", "EndTime=now+45")
    job.wait_for("requeued", 80)
    hold.unlink()
    slurm.ask("scontrol", "update", f"jobid={job.id}", "TimeLimit=5")
    whole = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *SYNC, *TEN, launcher=launcher)
    assert job.wait()["Restarts"] == "1"
    whole.wait()
    assert job.resumed_steps() == [int(s) for s in re.findall(r"step (\d+) is saved", job.log())]
    assert job.resumed_steps()[0] > 0
    assert HOLDS in job.log()
    assert np.isfinite(final(job.out).read_params()).all()
    assert_same_state(final(whole.out), final(job.out))


def test_preemption(slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """A job of partition urgent takes all nodes; the one that gives way goes on afterwards."""
    job = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *HELD, *TEN)
    job.wait_until_saved()
    words = ("-p", "urgent", "-N3", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 1")
    urgent = slurm.submit(*words, cwd=tmp_path)
    assert slurm.wait(urgent, 60, job.told) == "COMPLETED"
    hold.unlink()
    assert job.wait()["Restarts"] == "1"
    assert job.resumed_steps()[0] > 0
    assert (job.out / "DONE").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_crashed_node(launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """Nobody is asked to save: it goes on from the last checkpoint."""
    words = (*TWO_BY_TWO, "-w", "n1,n2", TRAIN, *HELD, *TEN)
    job = Submitted(slurm, tmp_path, *words, launcher=launcher)
    job.wait_until_saved()
    try:
        slurm.crash("n2")
        until(lambda: slurm.show(job.id).get("Restarts") == "1", 60, job.told)
    finally:
        slurm.wait_idle()
    hold.unlink()
    assert job.wait()["Restarts"] == "1"
    assert job.resumed_steps()[0] > 0
    assert (job.out / "DONE").exists()


def test_scancel(slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """Ends at once with a state that another job can go on from."""
    job = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *HELD, *TEN)
    job.wait_until_saved()
    slurm.ask("scancel", job.id)
    assert job.wait("CANCELLED", 30)["Restarts"] == "0"
    hold.unlink()
    step = newest(job.out).step
    after = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *HELD, *TEN, "--out", str(job.out))
    after.wait()
    assert after.resumed_steps() == [step]
    assert (job.out / "DONE").exists()


def test_job_that_gets_no_further_gives_up(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Ranks that die in each try, before or after the checkpoint of step 0 was written."""
    (tmp_path / "dying.py").write_text(DYING)
    words = ("--problem", "dying.py:Dying", *SYNC)
    job = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *words)
    assert job.wait("FAILED")["Restarts"] in ("2", "3")
    assert re.search(r"no further than step (-1|0) in two tries", job.log())
    assert not (job.out / "DONE").exists()


DYING = """
import os, signal
from mpips.problems.mlp import MLP

class Dying(MLP):
    def loss_and_grad(self, params, batch, out):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_refused_job_is_not_tried_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """What mpips refuses, and what it fails at, ends the job with its message."""
    for words, message in (
        (("--lr", "-1"), "mpips: lr -1.0, expected a number > 0"),
        (("--servers", "4"), "servers=4 leaves no worker in a world of 4"),
        (("no-such.toml",), "'no-such.toml' not found"),
    ):
        job = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *words)
        assert job.wait("FAILED", 40)["Restarts"] == "0"
        assert message in job.log()
        assert job.slurm.show(job.id)["ExitCode"] == "2:0"


def test_wrong_mpi_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Without the right --mpi, srun starts as many worlds of one rank as there are tasks."""
    line = "srun python -m mpips.train --epochs 1"
    words = (*TWO_BY_TWO, "--job-name=mpips", "--output=%x-%j.out", "--wrap", line)
    job = Submitted(slurm, tmp_path, *words)
    job.wait("FAILED", 40)
    right = "pmix" if is_open_mpi() else "pmi2"
    got = "a world of 1 rank in a SLURM step of 4 tasks, expected a world of 4"
    assert f"mpips: {got}; use srun --mpi={right}\n" in job.log()
    assert not (tmp_path / "runs").exists()


def test_scripts_are_clean(slurm: SlurmCluster) -> None:
    """For shellcheck, for sbatch, and in what sbatch lets through."""
    scripts = sorted(SCRIPTS.glob("*.sbatch"))
    assert scripts
    for script in scripts:
        slurm.ask("sbatch", "--test-only", str(script))
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        first = next(k for k, line in enumerate(lines) if line and not line.startswith("#"))
        found = [k for k, line in enumerate(lines) if re.match(r"#+ ?SBATCH", line)]
        assert max(found) < first, f"{script}: a directive after the first command is ignored"
        assert not [k for k in found if "$" in lines[k] or not lines[k].startswith("#SBATCH --")]
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "install shellcheck"
    files = [*scripts, *SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.example")]
    command = [shellcheck, "-x", "-P", "SCRIPTDIR", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
