"""Which files in shared memory are an MPI's, and which of them nobody has any more."""

import mmap
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import python, until

from mpips.launch import mpirun as launch
from mpips.mpi import segments

SLEEP = ["-c", "import time; from mpi4py import MPI; print('up', flush=True); time.sleep(600)"]
NAMES = (
    *("mpich_shm_17a537c4_0", "mpich_shar_tmpS51jGi", "ucx_shm_posix_1f702315"),
    *("sm_segment.a-host.1000.3bf60001.2", "osc_sm.a-host.3bf60001.0.3", "open_mpi.0000"),
)
OTHERS = ("mpich_shm_mine", "mpich_shm_17a537c4_0.npy", "sm_segment", "venv", "psm2_shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory, where nobody else looks."""
    with tempfile.TemporaryDirectory(dir=segments.SHARED_MEMORY) as name:
        yield Path(name)


def make(path: Path) -> Path:
    """Write a file that is not new."""
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (0, 0))
    return path


def test_only_files_by_the_names_of_an_mpi_are_removed(folder: Path) -> None:
    made = {make(folder / name) for name in NAMES}
    kept = {make(folder / name) for name in OTHERS}
    (folder / "mpich_shm_a_0").mkdir()
    (folder / "mpich_shm_b_0").symlink_to(folder / "venv")
    (folder / "mpich_shm_c_0").write_bytes(b"just made")
    assert segments.clean(folder) == dict.fromkeys(made, mmap.PAGESIZE)
    rest = {folder / f"mpich_shm_{k}_0" for k in "abc"}
    assert set(folder.iterdir()) == kept | rest


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_WRITE])
def test_what_a_process_has_mapped_is_kept(access: int, folder: Path) -> None:
    path = make(folder / NAMES[0])
    with path.open("r+b") as file:
        assert segments.left_over(folder) == {}
        with mmap.mmap(file.fileno(), 0, access=access):
            file.close()
            assert [s.path for s in segments.mapped(folder=folder)] == [path]
            assert segments.clean(folder) == {}
    os.utime(path, (0, 0))
    assert list(segments.left_over(folder)) == [path]


def test_a_file_that_took_the_place_of_another_is_kept(folder: Path) -> None:
    path = make(folder / NAMES[0])
    (seen,) = segments.present(folder)
    kept = make(folder / "kept")
    kept.rename(path)
    segments.remove([seen])
    assert path.exists()
    segments.remove(segments.present(folder))
    assert not path.exists()


@pytest.mark.parametrize(
    ("variables", "total", "needed"),
    [
        ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "3"}, 1 << 20, 3176128),
        ({"PMI_RANK": "1"}, 1 << 20, 1061440),
        ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "3"}, 3176128, None),
        ({"PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}, 1 << 16, None),
        ({"PMI_RANK": "1", "I_MPI_HYDRA_UUID": "1"}, 1 << 16, None),
        ({}, 1 << 16, None),
    ],
)
def test_room_that_mpich_needs(variables: dict[str, str], total: int, needed: int | None) -> None:
    error = segments.lacking(variables, total)
    assert (error is None) is (needed is None)
    assert needed is None or f"is of {total} bytes, expected at least {needed} bytes" in str(error)


SMALL = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k shm /dev/shm && exec "$@"', "sh"]


@pytest.mark.launch
def test_shared_memory_that_is_too_small_for_an_mpi(tmp_path: Path) -> None:
    if subprocess.run([*SMALL, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    with launch.Running(3, ["-c", "import mpips.mpi.world"], tmp_path, wrapper=SMALL) as job:
        done = job.wait(60)
    told = done.output.count("mpips: /dev/shm on ")
    assert (done.code, told) == ((0, 0) if launch.is_open_mpi() else (2, 1)), done.output


@pytest.mark.launch
@pytest.mark.parametrize("remover", ["import mpips.mpi.world", "-m mpips doctor --clean"])
def test_what_a_killed_job_has_left_is_removed(remover: str, tmp_path: Path) -> None:
    """By the next start on its host, or by the doctor; another job's stays."""
    with launch.Running(2, SLEEP, tmp_path) as other, launch.Running(2, SLEEP, tmp_path) as job:
        until(lambda: job.output().count("up") == other.output().count("up") == 2, told=job.output)
        ranks = job.ranks()
        kept = {segment for pid in other.ranks() for segment in segments.mapped(pid)}
        found = {segment for pid in ranks for segment in segments.mapped(pid)}
        for segment in found & segments.present():
            os.utime(segment.path)  # young: what others start now removes none of them
        for pid in (job.process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        job.process.wait(10)
        left = found & segments.present()
        assert left
        for segment in kept | left:
            os.utime(segment.path, (0, 0))
        words = remover.split() if remover.startswith("-m") else ["-c", remover]
        python(*words, cwd=tmp_path)
        assert not found & segments.present()
        assert kept <= segments.present()
