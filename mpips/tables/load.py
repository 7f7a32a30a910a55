"""How a worker's rows are spread: over servers, and which of them are pushed most."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpips.layout.tables import Ownership
from mpips.tables.load_counts import COUNTS, STEP, note_places, note_pushed

COUNTERS = 128
LEAST = 4  # of the ids looked at that are a row's, by which it is called hot
SHOWN = 8  # hot rows


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
