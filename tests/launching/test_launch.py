"""Worlds that are started: their command line, their folders, and that nothing outlives them."""

import fcntl
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import file_in_shared_memory, python, until

from mpips.errors import UserError
from mpips.launch import mpirun as launch
from mpips.launch.folders import OWNER, OwnFolder, remove_left
from mpips.mpi import segments
from mpips.mpi.process import RANKS, running

MAPS_A_FILE = """
import os, sys, time
import numpy as np
from mpi4py import MPI
mine = np.load(sys.argv[1], mmap_mode="r")
os.write(1, f"up {os.nice(0)}\\n".encode())
time.sleep(600)
"""


def test_the_command_line_of_several_parts() -> None:
    parts = launch.command(5, ["a.py"], ["srun", "--ntasks=1", ":", "--ntasks=4"])
    run = [sys.executable, "a.py"]
    assert parts == ["srun", "--ntasks=1", *run, ":", "--ntasks=4", *run]


def test_the_environment_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a site has said to MPI holds, but not what a launcher has told this process, a rank."""
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "ib0")
    assert launch.environment()["OMPI_MCA_btl_tcp_if_include"] == "ib0"
    for name in (*RANKS, "MPI_LOCALNRANKS", "HOME"):
        monkeypatch.setenv(name, "3")
    found = launch.environment()
    assert found["HOME"] == "3"
    left = [name for name in found if name.startswith(("PMI", "MPI_", "OMPI_"))]
    assert not [name for name in left if not name.startswith("OMPI_ALLOW")]
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(launch.TREE)
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_without_mpirun_the_error_names_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    launch.mpirun.cache_clear()
    try:
        with pytest.raises(UserError, match=r"no mpirun, expected one beside .*; pip install"):
            launch.mpirun()
    finally:
        launch.mpirun.cache_clear()


def wait_for(job: launch.Running, ranks: int) -> tuple[list[int], set[Path]]:
    """Wait until a job's ranks are up; returns their process ids, and the segments they map."""
    until(lambda: job.output().count("up") >= ranks, told=job.output)
    pids = job.ranks()
    assert len(set(pids)) == ranks
    return pids, {segment.path for pid in pids for segment in segments.mapped(pid)}


@pytest.mark.launch
def test_nothing_outlives_a_job_that_lasts_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a user's file in shared memory does. The job is run by a wrapper."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nice = ["nice", "-n", "7"]
    with file_in_shared_memory() as mine:
        args = ["-c", MAPS_A_FILE, str(mine)]
        with launch.Running(3, args, tmp_path, wrapper=nice) as job:
            ranks, found = wait_for(job, 3)
            assert mine in found
            assert len(found) > 1
            sessions = list(tmp_path.glob(f"*/*{job.process.pid}*"))  # Open MPI's
            assert bool(sessions) is launch.is_open_mpi()
            told = rf"still running after 0.1 s:\nup {min(os.nice(0) + 7, 19)}"
            with pytest.raises(TimeoutError, match=told):
                job.wait(0.1)
            assert running([job.process.pid, *ranks]) == []
        assert [path for path in found if path.exists()] == [mine]
    assert not list(tmp_path.iterdir())


@pytest.mark.launch
def test_nothing_outlives_a_job_whose_mpirun_was_killed(tmp_path: Path) -> None:
    with (
        file_in_shared_memory() as mine,
        launch.Running(2, ["-c", MAPS_A_FILE, str(mine)], tmp_path) as job,
    ):
        ranks, _ = wait_for(job, 2)
        mapped = {segment for pid in ranks for segment in segments.mapped(pid)}
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait(10)
    until(lambda: not running(ranks), 10)  # MPICH's ranks find out by themselves
    segments.remove(mapped)  # nobody is left who knows of them


MAKES = """
import os, signal, sys
from pathlib import Path
from mpips.launch.folders import OwnFolder
folder = OwnFolder("mpips-launch-", Path(sys.argv[1]))
(Path(folder.name) / "1").mkdir()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("restart", ["", "0", "2"])
def test_what_others_have_left_is_removed(
    restart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a killed process of this host, or by an earlier start of this job of SLURM on any."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    python("-c", MAKES, str(tmp_path), code=-signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    host, other = platform.node(), "not-this-host"
    assert json.loads((left / OWNER).read_text()) == [host, "", 0]
    kept: dict[str, Any] = {
        "mpips-another-host": [other, "", 0],
        "mpips-another-job": [other, "170", 0],
        "mpips-damaged": "?",
        "something-else": [host, "", 0],
    }
    earlier = {f"mpips-start-{k}": [other, "17", k] for k in range(3)}
    for name, text in {**kept, **earlier}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).write_text(json.dumps(text))
    (tmp_path / "mpips-without-owner").mkdir()
    if restart:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    with OwnFolder(parent=tmp_path) as own:
        remove_left(tmp_path)
        found = {path.name for path in tmp_path.iterdir()}
        starts = list(earlier)[int(restart or 0) :]
        assert found == {*kept, *starts, "mpips-without-owner", Path(own).name}
    assert not Path(own).exists()


def test_a_lock_that_cannot_be_had_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no lock service answers, or another process holds it."""

    def refuse(file: object, how: int) -> None:
        assert how & fcntl.LOCK_NB, "it would wait for ever"
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", refuse)
    with OwnFolder(parent=tmp_path) as own:
        assert json.loads((Path(own) / OWNER).read_text())
    with pytest.raises(UserError, match=r"none: No such file .*, expected a folder that can"):
        OwnFolder(parent=tmp_path / "none")


def test_nothing_is_left_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a removed file that a process has open stays in its folder under another name."""
    unlink = os.unlink

    def as_nfs_does(name: str, *, dir_fd: int) -> None:
        inode = os.stat(name, dir_fd=dir_fd).st_ino
        links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        if any(link.exists() and link.stat().st_ino == inode for link in links):
            os.rename(name, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", as_nfs_does)
    with OwnFolder(parent=tmp_path) as own:
        (Path(own) / "1").mkdir()
    assert list(tmp_path.iterdir()) == []
