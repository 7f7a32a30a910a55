"""What the supervisor knows of a job of SLURM, without one."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, executable

from mpips.launch import slurm

UNREAD = "srun: error: mpi/pmi2: invalid client request"
KILLED = [
    "slurmstepd-n1: error: StepId=1.2 exceeded memory limit (127 > 125), being killed",
    "slurmstepd: error: Exceeded job memory limit",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been",
    "srun: error: n1: task 0: Out Of Memory",
]
BY_PMI2 = "srun --mpi=pmi2"


@pytest.mark.parametrize(
    ("launcher", "line", "trouble"),
    [
        (BY_PMI2, UNREAD, slurm.UNREAD),
        ("srun --mpi=pmi2 --mpi=cray_shasta", UNREAD, ""),
        ("srun --mpi=pmix", UNREAD, ""),
        ("mpirun --mpi=pmi2", UNREAD, ""),
        (BY_PMI2, "torch: CUDA out of memory", ""),
        *((BY_PMI2, f"{UNREAD}\n{line}", slurm.OUT_OF_MEMORY) for line in KILLED),
    ],
)
def test_what_slurm_says(
    launcher: str, line: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log of the job, from this start on; a kill for memory is its word alone."""
    log = tmp_path / "log"
    log.write_text(f"{UNREAD}\n{KILLED[0]}\n")
    monkeypatch.setattr(slurm, "LOG", log)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    step = slurm.Step(launcher.split())
    assert step.is_by_pmi2 is (launcher == BY_PMI2)
    assert step.trouble() == ""
    with log.open("a") as file:
        file.write(f"all is well\n{line}\n")
    assert step.trouble() == trouble
    monkeypatch.setattr(slurm, "LOG", Path("/dev/null"))
    assert slurm.Step(launcher.split()).trouble() == ""


SRUN = f"""#!/bin/bash
case $* in
    *mpips.launch.rank*)
        echo "{KILLED[0]}" >&2
        exit 137 ;;
esac
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


@pytest.mark.launch
def test_a_start_that_is_killed_for_memory(tmp_path: Path) -> None:
    """The launcher stays the same, the remedy is named, and nothing is left."""
    host = platform.node()
    for name, text in (("srun", SRUN), ("scontrol", f"#!/bin/sh\necho {host}\n")):
        executable(tmp_path / name, text)
    known = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": host, "SLURM_TASKS_PER_NODE": "2"}
    env = {**environment(), **known}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    words = ["--hosts", "slurm", "--restarts", "1", "--mpirun", "srun --mpi=pmi2", "--"]
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "mpips.launch", *words, "--problem", "softmax"]
        done = subprocess.run(command, cwd=tmp_path, env=env, stderr=log, timeout=120, check=False)
    told = (tmp_path / "log").read_text()
    assert done.returncode == 1, told
    assert told.count("SLURM has killed ranks for memory; give sbatch a larger --mem-per-cpu") == 3
    assert "mpiexec" not in told
    assert {path.name for path in tmp_path.iterdir()} == {"srun", "scontrol", "log"}
