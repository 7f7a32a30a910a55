"""Temporary folders with a note of their owner.

A later process removes the folders that a killed one has left. In a job of SLURM it also removes
those of the job's earlier starts, whatever their host: SLURM has ended those.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path

PREFIX = "mpips-"
OWNER = "owner"  # a file that the process which made the folder holds a lock of


class OwnFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder of this process, removed at the end or, if it is killed, by a later one.

    Args:
        prefix: How its name begins, with `PREFIX`.
        parent: Where it is; by default with other temporary files.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self, prefix: str = PREFIX, parent: Path | None = None) -> None:
        super().__init__(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        self._owner = open(Path(self.name) / OWNER, "x")  # noqa: SIM115  (held until the end)
        with contextlib.suppress(OSError):  # a file system without locks goes without
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump([platform.node(), *_slurm_start()], self._owner)
        self._owner.flush()

    def cleanup(self) -> None:
        """Remove it; may be called twice."""
        super().cleanup()
        self._owner.close()


def remove_left(parent: Path | None = None) -> None:
    """Remove folders of processes that have ended, and leave all others alone.

    Ranks that may be left of an earlier start of a job of SLURM, on a node that was cut off, end
    when they see it.

    Args:
        parent: Where they are; by default with other temporary files.
    """
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*/{OWNER}"):
        if _is_left(path):
            shutil.rmtree(path.parent, ignore_errors=True)


def _is_left(owner: Path) -> bool:
    """Return whether the process that has written a file has ended.

    It is of an earlier start of this job of SLURM; or of this host, and holds no lock. Locks are
    seen from container to container, as processes are not.
    """
    try:
        with open(owner, "r+") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid() or owner.parent.is_symlink():
                return False
            host, job, restart = json.load(file)
            this, count = _slurm_start()
            if job and job == this and restart < count:
                return True
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError, TypeError):
        return False
    return bool(host == platform.node())


def _slurm_start() -> tuple[str, int]:
    """Return the job of SLURM that this process is of, empty without one, and its restarts."""
    known = os.environ
    return known.get("SLURM_JOB_ID", ""), int(known.get("SLURM_RESTART_COUNT", "0"))
