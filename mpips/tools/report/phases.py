"""Phases of each rank, and the rank that ended each wait."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.health import status_board
from mpips.health.trace_file import Traced

CLOCK = status_board.WORDS + status_board.CLOCK


class Slices(NamedTuple):
    """Consecutive time slices of a rank, each in one phase.

    Attributes:
        begins: Begin of each slice, shape (n,), seconds.
        ends: End of each slice, shape (n,), seconds.
        whats: Phase of each slice, a key of `status_board.PHASES`, shape (n,), int64.
        values: For an applied push, its worker and number, ``worker << 32 | number``.
    """

    begins: np.ndarray
    ends: np.ndarray
    whats: np.ndarray
    values: np.ndarray

    def at(self, time: float) -> int:
        """Return the index of the slice that ends at `time` or contains it; -1 before the first."""
        return bisect_left(self.begins, time) - 1


class Waits(NamedTuple):
    """The rank that ended each slice of one rank, if the traces show it.

    Attributes:
        whos: Index in the traces of the rank that ended the slice; -1 if unknown, shape (n,),
            int64.
        whens: Time at which that rank ended the slice, shape (n,), seconds.
        rounds: Number of the round, if that rank ended the slice by entering it last; else 0.
    """

    whos: np.ndarray
    whens: np.ndarray
    rounds: np.ndarray


def waits_in(phase: Any) -> Any:
    """Return whether a rank may wait for others in a phase; for an array, of each phase."""
    return (phase >= status_board.WAITING) | (phase == status_board.SUMMING)


def slices(traced: Traced) -> Slices:
    """Return the slices of a rank; the last one ends at the last entry of the trace."""
    is_phase = traced.whats < status_board.WORDS
    begins, whats = traced.times[is_phase], traced.whats[is_phase]
    end = traced.times.max(keepdims=True) if len(begins) else begins
    return Slices(begins, np.append(begins[1:], end), whats, traced.values[is_phase])


def waits(ranks: Sequence[Traced], slices: Sequence[Slices]) -> list[Waits]:
    """Return for each rank the ranks that ended its waits.

    Args:
        ranks: Traces of all ranks.
        slices: Slices of all ranks.
    """
    rounds, nodes = _Rounds(ranks, slices), np.array([traced.about["node"] for traced in ranks])
    # The slices of all ranks: their ends, phases, and the workers whose pushes were applied.
    columns = zip(*((own.ends, own.whats, own.values >> 32) for own in slices), strict=True)
    times, whats, workers = map(np.concatenate, columns)
    whos = np.repeat(np.arange(len(ranks)), [len(own.ends) for own in slices])
    order = np.argsort(times, kind="stable")
    pushed = order[whats[order] == status_board.PUSHING]
    applied = order[whats[order] == status_board.APPLYING]
    node_of = nodes[whos[applied]]
    by_worker = applied[np.argsort(workers[applied], kind="stable")]
    numbers = workers[by_worker]
    ended = []
    for k, (traced, own) in enumerate(zip(ranks, slices, strict=True)):
        n, worker = len(own.whats), _worker(traced)
        found = Waits(np.full(n, -1), np.zeros(n), np.zeros(n, "i8"))
        # A wait, or a server's idle time, ends when another rank ends one of these slices.
        ending = {status_board.SERVING: pushed, status_board.CLOCKS: pushed}
        if worker >= 0:  # a server that waits for a shard waits for readers
            first, end = np.searchsorted(numbers, (worker, worker + 1))
            ending[status_board.BUFFER] = by_worker[first:end]
            remote = applied[node_of != nodes[k]]  # whose reads take longest
            ending[status_board.SHARD] = remote if len(remote) else applied
        for wait in set(ending) & set(own.whats.tolist()):
            candidates = ending[wait]
            _end_waits(found, own, wait, times[candidates], whos[candidates], k)
        rounds.add(k, own, found)
        ended.append(found)
    return ended


def _end_waits(
    found: Waits, own: Slices, wait: int, times: np.ndarray, whos: np.ndarray, rank: int
) -> None:
    """Write into `found` the last of `times` within each wait, if it is of another rank."""
    which = np.flatnonzero(own.whats == wait)
    at = np.searchsorted(times, own.ends[which], "right") - 1
    which, at = which[at >= 0], at[at >= 0]
    seen = (times[at] > own.begins[which]) & (whos[at] != rank)
    found.whos[which[seen]], found.whens[which[seen]] = whos[at[seen]], times[at[seen]]


def _worker(traced: Traced) -> int:
    workers, rank = traced.about["workers"], traced.about["rank"]
    return workers.index(rank) if rank in workers else -1


class _Rounds:
    """The rank that entered each round last, for which the other ranks waited.

    Args:
        ranks: Traces of all ranks.
        slices: Slices of all ranks.
    """

    def __init__(self, ranks: Sequence[Traced], slices: Sequence[Slices]) -> None:
        self._rounds_of = list(map(_entered, ranks, slices))
        self._last: dict[int, tuple[int, float]] = {}  # by round: the last rank, and its entry
        left: dict[int, float] = {}  # by round: the time at which the first rank left it
        for rank, (own, rounds) in enumerate(zip(slices, self._rounds_of, strict=True)):
            begins, ends = own.begins.tolist(), own.ends.tolist()
            for number, first, last in rounds:
                if begins[first] >= self._last.get(number, (rank, -math.inf))[1]:
                    self._last[number] = rank, begins[first]
                left[number] = min(left.get(number, math.inf), ends[last])
        for number, (_, entry) in self._last.items():
            if left[number] < entry:  # a rank left earlier: this round waits for no rank
                self._last[number] = -1, entry
        by_rank = reversed([*enumerate(self._rounds_of)])
        newest = {rounds[-1][0]: rank for rank, rounds in by_rank if rounds}
        # A rank that has not entered the newest round, while others wait in it.
        self._late = newest[min(newest)] if len(newest) > 1 else -1
        self._newest = max(newest, default=0)
        if self._late >= 0:
            self._last[self._newest] = -1, self._last[self._newest][1]

    def add(self, rank: int, own: Slices, waits: Waits) -> None:
        """Write into `waits` the ranks that ended the slices of a rank within rounds."""
        begins, ends = own.begins.tolist(), own.ends.tolist()
        for number, first, last in self._rounds_of[rank]:
            who, entry = self._last[number]
            for k in range(first, last + 1):
                waits.whos[k], waits.rounds[k] = -1, 0
                if who not in (rank, -1) and begins[k] < entry < ends[k]:
                    waits.whos[k], waits.whens[k], waits.rounds[k] = who, entry, number
            if self._late >= 0 and (number, last) == (self._newest, len(ends) - 1):
                waits.whos[last], waits.whens[last] = self._late, ends[last]


def _entered(traced: Traced, own: Slices) -> list[tuple[int, int, int]]:
    """Return the number, the first slice and the last slice of each round of a rank."""
    within = (own.whats == status_board.SUMMING) | (own.whats >= status_board.WAITING)
    before = np.append(False, within[:-1])
    firsts = np.flatnonzero((own.whats == status_board.SUMMING) & ~before)
    outside = np.append(np.flatnonzero(~within), len(within))
    lasts = outside[np.searchsorted(outside, firsts)] - 1
    numbers = traced.values[traced.whats == CLOCK].tolist()[: len(firsts)]
    if 0 < len(numbers) < len(firsts):  # the rank was killed in a round
        numbers.append(numbers[-1] + 1)
    return list(zip(numbers, firsts.tolist(), lasts.tolist(), strict=False))
