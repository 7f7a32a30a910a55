"""Phases of each rank, and the rank that ended each wait."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.health import status_board
from mpips.health.trace_file import Traced

CLOCK = status_board.WORDS + status_board.CLOCK
# Who ends a wait, or a server's rest: a rank that has just left this phase. Of rounds, `_Rounds`.
ENDED_BY = {
    status_board.SERVING: status_board.PUSHING, status_board.CLOCKS: status_board.PUSHING,
    status_board.BUFFER: status_board.APPLYING, status_board.SHARD: status_board.APPLYING,
}  # fmt: skip


class Slices(NamedTuple):
    """The phases of a rank, one behind the other.

    Attributes:
        begins: When each begins, shape (n,), seconds.
        ends: When it ends.
        whats: Which of `status_board.PHASES` it is, shape (n,), int64.
        values: Of an applied push: its worker, above its number's 32 bits.
    """

    begins: np.ndarray
    ends: np.ndarray
    whats: np.ndarray
    values: np.ndarray

    def at(self, time: float) -> int:
        """Return the slice that ends at `time` or has it inside; -1 before the first."""
        return bisect_left(self.begins, time) - 1


class Waits(NamedTuple):
    """Who ended each slice of a rank, where that is seen.

    Attributes:
        whos: Which of the ranks did, as a place among their traces; -1 for none, shape (n,), int64.
        whens: When it had done what was waited for, shape (n,), seconds.
        rounds: The round that it entered last of all, and by that ended the slice; else 0.
    """

    whos: np.ndarray
    whens: np.ndarray
    rounds: np.ndarray


def waits_in(what: Any) -> Any:
    """Return whether a rank may wait for others in a phase, or in each of many."""
    return (what >= status_board.WAITING) | (what == status_board.SUMMING)


def slices(traced: Traced) -> Slices:
    """Return the phases of a rank; the last one goes on as long as the rank is known to live."""
    is_phase = traced.whats < status_board.WORDS
    begins, whats = traced.times[is_phase], traced.whats[is_phase]
    end = traced.times.max(keepdims=True) if len(begins) else begins
    return Slices(begins, np.append(begins[1:], end), whats, traced.values[is_phase])


def waits(ranks: Sequence[Traced], found: Sequence[Slices]) -> list[Waits]:
    """Return who ended the waits of each rank.

    Args:
        ranks: Their traces.
        found: Their slices.
    """
    rounds = _Rounds(ranks, found)
    nodes = [int(each.about["node"]) for each in ranks]
    serving = {
        nodes[k] for k, each in enumerate(found) if (each.whats == status_board.APPLYING).any()
    }
    known: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    ended = []
    for k, (traced, each) in enumerate(zip(ranks, found, strict=True)):
        n = len(each.whats)
        mine = Waits(np.full(n, -1), np.zeros(n), np.zeros(n, "i8"))
        for what, phase in ENDED_BY.items():
            which = np.flatnonzero(each.whats == what)
            if what == status_board.SHARD and _worker(traced) < 0:
                continue  # a server that waits for readers
            worker = _worker(traced) if what == status_board.BUFFER else -1  # its own pushes
            remote = what == status_board.SHARD and serving - {nodes[k]}
            near = nodes[k] if remote else -1  # whose shards it has to wait for least
            if (phase, worker, near) not in known:
                away = [node != near for node in nodes]
                known[phase, worker, near] = _ends(found, phase, worker, away)
            times, whos = known[phase, worker, near]
            at = np.searchsorted(times, each.ends[which], "right") - 1
            which, at = which[at >= 0], at[at >= 0]
            seen = (times[at] > each.begins[which]) & (whos[at] != k)
            mine.whos[which[seen]], mine.whens[which[seen]] = whos[at[seen]], times[at[seen]]
        rounds.add(k, each, mine)
        ended.append(mine)
    return ended


def _worker(traced: Traced) -> int:
    workers, rank = traced.about["workers"], traced.about["rank"]
    return workers.index(rank) if rank in workers else -1


def _ends(
    found: Sequence[Slices], phase: int, worker: int, counted: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Return when ranks left a phase, in that order, and which they were.

    Args:
        found: Their slices.
        phase: Which.
        worker: Whose push it has to be; -1 for any.
        counted: Which ranks count.
    """
    ends = []
    for each, counts in zip(found, counted, strict=True):
        which = (each.whats == phase) & counts
        if worker >= 0:
            which &= each.values >> 32 == worker
        ends.append(each.ends[which])
    times = np.concatenate(ends)
    order = np.argsort(times, kind="stable")
    return times[order], np.repeat(np.arange(len(ends)), list(map(len, ends)))[order]


class _Rounds:
    """Who entered each round last, so that the others waited for it.

    Args:
        ranks: All ranks.
        found: Their slices.
    """

    def __init__(self, ranks: Sequence[Traced], found: Sequence[Slices]) -> None:
        self._of = [_entered(*both) for both in zip(ranks, found, strict=True)]
        self._last: dict[int, tuple[int, float]] = {}  # by round: who came last, and when
        left: dict[int, float] = {}  # when the first one left
        for who, (each, rounds) in enumerate(zip(found, self._of, strict=True)):
            begins, ends = each.begins.tolist(), each.ends.tolist()
            for number, first, last in rounds:
                if begins[first] >= self._last.get(number, (who, -math.inf))[1]:
                    self._last[number] = who, begins[first]
                left[number] = min(left.get(number, math.inf), ends[last])
        for number, (_, when) in self._last.items():
            if left[number] < when:  # who left did not wait for it: none has to
                self._last[number] = -1, when
        newest = {rounds[-1][0]: who for who, rounds in reversed([*enumerate(self._of)]) if rounds}
        self._late = newest[min(newest)] if len(newest) > 1 else -1  # it has not come to the newest
        self._newest = max(newest, default=0)
        if self._late >= 0:
            self._last[self._newest] = -1, self._last[self._newest][1]

    def add(self, rank: int, each: Slices, waits: Waits) -> None:
        """Note who ended the slices of a rank within rounds."""
        begins, ends = each.begins.tolist(), each.ends.tolist()
        for number, first, last in self._of[rank]:
            who, when = self._last[number]
            for k in range(first, last + 1):
                waits.whos[k], waits.rounds[k] = -1, 0
                if who not in (rank, -1) and begins[k] < when < ends[k]:
                    waits.whos[k], waits.whens[k], waits.rounds[k] = who, when, number
            if self._late >= 0 and (number, last) == (self._newest, len(ends) - 1):
                waits.whos[last], waits.whens[last] = self._late, ends[last]  # it never came


def _entered(traced: Traced, each: Slices) -> list[tuple[int, int, int]]:
    """Return the number of each round of a rank, and the first and the last slice of it."""
    within = (each.whats == status_board.SUMMING) | (each.whats >= status_board.WAITING)
    before = np.append(False, within[:-1])
    firsts = np.flatnonzero((each.whats == status_board.SUMMING) & ~before)
    outside = np.append(np.flatnonzero(~within), len(within))
    lasts = outside[np.searchsorted(outside, firsts)] - 1
    numbers = traced.values[traced.whats == CLOCK].tolist()[: len(firsts)]
    if 0 < len(numbers) < len(firsts):  # it was killed in a round
        numbers.append(numbers[-1] + 1)
    return list(zip(numbers, firsts.tolist(), lasts.tolist(), strict=False))
