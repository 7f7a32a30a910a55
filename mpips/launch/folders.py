"""Temporary folders with a note of their owner.

If a process is killed, its folder stays, and a later process removes it. In a SLURM job, a later
process also removes folders of the job's earlier starts on any host: SLURM has ended those starts.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path

from mpips.errors import UserError

PREFIX = "mpips-"
OWNER = "owner"  # locked by the process that made the folder


class OwnFolder(tempfile.TemporaryDirectory[str]):
    """Temporary folder of this process.

    It is removed when the process ends. If the process is killed, a later one removes it.

    Args:
        prefix: Prefix of its name; begins with `PREFIX`.
        parent: Folder that contains it. Default: the folder for temporary files.

    Raises:
        UserError: If it cannot be created, or has no space.
    """

    def __init__(self, prefix: str = PREFIX, parent: Path | None = None) -> None:
        try:
            super().__init__(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
            self._owner = open(Path(self.name) / OWNER, "x")  # noqa: SIM115  (held until the end)
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            json.dump([platform.node(), *slurm_start()], self._owner)
            self._owner.flush()
        except OSError as problem:
            got = f"{parent or tempfile.gettempdir()}: {problem.strerror}"
            raise UserError(got, "a folder that can be written", "start it elsewhere") from None

    def cleanup(self) -> None:
        """Remove the folder; calling it again does nothing."""
        self._owner.close()  # first: NFS keeps an open file, and so its folder
        super().cleanup()


def remove_left(parent: Path | None = None) -> bool:
    """Remove the folders of processes that have ended; keep all others. Return whether any were.

    On a node that lost its connection, ranks of a SLURM job's earlier start may still run. They end
    when they see that their folder is gone.

    Args:
        parent: Folder that contains them. Default: the folder for temporary files.
    """
    paths = (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*/{OWNER}")
    left = [path.parent for path in paths if _is_left(path)]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(left)


def _is_left(owner: Path) -> bool:
    """Return whether the process that wrote an owner file has ended.

    It has ended if it belongs to an earlier start of this SLURM job. It has also ended if it ran on
    this host and its lock is free. Locks, unlike process ids, are visible across containers.
    """
    try:
        with open(owner, "r+") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid() or owner.parent.is_symlink():
                return False
            host, job, restart = json.load(file)
            this, count = slurm_start()
            if job and job == this and restart < count:
                return True
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError, TypeError):
        return False
    return bool(host == platform.node())


def slurm_start() -> tuple[str, int]:
    """Return the id of this process's SLURM job, or an empty string, and its number of restarts."""
    known = os.environ
    return known.get("SLURM_JOB_ID", ""), int(known.get("SLURM_RESTART_COUNT", "0"))
