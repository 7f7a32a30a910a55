"""`mpips.launch` in an allocation of a real SLURM that goes on without a node."""

import re
from pathlib import Path

import pytest
from runs import summary
from slurm_cluster import SlurmCluster, until
from slurm_jobs import HELD, LAUNCHERS, TEN, Submitted

from mpips.launch.mpirun import is_open_mpi

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.slurm]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_crashed_node_of_an_allocation(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, hold: Path
) -> None:
    """With --no-kill the job is not requeued: it goes on with the ranks of the other nodes."""
    starts = f"srun --mpi={'pmix' if is_open_mpi() else 'pmi2'} -K1"
    how = ("--mpirun", f"'{starts}'") if launcher == "srun" else ()
    words = ("--nodes=3", "--ntasks-per-node=2", "--mem-per-cpu=600M", "--time=5", "--no-kill")
    names = ("-w", "n1,n2,n3", "--job-name=mpips", "--output=%x-%j.out")
    command = "python -m mpips.launch --hosts slurm --elastic"
    line = " ".join((command, *how, "--", *HELD, *TEN))
    line += " --out runs/mpips-$SLURM_JOB_ID"
    job = Submitted(slurm, tmp_path, *words, *names, "--wrap", line)
    job.wait_until_saved()
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
    assert {node["host"] for node in found["nodes"]} == {"n1", "n3"}
    assert (job.out / "DONE").exists()
