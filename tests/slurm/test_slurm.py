"""`slurm/train.sbatch` on a real SLURM: jobs train, are stopped, go on, and finish."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, until
from runs import assert_same_state, final, newest, summary
from slurm_cluster import SlurmCluster
from slurm_jobs import HELD, HOLDS, LAUNCHERS, SYNC, TEN, TRAIN, TWO_BY_TWO, Submitted

from mpips.checkpoint.run_folder import read_ranks
from mpips.launch.mpirun import is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.slurm]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_digits(launcher: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Trained as the guide says, from another folder than the scripts'."""
    words = ("--nodes=3", "--ntasks-per-node=3", "--mem-per-cpu=600M")
    job = Submitted(slurm, tmp_path, *words, TRAIN, f"{ROOT}/jobs/digits.toml", launcher=launcher)
    job.wait()
    found = summary(job.out)
    assert found["world"] == 9
    assert [len(node["ranks"]) for node in found["nodes"]] == [3] * 3
    assert {node["host"] for node in found["nodes"]} <= set(slurm.names)
    assert found["accuracy"] >= 0.95, job.log()
    assert (job.out / "DONE").exists()
    assert (job.out / "report.html").exists(), job.log()
    plugin = "pmix" if is_open_mpi() else "pmi2"
    assert (f"by srun --mpi={plugin}" if launcher == "srun" else "by mpirun") in job.log()


@pytest.mark.parametrize("launcher", [LAUNCHERS[-1 if is_open_mpi() else 0]])
def test_a_job_that_is_stopped_again_and_again(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path
) -> None:
    """By an urgent job, the time limit, a crashed node, scancel: as if nothing had happened."""
    words = (*TWO_BY_TWO, "-w", "n1,n2", "--signal=B:USR1@40", TRAIN, *HELD, *TEN)
    job = Submitted(slurm, tmp_path, *words, launcher=launcher)
    job.wait_until_saved()
    urgent = ("-p", "urgent", "-N3", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 1")
    assert slurm.wait(slurm.submit(*urgent, cwd=tmp_path), 60, job.told) == "COMPLETED"
    job.wait_until_saved(restarts=1)
    slurm.ask("scontrol", "update", f"jobid={job.id}", "EndTime=now+45")
    job.wait_until_requeued(2)
    slurm.ask("scontrol", "update", f"jobid={job.id}", "TimeLimit=5")
    job.wait_until_saved(restarts=2)
    asked = [int(step) for step in re.findall(r"step (\d+) is saved", job.log())]
    assert job.resumed_steps() == asked
    assert asked[0] > 0
    try:
        slurm.crash("n2")
        job.wait_until_requeued(3)
    finally:
        slurm.wait_idle()
    job.wait_until_saved(restarts=3)
    assert "cancelled;" not in job.log()
    slurm.ask("scancel", job.id)
    assert job.wait("CANCELLED", 30)["Restarts"] == "3"
    hold.unlink()
    step = newest(job.out).step
    after = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *HELD, *TEN, "--out", str(job.out))
    whole = Submitted(slurm, tmp_path, *TWO_BY_TWO, TRAIN, *SYNC, *TEN)
    after.wait()
    whole.wait()
    assert after.resumed_steps() == [step]
    assert HOLDS in job.log()
    assert np.isfinite(final(job.out).read_params()).all()
    assert_same_state(final(whole.out), final(job.out))
    assert (job.out / "DONE").exists()


def test_crashed_node_of_an_allocation(slurm: SlurmCluster, tmp_path: Path, hold: Path) -> None:
    """With --no-kill the job is not requeued: it goes on with the ranks of the other nodes."""
    launcher, mode = ("mpirun", "async") if is_open_mpi() else ("srun", "sync")
    words = ("--nodes=3", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=15", "--no-kill")
    names = ("-w", "n1,n2,n3", f"--export=ALL,LAUNCHER={launcher},MPIPS_ELASTIC=3")
    job = Submitted(slurm, tmp_path, *words, *names, TRAIN, *HELD, *TEN, "--mode", mode)
    job.wait_until_saved()
    if launcher == "mpirun":
        os.kill(read_ranks(job.out)[5][1], signal.SIGKILL)
        until(lambda: "(rank 5 on n3) has died; its " in job.log(), 30, job.told)
        assert not job.resumed_steps()
    try:
        slurm.crash("n2")
        until(lambda: bool(job.resumed_steps()), 120, job.told)
        hold.unlink()
        assert job.wait()["Restarts"] == "0"
    finally:
        slurm.wait_idle()
    assert job.resumed_steps()[0] > 0
    assert re.search(r"4 of 6 ranks on n1:2,n3:2 \(n2: ", job.log())
    found = summary(job.out)
    assert {node["host"]: len(node["ranks"]) for node in found["nodes"]} == {"n1": 2, "n3": 2}
    assert (job.out / "DONE").exists()


@pytest.mark.parametrize("launcher", [LAUNCHERS[-1 if is_open_mpi() else 0]])
def test_an_allocation_that_grows(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path
) -> None:
    """The job moves to the node that it is given, and makes no step twice."""
    words = ("--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=15")
    export = f"--export=ALL,LAUNCHER={launcher},MPIPS_ELASTIC=2"
    each = ("--nodes=1", "-w", "n1", "--no-kill", export, TRAIN, *HELD, "--epochs", "3")
    job = Submitted(slurm, tmp_path, *words, *each)
    job.wait_until_saved()
    slurm.grow(job.id, *words, "--nodes=1", "-w", "n3")
    until(lambda: bool(job.resumed_steps()), 120, job.told)
    hold.unlink()
    assert job.wait()["Restarts"] == "0"
    assert "answering again: n3; on 4 ranks instead of 2 the run would end" in job.log()
    (moved,) = job.resumed_steps()
    assert f"ended: SIGUSR1 at step {moved}," in job.log()
    found = summary(job.out)
    assert {node["host"]: len(node["ranks"]) for node in found["nodes"]} == {"n1": 2, "n3": 2}
    assert (job.out / "DONE").exists()


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


def test_jobs_that_are_not_tried_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """What the ranks refuse, and what they fail at, ends the job with its message and its code."""
    (tmp_path / "raising.py").write_text(RAISING)
    right, wrong = ("pmix", ("none", "pmi2")) if is_open_mpi() else ("pmi2", ("none",))
    got = "a world of 1 rank in a SLURM step of 4 tasks, expected a world of 4"
    refused, raised = "servers=4 leaves no worker in a world of 4", "raised ValueError: mine, exp"
    jobs = [
        ((TRAIN, "--servers", "4"), "2:0", refused),
        ((TRAIN, "--problem", "raising.py:Raising"), "1:0", raised),
    ]
    for plugin in wrong:
        line = f"srun --mpi={plugin} python -m mpips.train --epochs 1 --out wrong"
        words = ("--job-name=mpips", "--output=%x-%j.out", "--wrap", line)
        jobs.append((words, "", f"mpips: {got}; use srun --mpi={right}\n"))
    begun = [Submitted(slurm, tmp_path, *TWO_BY_TWO, *words) for words, *_ in jobs]
    for job, (_, code, message) in zip(begun, jobs, strict=True):
        ended = job.wait("FAILED")
        assert ended["Restarts"] == "0"
        assert message in job.log(), job.told()
        assert ended["ExitCode"] == (code or ended["ExitCode"]), job.told()
    assert not (tmp_path / "wrong").exists()
