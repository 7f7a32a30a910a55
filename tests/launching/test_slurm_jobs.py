"""What the supervisor knows of a job of SLURM, without one."""

from pathlib import Path

import pytest

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
    plugin = slurm.Plugin(launcher.split())
    assert plugin.is_used is used
    assert plugin.trouble() == ""
    with log.open("a") as file:
        file.write("all is well\nerror: mpi/pmi2: invalid client request\n")
    assert bool(plugin.trouble()) is used
    assert plugin.trouble() == ""


def test_a_log_that_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LOG", Path("/dev/null"))
    assert slurm.Plugin(["srun", "--mpi=pmi2"]).trouble() == ""


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
