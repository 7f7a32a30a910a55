"""What only holds in a job of SLURM: its plugin for MPICH, and what a start before has left."""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpips.checkpoint.place import Tail
from mpips.launch.hosts import is_srun
from mpips.launch.mpirun import environment, mpirun

PMI2 = "--mpi=pmi2"
UNREAD = b"mpi/pmi2: invalid client request"
LOG = Path("/dev/stderr")


class Plugin:
    """What SLURM's pmi2 plugin says of the ranks of one start.

    It reads 1,024 bytes of what a rank tells it. What MPICH puts there depends on what is in memory
    behind its address: now and then it is longer, and the ranks die in MPI_Init or wait there.

    Args:
        launcher: With its options, of which the last that says it holds.
    """

    def __init__(self, launcher: Sequence[str]) -> None:
        said = [word for word in launcher if word.startswith("--mpi=")]
        self.is_used = is_srun(launcher[0]) and said[-1:] == [PMI2]
        self._log: Tail | None = None
        if self.is_used and stat.S_ISREG(os.stat(LOG).st_mode):
            self._log = Tail(LOG, os.stat(LOG).st_size)

    def trouble(self) -> str:
        """Return that it could not read what a rank has told, where stderr is a file."""
        if self._log is None:
            return ""
        unread = False
        with contextlib.suppress(OSError):
            unread = any(UNREAD in line for line in self._log.lines(LOG))
        return "SLURM's pmi2 plugin could not read the address of a rank" if unread else ""


def other_launcher() -> list[str]:
    """Return MPICH's launcher, which needs no plugin.

    Not by the name of mpirun if it can be helped: Intel MPI's is a script that dies of a signal.

    Raises:
        UserError: If there is none.
    """
    return [shutil.which("mpiexec.hydra", path=environment()["PATH"]) or mpirun()]


def folder_prefix(prefix: str, variables: Mapping[str, str]) -> str:
    """Return how the name of a supervisor's folder begins: of this job, and this start of it."""
    job, restart = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_RESTART_COUNT", "0")
    return f"{prefix}{job}.{restart}-" if job else prefix


def remove_left(parent: Path, prefix: str, variables: Mapping[str, str]) -> None:
    """Remove folders of supervisors of this job that SLURM has ended before it was requeued.

    Ranks that may be left of them, on a node that was cut off, end when they see it.
    """
    job, restart = variables.get("SLURM_JOB_ID"), int(variables.get("SLURM_RESTART_COUNT", "0"))
    form = re.compile(rf"{re.escape(prefix)}{job}\.(\d+)-\w+")
    for path in _folders(parent) if job else ():
        match = form.fullmatch(path.name)
        if match and int(match[1]) < restart:
            shutil.rmtree(path, ignore_errors=True)


def _folders(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from parent.iterdir()
