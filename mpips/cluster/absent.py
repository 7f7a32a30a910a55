"""Ranks that leave before a run begins, and those of their host that wait for them.

A rank says by the name of its process, which others of its host read (proc(5)), that it waits for
all ranks to begin a run, or that its program has ended. Of other hosts nothing is known. Loads no
MPI.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from mpips.cluster.process import ANY_BYTES, NAME, PARENT, STATE, stat_of

MEETS, LEFT = "mpips-meets", "mpips-left"  # at most 15 characters
MPI4PY = b"/mpi4py/MPI."  # importing it starts MPI
RANKS = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=", b"PMIX_RANK=")
LINGER_S = 10.0  # after which nobody of this host is expected to start MPI any more
LOOK_S, LOOK_MAX_S = 0.2, 30.0
PATIENCE = 12  # times the limit, as for a rank that is at work


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Have this process called so within the block."""
    before = stat_of(os.getpid())[NAME]
    _call_process(name)
    try:
        yield
    finally:
        _call_process(before)


def _call_process(name: str) -> None:
    with contextlib.suppress(OSError):  # then nobody knows
        Path("/proc/self/comm").write_text(name, errors=ANY_BYTES)


def ranks_here() -> dict[int, tuple[int, str]]:
    """Return the ranks of this host that the launcher of this one has started, without this one.

    Returns:
        Process ids and names, by rank in the world.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                known = stat_of(int(entry.name))
                if int(known[PARENT]) == os.getppid() and known[STATE] not in "ZX":
                    rank = _rank_in((entry / "environ").read_bytes())
                    if rank is not None:
                        found[rank] = int(entry.name), known[NAME]
    return found


def _rank_in(environ: bytes) -> int | None:
    words = environ.split(b"\0")
    values = [word.removeprefix(name) for name in RANKS for word in words if word.startswith(name)]
    return int(values[0]) if values and values[0].isdigit() else None


def leave(may_wait: bool) -> int | None:
    """Say that this rank's program has ended; returns a rank that waits for it for ever, or None.

    Args:
        may_wait: Whether others may wait for it in the start of MPI, which it has not started. Then
            this waits until they have left as well, at most for a few seconds.
    """
    _call_process(LEFT)
    deadline = time.monotonic() + LINGER_S
    while may_wait and time.monotonic() < deadline:
        others = {rank: pid for rank, (pid, name) in ranks_here().items() if name != LEFT}
        if not others:
            return None
        for rank in sorted(others):
            if _starts_mpi(others[rank]):
                return rank
        time.sleep(LOOK_S)
    return None


def _starts_mpi(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return MPI4PY in Path(f"/proc/{pid}/maps").read_bytes()
    return False


class Absent:
    """Tells a rank that waits for others, before a run begins, of those of its host.

    Args:
        rank: This one, in the world.
        others: Those that it waits for, in the world.
        limit_s: After how long it is to be told of; 0 for never.
    """

    def __init__(self, rank: int, others: Collection[int], limit_s: float) -> None:
        self._rank, self._others, self._limit_s = rank, others, limit_s
        self._begun = time.monotonic()
        self._next, self._told = self._begun + LOOK_S, False

    def look(self) -> tuple[str, bool]:
        """Look at the others, now and then.

        Returns:
            What is to be told, mostly nothing; and whether they will never come.
        """
        now = time.monotonic()
        if now < self._next:
            return "", False
        waited_s = now - self._begun
        self._next = now + min(LOOK_MAX_S, max(LOOK_S, waited_s / 10))
        here = {r: found for r, found in ranks_here().items() if r in self._others}
        meets = [rank for rank, (_, name) in here.items() if name == MEETS]
        if self._rank > min(meets, default=self._rank):  # that one tells
            return "", False
        if left := [rank for rank, (_, name) in here.items() if name == LEFT]:
            return f"rank {min(left)} has left before the run began", True
        never = waited_s >= PATIENCE * self._limit_s
        if not self._limit_s or waited_s < self._limit_s or (self._told and not never):
            return "", False
        self._told = True
        late = [f"{rank} (process {here[rank][0]})" for rank in sorted(set(here) - set(meets))]
        who = f"rank {', '.join(late)}" if late else "a rank of another host"
        return f"{who} has not come to the run for {waited_s:.0f} s", never
