"""Load of a worker's rows by server, and its hottest rows.

The latter are found by a few counters over a sample of the ids, by Space-Saving.

References: A. Metwally, D. Agrawal, A. El Abbadi, "Efficient Computation of Frequent and Top-k
Elements in Data Streams", ICDT 2005.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpips.kernels.compiled import Vector, kernel
from mpips.layout.tables import Ownership

Matrix = np.ndarray

STEP = 509  # of so many ids one is looked at; a prime, as ids of a batch may have a period
KEYS, COUNTS, ERRORS = range(3)  # of the counters
COUNTERS = 128
LEAST = 4  # of the ids looked at that are a row's, by which it is called hot
SHOWN = 8  # hot rows


@kernel(quick=True)
def note_places(places: Vector, begins: Vector, sampled: Vector, following: Vector) -> None:
    """Count one place in `STEP` for the server that owns it.

    Args:
        places: Of the ids that are read now, shape (n,), int64.
        begins: The first place of each server, and the end, shape (servers + 1,), int64.
        sampled: Counts, shape (servers,), int64.
        following: How many ids are left out before the next one, shape (1,), int64.
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
    """Count rows by their server, and one id in `STEP` among those that occur most.

    An id that has no counter takes that of the id that was counted least.

    Args:
        ids: Row numbers, shape (n,), int64.
        bounds: Where each server's rows begin, and the end, shape (servers + 1,), int64.
        pushed: Rows by server, shape (servers,), int64.
        counters: The id of each, how often it was counted, and by how much that may be too many,
            shape (3, k), int64, at first 0.
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
    """What a worker reads and pushes of a table, by server, and which rows it pushes most.

    Rows pushed are counted; the rest follows from one id in `STEP`. Collective: no.

    Args:
        ownership: Of the table.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._begins = ownership.begins
        self._pushed, self._sampled = np.zeros((2, ownership.servers), np.int64)
        self._counters = np.zeros((3, COUNTERS), np.int64)
        self._pulls, self._pushes = np.full((2, 1), STEP // 2)  # ids left out before the next

    def pull(self, places: np.ndarray) -> None:
        """Note what is read: the place of each id's row, shape (n,), int64."""
        note_places(places, self._begins, self._sampled, self._pulls)

    def push(self, ids: np.ndarray, bounds: np.ndarray) -> None:
        """Note what is pushed: ids, shape (n,), and where each server's rows begin, int64."""
        if ids.dtype != np.int64 or not ids.flags.c_contiguous:
            ids = np.ascontiguousarray(ids, np.int64)
        note_pushed(ids, bounds, self._pushed, self._counters, self._pushes)

    def stats(self) -> dict[str, Any]:
        """Return what was noted, as `hot_rows` and `rows_by_server` take it."""
        return {
            "rows_pulled": (STEP * self._sampled).tolist(),
            "rows_pushed": self._pushed.tolist(),
            "counters": [each for each in self._counters.T.tolist() if each[COUNTS]],
        }


def hot_rows(loads: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the rows that are pushed most, of all workers together.

    Args:
        loads: What `RowLoad.stats` gave of each worker.

    Returns:
        Each as ``row`` and ``share``: the part of the ids that are its own, at least; those alone
        that were seen often enough, the most frequent first.
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
    """Return ``rows_pulled`` or ``rows_pushed`` of each server, of all workers together."""
    return [sum(each) for each in zip(*(load[name] for load in loads), strict=True)]


def warm() -> None:
    """Compile, or load from the cache on disk, what `RowLoad` needs."""
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    note_places(one[:0], two, one.copy(), one.copy())
    note_pushed(one, two, one.copy(), np.zeros((3, 1), np.int64), one.copy())
