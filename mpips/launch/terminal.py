"""Terminal of a run, also below ``mpirun``, whose ranks have pipes.

A progress bar is drawn directly on the terminal: launchers forward the ranks' output line by line.
A rank of Open MPI sees a terminal as its own stdout, even if the output goes elsewhere.
"""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.mpi.process import ancestors

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun")
TO_FILES = ("--output", "-output", "-outfile", "-errfile")  # the launcher writes the output
TERMINAL, FILE, UNKNOWN = "terminal", "file", "unknown"


class Terminal:
    """Terminal as tqdm needs it. It never blocks, even if it is closed or stopped.

    Args:
        path: Path such as ``/proc/self/fd/2``.
    """

    encoding = sys.getfilesystemencoding()

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)

    def write(self, text: str) -> int:
        """Write as much as the terminal accepts; return the number of bytes."""
        try:
            return os.write(self._fd, text.encode(self.encoding, "replace"))
        except OSError:  # stopped by Ctrl-S, or closed
            return 0

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def fileno(self) -> int:
        """Return the file descriptor, from which tqdm gets the width."""
        return self._fd

    def close(self) -> None:
        """Close the terminal."""
        os.close(self._fd)


def find_terminal() -> tuple[Terminal | None, bool]:
    """Return a terminal for a progress bar, or None, and whether lines have to be printed.

    A bar needs one stream that is a terminal, and another that is a terminal or a file. Lines are
    printed beside a bar only if stdout is a file. If a stream is a pipe, lines are printed without
    a bar.
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
    """Return the paths of stdout and stderr: the launcher's, if it runs on this host."""
    try:
        above = ancestors(os.getpid())
        launcher = next((pid for pid, name in above if name.startswith(LAUNCHERS)), None)
        if launcher is None:
            return [f"/proc/self/fd/{stream.fileno()}" for stream in (sys.stdout, sys.stderr)]
        words = Path(f"/proc/{launcher}/cmdline").read_text(errors="replace").split("\0")
    except (OSError, ValueError):  # ValueError: a stream without a file descriptor
        return ()
    if any(word.startswith(TO_FILES) for word in words):
        return ()
    return [f"/proc/{launcher}/fd/{number}" for number in (1, 2)]


def _kind(path: str) -> str:
    """Return the kind of a stream: `TERMINAL`, `FILE` (or ``/dev/null``), or `UNKNOWN`."""
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
