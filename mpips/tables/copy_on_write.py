"""Copy-on-write snapshot of a shard's rows, in pieces, during updates.

One byte a line marks the lines that the snapshot still has to copy. Before an update changes such a
line, `CopyOnWriteRows.keep` copies it to a queue, from which the snapshot takes it. So a snapshot
needs memory for this byte a line, two pieces, and the queued lines.
"""

from collections import deque
from collections.abc import Iterator
from threading import Lock

import numpy as np

PIECE_BYTES = 1 << 20  # an update waits at most for the copy of a piece
SCANNED = 1 << 16  # lines scanned at a time


class CopyOnWriteRows:
    """Lines of a shard at one moment. Collective: no.

    The server calls `keep`; one other thread may iterate over `pieces` meanwhile.

    Args:
        lines: Lines of the shard, shape (at least n, width).
        wanted: Lines to copy, shape (n,), dtype bool; changed.
        beside: Other arrays to copy for each line, shape (at least n,), such as the epoch of its
            last push.

    Attributes:
        count: Number of lines to copy.
    """

    def __init__(self, lines: np.ndarray, wanted: np.ndarray, *beside: np.ndarray) -> None:
        self._arrays, self._wanted, self._lock = (lines, *beside), wanted, Lock()
        self._aside: deque[tuple[np.ndarray, ...]] = deque()
        self._waiting = 0  # number of queued lines
        self._most = max(1, PIECE_BYTES // (lines.shape[1] * lines.itemsize))
        self.count = int(np.count_nonzero(wanted))

    @property
    def over(self) -> bool:
        """Whether the snapshot is complete or closed."""
        return not len(self._wanted)

    def keep(self, slot: np.ndarray) -> None:
        """Queue copies of lines that are about to change. Blocks: while a piece is copied.

        Args:
            slot: Numbers of the lines, each once.
        """
        if self.over:
            return
        with self._lock:
            slot = slot[slot < len(self._wanted)]
            slot = slot[self._wanted[slot]]
            if len(slot):
                self._aside.append((slot, *self._take(slot)))
                self._waiting += len(slot)

    def pieces(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield line numbers, and copies of the lines and the other arrays. Iterate once.

        The first piece is empty.
        """
        none = np.empty(0, np.int64)
        yield none, *(array[none] for array in self._arrays)
        for begin in range(0, len(self._wanted), SCANNED):
            with self._lock:  # np.flatnonzero counts first, and fails if the count has changed
                left = begin + np.flatnonzero(self._wanted[begin : begin + SCANNED])
            for at in range(0, len(left), self._most):
                some = left[at : at + self._most]
                with self._lock:
                    some = some[self._wanted[some]]
                    taken = self._take(some)
                yield some, *taken
                yield from self._set_aside(self._most)
        yield from self._set_aside(1)
        self.close()

    def close(self) -> None:
        """Drop the lines that are not copied yet, and keep no more; may be called twice."""
        with self._lock:
            self._wanted = self._wanted[:0].copy()
            self._aside.clear()
            self._waiting = 0

    def _take(self, slot: np.ndarray) -> list[np.ndarray]:
        self._wanted[slot] = False
        return [array[slot] for array in self._arrays]

    def _set_aside(self, least: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield queued lines, until fewer than `least` are queued."""
        while self._waiting >= least:
            some, count = list[tuple[np.ndarray, ...]](), 0
            while self._aside and count < self._most:
                some.append(self._aside.popleft())
                count += len(some[-1][0])
            with self._lock:
                self._waiting -= count
            yield tuple(np.concatenate(each) for each in zip(*some, strict=True))
