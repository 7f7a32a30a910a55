"""Terminal of a run, also below ``mpirun``, whose ranks have pipes.

A bar is drawn on the terminal itself. Launchers hand on what ranks print line by line, and to a
rank of Open MPI its own stdout is a terminal wherever it goes in the end.
"""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.mpi.process import ancestors

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun")
TO_FILES = ("--output", "-output", "-outfile", "-errfile")  # the launcher writes what ranks print
TERMINAL, FILE, UNKNOWN = "terminal", "file", "unknown"


class Terminal:
    """A terminal to be written to, as tqdm does; one that is gone or held holds up nobody.

    Args:
        path: Such as ``/proc/self/fd/2``.
    """

    encoding = sys.getfilesystemencoding()

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)

    def write(self, text: str) -> int:
        """Write what there is room for; returns the number of bytes."""
        try:
            return os.write(self._fd, text.encode(self.encoding, "replace"))
        except OSError:  # held by Ctrl-S, or closed: what nobody sees is not missed
            return 0

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def fileno(self) -> int:
        """Return the file descriptor, which knows the width."""
        return self._fd

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def find_terminal() -> tuple[Terminal | None, bool]:
    """Return a terminal for a bar, or None, and whether to print lines too, or instead.

    There is a bar where a stream is a terminal and the other one too, or a file, which has the
    lines if it is stdout. Nobody knows where pipes end: there, lines it is.
    """
    paths = _streams()
    out, err = map(_kind, paths) if paths else (UNKNOWN, UNKNOWN)
    if UNKNOWN in (out, err) or TERMINAL not in (out, err):
        return None, True
    try:
        return Terminal(paths[1] if err == TERMINAL else paths[0]), out != TERMINAL
    except OSError:
        return None, True


def _streams() -> Sequence[str]:
    """Return the paths of stdout and stderr, those of the launcher where it runs on this host."""
    try:
        above = ancestors(os.getpid())
        launcher = next((pid for pid, name in above if name.startswith(LAUNCHERS)), None)
        if launcher is None:
            return [f"/proc/self/fd/{stream.fileno()}" for stream in (sys.stdout, sys.stderr)]
        words = Path(f"/proc/{launcher}/cmdline").read_text(errors="replace").split("\0")
    except (OSError, ValueError):  # ValueError: a stream that is no file
        return ()
    if any(word.startswith(TO_FILES) for word in words):
        return ()
    return [f"/proc/{launcher}/fd/{number}" for number in (1, 2)]


def _kind(path: str) -> str:
    """Return what a stream goes to: a terminal, a file (or ``/dev/null``), or who knows."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISCHR(mode):
            return FILE if stat.S_ISREG(mode) else UNKNOWN
        there = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return TERMINAL if os.isatty(there) else FILE
        finally:
            os.close(there)
    except OSError:
        return UNKNOWN
