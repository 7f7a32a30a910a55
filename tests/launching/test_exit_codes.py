"""Exit codes of jobs whose ranks may go on when others die, where the job cannot."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch import Running
from runs import wait_until_training
from supervised import Supervised

from mpips.launch import mpirun

pytestmark = pytest.mark.launch
survived = pytest.mark.skipif(
    not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die"
)


@survived
@pytest.mark.parametrize(
    ("mode", "dead"), [("async", (0,)), ("sync", (1,)), ("ssp", (0, 1)), ("async", (0, 1, 3))]
)
def test_a_job_that_cannot_go_on_fails(mode: str, dead: Sequence[int], tmp_path: Path) -> None:
    """It ends soon, by 137, as after a kill; one of those that are left says why."""
    words = f"-m mpips.train --mode {mode} --epochs 100000 --checkpoint-every 0.3 --out out"
    with Running(4, words.split(), tmp_path, launcher=mpirun.survivors_launcher()) as job:
        wait_until_training(job, tmp_path / "out", 1)
        ranks = job.ranks()
        for rank in dead:
            os.kill(ranks[rank], signal.SIGKILL)
        done = job.wait(20)
    done.check(137)
    assert done.output.count("died, expected all that this job needs") == 1


def test_an_mpi_that_ends_all_ranks_says_so_before_the_first_step(tmp_path: Path) -> None:
    """Where none dies in vain: a job that is to go on without workers is refused there."""
    if mpirun.survivors_launcher():
        pytest.skip("this MPI lets ranks go on")
    words = ["--mode", "sync", "--out", "out", "--epochs", "1"]
    with Supervised(tmp_path, 2, [*words, "--on-death", "shrink"]) as job:
        told = job.wait(2)
    assert "on_death 'shrink' where this MPI ends all ranks, expected 'restart'; start it" in told
    assert not (tmp_path / "out").exists()
    with Supervised(tmp_path, 2, words) as job:
        told = job.wait(0)
    says = "if a rank dies, this job starts again from its newest checkpoint: mode sync needs"
    assert told.index(says) < told.index("step ")
