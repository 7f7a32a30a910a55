"""`slurm/train.sbatch` on a real SLURM: jobs train, are stopped, go on, and finish."""

import re
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT
from runs import assert_same_state, final, newest, summary
from slurm_cluster import SlurmCluster, until
from slurm_jobs import HELD, HOLDS, LAUNCHERS, SYNC, TEN, TRAIN, TWO_BY_TWO, Submitted

from mpips.launch.mpirun import is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.slurm]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_digits(launcher: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Trained as the guide says, from another folder than the scripts'."""
    nodes = 3
    words = (f"--nodes={nodes}", "--ntasks-per-node=3", "--mem-per-cpu=600M")
    job = Submitted(slurm, tmp_path, *words, TRAIN, f"{ROOT}/jobs/digits.toml", launcher=launcher)
    job.wait()
    found = summary(job.out)
    assert found["world"] == 3 * nodes
    assert [len(node["ranks"]) for node in found["nodes"]] == [3] * nodes
    assert {node["host"] for node in found["nodes"]} <= set(slurm.names)
    assert found["accuracy"] >= 0.95, job.log()
    assert (job.out / "DONE").exists()
    assert (job.out / "report.html").exists(), job.log()
    plugin = "pmix" if is_open_mpi() else "pmi2"
    assert (f"by srun --mpi={plugin}" if launcher == "srun" else "by mpirun") in job.log()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_time_limit(launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """Saved before its limit, requeued, and as if nothing had happened in the end."""
    words = (*TWO_BY_TWO, "--signal=B:USR1@40", TRAIN, *HELD, *TEN)
    job = Submitted(slurm, tmp_path, *words, launcher=launcher)
    job.wait_until_saved()
    slurm.ask("scontrol", "update", f"jobid={job.id}", "EndTime=now+45")
    job.wait_until_requeued()
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
        job.wait_until_requeued(60)
    finally:
        slurm.wait_idle()
    hold.unlink()
    assert job.wait()["Restarts"] == "1"
    assert "cancelled;" not in job.log()
    assert job.resumed_steps()[0] > 0
    assert (job.out / "DONE").exists()


def test_what_ends_a_start_from_outside_does_not_count(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job that is signalled, loses a node, and is signalled again, each before a run began."""
    words = (*TWO_BY_TWO, "-w", "n1,n2", TRAIN, "--problem", "softmax", "--epochs", "1")
    job = Submitted(slurm, tmp_path, *words)
    for restart in range(3):
        until(lambda k=restart: f", restart {k}: " in job.log(), 60, job.told)
        if restart == 1:
            slurm.crash("n2")
        else:
            slurm.ask("scancel", "--batch", "-s", "USR1", job.id)
        restarts = f"{restart + 1}"
        until(lambda n=restarts: slurm.show(job.id).get("Restarts") == n, 60, job.told)
        slurm.wait_idle()
    assert job.wait()["Restarts"] == "3"
    assert job.resumed_steps() == []
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
    """Ranks that die in each attempt, before or after the checkpoint of step 0 was written."""
    (tmp_path / "dying.py").write_text(DYING)
    words = ("--problem", "dying.py:Dying", *SYNC)
    job = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *words)
    assert job.wait("FAILED")["Restarts"] == "0"
    assert re.search(r"(no further than step 0|nothing is saved) in \d attempts", job.log())
    assert not (job.out / "DONE").exists()


DYING = """
import os, signal
from mpips.problems.mlp import MLP

class Dying(MLP):
    def loss_and_grad(self, params, batch, out):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_refused_job_is_not_tried_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """What mpips refuses, and what it fails at, ends the job with its message and its code."""
    (tmp_path / "raising.py").write_text(RAISING)
    diverges = ("--optimizer", "sgd", "--lr", "1e30", "--checkpoint-every", "0.01")
    limit = "mpips: a time limit of 240 s, expected more than 240 s"
    for time, words, code, message in (
        ("5", ("--lr", "-1"), "2:0", "mpips: lr -1.0, expected a number > 0"),
        ("5", ("--servers", "4"), "2:0", "servers=4 leaves no worker in a world of 4"),
        ("5", ("no-such.toml",), "2:0", "'no-such.toml' not found"),
        ("4", ("--lr", "1"), "2:0", limit),
        ("5", diverges, "1:0", "expected a finite loss"),
        ("5", ("--problem", "raising.py:Raising"), "1:0", "raised ValueError: mine, expected no"),
    ):
        job = Submitted(slurm, tmp_path, *TWO_BY_TWO, f"--time={time}", TRAIN, *words)
        assert job.wait("FAILED")["Restarts"] == "0"
        assert message in job.log(), job.told()
        assert job.slurm.show(job.id)["ExitCode"] == code, job.told()


RAISING = """
from mpips.problems.mlp import MLP

class Raising(MLP):
    calls = 0

    def loss_and_grad(self, params, batch, out):
        self.calls += 1
        if self.calls > 5:
            raise ValueError("mine")
        return super().loss_and_grad(params, batch, out)
"""


def test_wrong_mpi_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Without the right --mpi, srun starts as many worlds of one rank as there are tasks."""
    right, wrong = ("pmix", ("none", "pmi2")) if is_open_mpi() else ("pmi2", ("none",))
    for plugin in wrong:
        line = f"srun --mpi={plugin} python -m mpips.train --epochs 1"
        words = (*TWO_BY_TWO, "--job-name=mpips", "--output=%x-%j.out", "--wrap", line)
        job = Submitted(slurm, tmp_path, *words)
        job.wait("FAILED", 40)
        got = "a world of 1 rank in a SLURM step of 4 tasks, expected a world of 4"
        assert f"mpips: {got}; use srun --mpi={right}\n" in job.log()
    assert not (tmp_path / "runs").exists()
