"""Supervisor's commands on a remote host.

``python -m mpips.launch.remote_host FOLDER [PID:STARTED ...]``.

That a host answers, has Python with mpips and sees the supervisor's folder; and that ranks which
are left of earlier attempts there end, and leave no shared memory.
"""

import contextlib
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpips.mpi import segments
from mpips.mpi.process import GONE, STARTED, ancestors, send_signal, stat_of, trouble

ANSWER = "mpips host"  # the line of the answer, in front of what the host calls itself
DAEMONS = ("hydra_", "prted", "orted")  # a rank's parent, of the launcher
NO_FOLDER = 3
GONE_S, SEEN_S = 5.0, 10.0  # a file system may show what another host has made some seconds later


def main(argv: Sequence[str]) -> int:
    """Do it; returns the exit code, 0 if this host can be used."""
    folder, *left = argv
    noted = (word.split(":") for word in left)
    found = end([(int(pid), int(started)) for pid, started in noted])
    if left and segments.present():
        time.sleep(segments.YOUNG_S)  # until it is clear that they are nobody's
    segments.clean()
    deadline = time.monotonic() + SEEN_S
    while not Path(folder).is_dir():
        if time.monotonic() > deadline:
            what = "expected one that all hosts share; start mpips.launch there"
            print(f"no folder {folder} on {platform.node()}, {what}", file=sys.stderr)
            return NO_FOLDER
        time.sleep(0.2)
    if found:
        print(f"process {', '.join(map(str, found))} of an earlier attempt did not end")
        return 1
    print(ANSWER, platform.node())
    return 0


def end(left: Iterable[tuple[int, int]]) -> list[int]:
    """SIGKILL processes, and their launcher's daemons; returns those that are still there then.

    Args:
        left: Process ids, each with when it started: it may be another one's by now.
    """
    ranks = [(pid, started) for pid, started in left if trouble(pid, started) != GONE]
    mapped = {segment for pid, _ in ranks for segment in segments.mapped(pid)}
    members = sorted({daemon for pid, _ in ranks for daemon in _daemon(pid)}) + ranks
    for pid, _ in members:
        send_signal(pid)
    deadline = time.monotonic() + GONE_S
    while members and time.monotonic() < deadline:
        members = [one for one in members if trouble(*one) != GONE]
        time.sleep(0.02)
    segments.remove(mapped)
    return [pid for pid, _ in members]


def _daemon(pid: int) -> list[tuple[int, int]]:
    """Return the daemon that has started a rank, and when it started, if it is its parent still."""
    for parent, name in ancestors(pid):
        with contextlib.suppress(OSError):
            return [(parent, int(stat_of(parent)[STARTED]))] if name.startswith(DAEMONS) else []
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
