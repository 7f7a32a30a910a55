"""Files of an MPI in shared memory: this job's, and leftovers.

A segment is recognized by its folder, its owner and its name, which the MPI has chosen, and by the
processes that have it mapped. Other files in shared memory belong to the user and are never
removed.

Environment:
    I_MPI_ROOT, I_MPI_HYDRA_UUID: Tell Intel MPI from MPICH.
    MPI_LOCALRANKID, SLURM_LOCALID: Number of a rank on its host. The first one prints the errors
        that come before MPI starts.

Messages:
    /dev/shm on H is of N bytes: MPICH would die by SIGBUS. Enlarge it, or use Open MPI, which does
        without.
"""

import contextlib
import fcntl
import os
import platform
import re
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mpips.errors import UserError, complain, counted
from mpips.mpi.process import mappings

SHARED_MEMORY = Path("/dev/shm")
NAMES = (
    *(r"mpich_shm_[0-9a-f]+_\d+", r"mpich_shar_tmp\w{6}", r"ucx_shm_posix_[0-9a-f]+"),
    *(r"sm_segment\.[\w.-]+\.\d+\.[0-9a-f]+\.\d+", r"vader_segment\.[\w.-]+\.\d+\.[0-9a-f]+\.\d+"),
    *(r"osc_(sm|rdma)\.[\w.-]+\.[0-9a-f]+\.\d+(\.\d+)?", r"open_mpi\.\d+"),
)
NAME = re.compile("|".join(NAMES))
MPICH_BYTES, MPICH_RANK_BYTES = 4096, 1_057_344  # size of MPICH's file on a host
HEARD_S = 2.0
YOUNG_S = 2.0  # a younger file may look unused while its maker creates it


class Segment(NamedTuple):
    """A file of an MPI that a process has mapped.

    Attributes:
        path: Path of the file.
        inode: Inode number of the file.
    """

    path: Path
    inode: int


_noted: set[Segment] = set()


def mapped(pid: int | None = None, folder: Path = SHARED_MEMORY) -> set[Segment]:
    """Return the segments that a process has mapped, by default this one."""
    named = ((os.path.split(path), inode) for *_, inode, path in mappings(pid))
    return {
        Segment(folder / name, inode)
        for (parent, name), inode in named
        if parent == str(folder) and NAME.fullmatch(name)
    }


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note segments mapped in the block as this job's own: MPI starts or allocates there."""
    before = mapped()
    yield
    _noted.update(mapped() - before)


def remove_noted() -> None:
    """Remove the segments of this job. Ranks that have mapped them keep the memory."""
    remove(_noted)


def remove(segments: Iterable[Segment]) -> None:
    """Remove files of this user whose inodes have not changed."""
    for segment in segments:
        status = _own_file(segment.path)
        if status is not None and status.st_ino == segment.inode:
            _unlink(segment.path)


def _unlink(path: Path) -> bool:
    """Remove a file; return whether that worked. A failure does not end the job."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _own_file(path: Path) -> os.stat_result | None:
    """Return the status of a file if it is a regular file of this user, else None."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None


def present(folder: Path = SHARED_MEMORY) -> set[Segment]:
    """Return the segments of this user that exist."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return set()
    files = {folder / name: _own_file(folder / name) for name in names if NAME.fullmatch(name)}
    return {Segment(path, status.st_ino) for path, status in files.items() if status is not None}


def left_over(folder: Path = SHARED_MEMORY) -> dict[Path, int]:
    """Return the size in bytes of each segment of this user that no process uses, by path.

    A rank has its segments open or mapped as long as it lives. The kernel knows all such processes,
    in other containers, too.
    """
    found = {}
    for path, _ in present(folder):
        known = _own_file(path)
        if known is not None and time.time() - known.st_mtime > YOUNG_S and _is_unused(path):
            found[path] = known.st_blocks * 512
    return found


def _is_unused(path: Path) -> bool:
    """Return whether no process has a file open or mapped; False if the kernel does not say.

    The kernel grants a write lease (fcntl(2)) only if no other process has the file open or mapped.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored; SIGIO would end this process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    finally:
        os.close(file)  # and the lease with it
    return True


def clean(folder: Path = SHARED_MEMORY) -> dict[Path, int]:
    """Remove segments that killed jobs of this user have left; return their sizes by path."""
    return {path: size for path, size in left_over(folder).items() if _unlink(path)}


def is_by_mpich(variables: Mapping[str, str]) -> bool:
    """Return whether a rank's environment is that of MPICH, and not of Intel MPI."""
    others = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "I_MPI_ROOT", "I_MPI_HYDRA_UUID")
    return "PMI_RANK" in variables and not any(name in variables for name in others)


def lacking(variables: Mapping[str, str], total: int) -> UserError | None:
    """Return the error if MPICH would die by SIGBUS as it starts, or None.

    Args:
        variables: The environment of a rank.
        total: Bytes of the file system that holds shared memory.
    """
    # Open MPI needs none. Intel MPI's need does not follow from the number of ranks alone.
    if not is_by_mpich(variables):
        return None
    count = variables.get("MPI_LOCALNRANKS", "")
    ranks = int(count) if count.isdigit() else 1
    needed = MPICH_BYTES + ranks * MPICH_RANK_BYTES
    if total >= needed:
        return None
    return UserError(
        f"{SHARED_MEMORY} on {platform.node()} is of {total} bytes",
        f"at least {needed} bytes for MPICH with {counted(ranks, 'rank')} there",
        "enlarge it (docker: --shm-size), or use Open MPI, which does without",
    )


def require_room() -> None:
    """End this process, and with it the job, with a message if MPICH could not start."""
    if not SHARED_MEMORY.is_dir():
        return
    found = os.statvfs(SHARED_MEMORY)
    error = lacking(os.environ, found.f_blocks * found.f_frsize)
    if error is None:
        return
    if os.environ.get("MPI_LOCALRANKID", os.environ.get("SLURM_LOCALID", "0")) == "0":
        complain(error)
    else:
        time.sleep(HEARD_S)  # the launcher ends all ranks with the first one that exits
    sys.exit(error.code)
