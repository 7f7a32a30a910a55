"""Load of a worker's rows by server, and its hottest rows.

A few counters over a sample of the ids find the hottest rows, by the Space-Saving algorithm.

References: A. Metwally, D. Agrawal, A. El Abbadi, "Efficient Computation of Frequent and Top-k
Elements in Data Streams", ICDT 2005.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpips.kernels.compiled import Vector, kernel
from mpips.layout.tables import Ownership

Matrix = np.ndarray

STEP = 509  # one of so many ids is sampled; a prime, as ids of a batch may have a period
KEYS, COUNTS, ERRORS = range(3)  # rows of the counters
COUNTERS = 128
LEAST = 4  # least certain samples of a hot row
SHOWN = 8  # most hot rows


@kernel(quick=True)
def note_places(places: Vector, begins: Vector, sampled: Vector, following: Vector) -> None:
    """Count one place in `STEP` for the server that owns it.

    Args:
        places: Places of the ids of a pull, shape (n,), int64.
        begins: First place of each server, and the end, shape (servers + 1,), int64.
        sampled: Counts, shape (servers,), int64.
        following: Number of ids to skip before the next sample, shape (1,), int64.
    """
    at = following[0]
    while at < places.size:
        server = 0
        while places[at] >= begins[server + 1]:
            server += 1
        sampled[server] += 1
        at += STEP
    following[0] = at - places.size


@kernel(quick=True)
def note_pushed(
    ids: Vector, bounds: Vector, pushed: Vector, counters: Matrix, following: Vector
) -> None:
    """Count rows by server, and one id in `STEP` among the most frequent ids.

    An id without a counter replaces the id with the smallest count.

    Args:
        ids: Row numbers, shape (n,), int64.
        bounds: First row of each server in the push, and the end, shape (servers + 1,), int64.
        pushed: Rows by server, shape (servers,), int64.
        counters: Id of each counter, its count, and the largest error of the count, shape (3, k),
            int64; initially 0.
        following: As for `note_places`.
    """
    for server in range(pushed.size):
        pushed[server] += bounds[server + 1] - bounds[server]
    keys, counts, errors = counters[KEYS], counters[COUNTS], counters[ERRORS]
    at = following[0]
    while at < ids.size:
        place, found = 0, False
        for k in range(keys.size):
            if keys[k] == ids[at] and counts[k]:
                place, found = k, True
                break
            if counts[k] < counts[place]:
                place = k
        if not found:
            keys[place], errors[place] = ids[at], counts[place]
        counts[place] += 1
        at += STEP
    following[0] = at - ids.size


class RowLoad:
    """Rows of a table that a worker reads and pushes, by server, and its hottest rows.

    Pushed rows are counted exactly; the other figures are from one id in `STEP`. Collective: no.

    Args:
        ownership: Ownership of the table.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._begins = ownership.begins
        self._pushed, self._sampled = np.zeros((2, ownership.servers), np.int64)
        self._counters = np.zeros((3, COUNTERS), np.int64)
        self._pulls, self._pushes = np.full((2, 1), STEP // 2)  # ids to skip before the next sample

    def pull(self, places: np.ndarray) -> None:
        """Count a pull: place of each id's row, shape (n,), int64."""
        note_places(places, self._begins, self._sampled, self._pulls)

    def push(self, ids: np.ndarray, bounds: np.ndarray) -> None:
        """Count a push: ids, shape (n,), and the bounds of each server's rows, int64."""
        if ids.dtype != np.int64 or not ids.flags.c_contiguous:
            ids = np.ascontiguousarray(ids, np.int64)
        note_pushed(ids, bounds, self._pushed, self._counters, self._pushes)

    def stats(self) -> dict[str, Any]:
        """Return the counts, in the form that `hot_rows` and `rows_by_server` take."""
        return {
            "rows_pulled": (STEP * self._sampled).tolist(),
            "rows_pushed": self._pushed.tolist(),
            "counters": [each for each in self._counters.T.tolist() if each[COUNTS]],
        }


def hot_rows(loads: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the rows that all workers together push most.

    Args:
        loads: `RowLoad.stats` of each worker.

    Returns:
        Each row as ``row`` and ``share``, a lower bound of its share of the ids. Only rows with at
        least `LEAST` certain samples, the most frequent first.
    """
    total, surely = 0, dict[int, int]()
    for load in loads:
        for row, count, error in load["counters"]:
            total += count
            surely[row] = surely.get(row, 0) + count - error
    ordered = sorted(surely.items(), key=lambda pair: (-pair[1], pair[0]))
    hot = [(row, count) for row, count in ordered[:SHOWN] if count >= LEAST]
    return [{"row": row, "share": round(count / total, 4)} for row, count in hot]


def rows_by_server(loads: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    """Return ``rows_pulled`` or ``rows_pushed`` of each server, summed over the workers."""
    return [sum(each) for each in zip(*(load[name] for load in loads), strict=True)]


def warm() -> None:
    """Compile the loops of `RowLoad`, or load them from the cache on disk."""
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    note_places(one[:0], two, one.copy(), one.copy())
    note_pushed(one, two, one.copy(), np.zeros((3, 1), np.int64), one.copy())
