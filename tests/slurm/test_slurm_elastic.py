"""`slurm/train.sbatch` on a real SLURM, in an allocation that goes on without a node."""

import os
import re
import signal
from pathlib import Path

import pytest
from runs import summary
from slurm_cluster import SlurmCluster, until
from slurm_jobs import HELD, LAUNCHERS, TEN, TRAIN, Submitted

from mpips.checkpoint.run_folder import noted_ranks
from mpips.launch.mpirun import is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.slurm]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_crashed_node_of_an_allocation(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path
) -> None:
    """With --no-kill the job is not requeued: it goes on with the ranks of the other nodes.

    By Open MPI's mpirun the death of a worker alone is no reason to start again.
    """
    words = ("--nodes=3", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=15", "--no-kill")
    names = ("-w", "n1,n2,n3", f"--export=ALL,LAUNCHER={launcher},MPIPS_ELASTIC=3")
    by_mpirun = launcher == "mpirun"
    mode = ("--mode", "async" if by_mpirun else "sync")
    job = Submitted(slurm, tmp_path, *words, *names, TRAIN, *HELD, *TEN, *mode)
    job.wait_until_saved()
    if by_mpirun and is_open_mpi():
        os.kill(noted_ranks(job.out)[5][1], signal.SIGKILL)
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
