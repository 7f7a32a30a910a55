"""What the supervisor knows of a job of SLURM, without one."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

from mpips.launch import slurm


@pytest.mark.parametrize(
    ("launcher", "used"),
    [
        ("srun --mpi=pmi2", True),
        ("srun --mpi=pmi2 --mpi=cray_shasta", False),
        ("srun --mpi=pmix", False),
        ("mpirun --mpi=pmi2", False),
    ],
)
def test_what_the_plugin_says(
    launcher: str, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log of the job, from this start on."""
    log = tmp_path / "log"
    log.write_text("error: mpi/pmi2: invalid client request\n")
    monkeypatch.setattr(slurm, "LOG", log)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    step = slurm.Step(launcher.split())
    assert step.is_by_pmi2 is used
    assert step.trouble() == ""
    with log.open("a") as file:
        file.write("all is well\nerror: mpi/pmi2: invalid client request\n")
    assert bool(step.trouble()) is used


KILLED = [
    "slurmstepd-n1: error: StepId=1.2 exceeded memory limit (127 > 125), being killed",
    "slurmstepd: error: Exceeded job memory limit",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been",
    "srun: error: n1: task 0: Out Of Memory",
]


@pytest.mark.parametrize("line", KILLED)
def test_a_kill_for_memory(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is SLURM's word, not that of a program; whatever else the ranks died of."""
    log = tmp_path / "log"
    log.write_text("torch: CUDA out of memory\n")
    monkeypatch.setattr(slurm, "LOG", log)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    step = slurm.Step(["srun", slurm.PMI2])
    with log.open("a") as file:
        file.write("torch: CUDA out of memory\nsrun: error: mpi/pmi2: invalid client request\n")
    assert step.trouble() == slurm.UNREAD
    with log.open("a") as file:
        file.write(f"{line}\n")
    assert step.trouble() == slurm.OUT_OF_MEMORY


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
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
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


def test_a_log_that_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LOG", Path("/dev/null"))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert slurm.Step(["srun", slurm.PMI2]).trouble() == ""


def test_folders_of_a_start_that_slurm_has_ended(tmp_path: Path) -> None:
    """Of this job alone, and not of another supervisor of this start."""
    first, third = ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": k} for k in "02")
    assert slurm.folder_prefix("mpips-launch-", {}) == "mpips-launch-"
    names = [slurm.folder_prefix("mpips-launch-", v) + "ab_1" for v in (first, third)]
    names += ["mpips-launch-ab_1", "mpips-launch-170.0-ab_1", "other-17.0-ab_1"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "current").touch()
    slurm.remove_left(tmp_path, "mpips-launch-", first)
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    slurm.remove_left(tmp_path, "mpips-launch-", third)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
    slurm.remove_left(tmp_path, "mpips-launch-", {})
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
    slurm.remove_left(tmp_path, "mpips-launch-", third, is_over=True)
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])
