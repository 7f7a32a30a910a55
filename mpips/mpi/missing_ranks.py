"""Ranks of this host that are late to a run, or gone.

A rank tells the others of its host by the name of its process (proc(5)) that it waits for a run to
begin, or that its program has ended. Nothing is known of other hosts. Loads no MPI.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from mpips.mpi.process import (
    ANY_BYTES,
    NAME,
    PARENT,
    STARTED,
    STATE,
    environment_of,
    ids,
    mappings,
    rank_in,
    stat_of,
    ticks_used,
)

MEETS, LEFT = "mpips-meets", "mpips-left"  # at most 15 bytes
MPI4PY = "/mpi4py/MPI."  # the library whose import starts MPI
JOBS = ("PMIX_NAMESPACE", "PMI_JOBID")  # one launcher may start several jobs
LINGER_S = 10.0  # how long a rank that has ended looks for others that start MPI
FIRST_S, LOOK_S, LOOK_MAX_S = 1.0, 0.2, 30.0
PATIENCE = 12  # times the limit, as for a rank that is at work

_ranks: dict[tuple[int, str], tuple[int | None, list[str | None]]] = {}  # by process id and start


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
    """Return the ranks of this job that this host's launcher has started, without this one.

    Returns:
        Process ids and names, by rank in the world.
    """
    found, mine = {}, [os.environ.get(name) for name in JOBS]
    for pid in _siblings():
        with contextlib.suppress(OSError):
            known = stat_of(pid)
            if int(known[PARENT]) == os.getppid() and known[STATE] not in "ZX":
                rank, job = _rank_of(pid, known[STARTED])
                if rank is not None and job == mine:
                    found[rank] = pid, known[NAME]
    return found


def _siblings() -> set[int]:
    """Return the processes of this one's parent, without this one; where it cannot say, all."""
    found = _children(os.getppid())
    if os.getpid() not in found:  # the kernel has no such list
        found = set(ids())
    return found - {os.getpid()}


def _children(pid: int) -> set[int]:
    found = set[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def _rank_of(pid: int, started: str) -> tuple[int | None, list[str | None]]:
    """Return the rank and the job in a process's environment; the rank is None if it is none."""
    if (pid, started) in _ranks:
        return _ranks[pid, started]
    known = environment_of(pid)
    found = rank_in(known), [known.get(name) for name in JOBS]
    if found[0] is not None:  # else it may not have begun its program yet
        _ranks[pid, started] = found
    return found


def leave(may_wait: bool) -> int | None:
    """Say that this rank's program has ended; return a rank that waits for it for ever, or None.

    Args:
        may_wait: Whether others may wait for it in the start of MPI, which it has not started. Then
            this waits until their programs have ended as well, at most for a few seconds.
    """
    _call_process(LEFT)
    deadline = time.monotonic() + LINGER_S
    while may_wait and time.monotonic() < deadline:
        others = {rank: pid for rank, (pid, name) in ranks_here().items() if name != LEFT}
        if not others:
            return None
        for rank in sorted(others):
            if any(MPI4PY in path for *_, path in mappings(others[rank])):
                return rank
        time.sleep(LOOK_S)
    return None


class Absent:
    """Tells a rank that waits for others, before a run begins, of those of its host.

    Args:
        rank: This one, in the world.
        others: Those that it waits for, in the world.
        limit_s: After how long a warning names them; 0 for never.
    """

    def __init__(self, rank: int, others: Collection[int], limit_s: float) -> None:
        self._rank, self._others, self._limit_s = rank, others, limit_s
        self._begun = time.monotonic()
        self._next, self._told = self._begun + FIRST_S, False
        self._used: dict[int, tuple[int, float]] = {}  # of processors, by rank, and since when

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
        here = self._others_here()
        meets = [rank for rank, (_, name) in here.items() if name == MEETS]
        if self._rank > min(meets, default=self._rank):  # the lowest rank that waits looks often
            self._next = now + LOOK_MAX_S
            return "", False
        if left := [rank for rank, (_, name) in here.items() if name == LEFT]:
            who = f"rank {min(left)} ended before the run began"
            return f"{who}, and rank {self._rank} waits for it", True
        late = {rank: here[rank][0] for rank in sorted(set(here) - set(meets))}
        if not self._limit_s or not (late or self._rank < min(self._others, default=0)):
            return "", False
        never = bool(late) and self._idle_s(late, now) >= PATIENCE * self._limit_s
        if waited_s < self._limit_s or (self._told and not never):
            return "", False
        self._told = True
        return f"{_named(late)} not come to the run for {waited_s:.0f} s", never

    def _others_here(self) -> dict[int, tuple[int, str]]:
        """Return what `ranks_here` does of the others; nothing where names cannot be given."""
        if stat_of(os.getpid())[NAME] != MEETS:
            return {}
        return {rank: found for rank, found in ranks_here().items() if rank in self._others}

    def _idle_s(self, late: dict[int, int], now: float) -> float:
        """Return for how long none of some ranks, given with their processes, has been at work."""
        for rank, pid in late.items():
            used = _used(pid)
            if self._used.get(rank, (-1, now))[0] != used:
                self._used[rank] = used, now
        return min(now - self._used[rank][1] for rank in late)


def _named(late: dict[int, int]) -> str:
    *most, last = [f"{rank} (process {pid})" for rank, pid in late.items()] or [""]
    if not last:
        return "a rank has"
    return f"ranks {', '.join(most)} and {last} have" if most else f"rank {last} has"


def _used(pid: int) -> int:
    """Return how many ticks of processors a process and those that it has started have used."""
    return ticks_used(pid) + sum(map(_used, _children(pid)))
