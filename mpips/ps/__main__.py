"""Where the ranks of a running job are: ``python -m mpips.ps RUN``; starts no MPI, only reads."""

import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.checkpoint.place import CONFIG, DONE, LOCK, is_claimed, noted_ranks
from mpips.cluster import words
from mpips.cluster.progress import GONE, table, trouble
from mpips.cluster.words import Address, Board
from mpips.errors import UserError

USAGE = """usage: python -m mpips.ps RUN

Shows a line for each rank of the job in the folder RUN that is on this host: what it does, in
which call and since when; its clock, which is the pushes that a worker has made, the updates that a
server has applied, or the rounds; how many pushes wait for a server; and when it was last seen to
live. Behind a wait are the ranks that it waits for, as far as they are on this host. The exit code
is 0 if the job runs here, 1 if it does not, 2 if RUN is no run.
"""


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(USAGE, end="", file=sys.stdout if "--help" in argv else sys.stderr)
        return 0 if "--help" in argv else 2
    try:
        print(shown(Path(argv[0])), end="")
    except UserError as error:
        print(f"mpips: {error}", file=sys.stderr)
        return error.code
    return 0


def shown(out: Path) -> str:
    """Return the table of the ranks of this host.

    Raises:
        UserError: If there are none, with exit code 1; or if there is no run.
    """
    if not out.is_dir() or not any((out / name).exists() for name in (CONFIG, LOCK)):
        raise UserError(f"{out}", "the folder of a run", "give the one that --out says")
    where, host = noted_ranks(out), platform.node()
    now = time.perf_counter()
    for board in _boards(where, host):
        found = board.read()
        chief, whole = board.job[words.CHIEF], board.job[words.COUNT] == len(where)
        if any(trouble(one) != GONE for one in found):
            others = sorted({other for other, _, _ in where} - {host})
            more = f"further ranks are on {', '.join(others)}\n" if others else ""
            return table(found, chief, host, now, whole) + more
    raise _absent(out, where, host)


def _boards(where: Sequence[Address], host: str) -> list[Board]:
    """Return the words of this host's ranks, by the first of these who lives."""
    for other, pid, file in where:
        if other == host and file >= 0:
            try:
                return [Board.open(pid, file)]
            except OSError:
                continue
    return []


def _absent(out: Path, where: Sequence[Address], host: str) -> UserError:
    """Return why there is nothing to be seen."""
    hosts = sorted({other for other, _, _ in where})
    if (out / DONE).exists():
        error = UserError(f"the job in {out} has ended, and is complete", "one that runs")
    elif hosts and host not in hosts:
        remedy = f"ask there: it has ended, or runs on {', '.join(hosts)}"
        error = UserError(f"the job in {out} is not on {host}", "one of this host", remedy)
    elif is_claimed(out):
        error = UserError(f"the job in {out} starts, or is somebody else's", "one that has begun")
    else:
        error = UserError(f"the job in {out} has ended", "one that runs", "--resume goes on")
    error.code = 1
    return error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
