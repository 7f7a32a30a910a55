"""Copy-on-write snapshot of a shard's rows, in pieces, during updates.

A byte a line says which the snapshot still has to take. Before an update changes one of these, its
line is copied and set aside (`CopyOnWriteRows.keep`), and is taken from there. So beside the table
there are that byte, two pieces, and the lines that change before they are taken.
"""

from collections import deque
from collections.abc import Iterator
from threading import Lock

import numpy as np

PIECE_BYTES = 1 << 20  # an update waits as long as it takes to copy them
SCANNED = 1 << 16  # lines that are looked at together


class CopyOnWriteRows:
    """Lines of a shard at one moment. Collective: no.

    Its server calls `keep`; one other thread may go through `pieces` meanwhile.

    Args:
        lines: Of the shard, shape (at least n, width).
        wanted: Which of them are taken, shape (n,), dtype bool; changed.
        beside: What else is taken of each, shape (at least n,), such as when it was pushed.

    Attributes:
        count: How many are.
    """

    def __init__(self, lines: np.ndarray, wanted: np.ndarray, *beside: np.ndarray) -> None:
        self._arrays, self._wanted, self._lock = (lines, *beside), wanted, Lock()
        self._aside: deque[tuple[np.ndarray, ...]] = deque()
        self._waiting = 0  # lines in it
        self._most = max(1, PIECE_BYTES // (lines.shape[1] * lines.itemsize))
        self.count = int(np.count_nonzero(wanted))

    @property
    def over(self) -> bool:
        """Whether it has all that it wants, or was let go."""
        return not len(self._wanted)

    def keep(self, slot: np.ndarray) -> None:
        """Set aside what lines hold that are about to be changed. Blocks: while a piece is copied.

        Args:
            slot: Which lines, no two alike.
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
        """Yield which lines, and copies of them and of what is beside, until the snapshot has all.

        Once.

        First come none.
        """
        none = np.empty(0, np.int64)
        yield none, *(array[none] for array in self._arrays)
        for begin in range(0, len(self._wanted), SCANNED):
            with self._lock:  # NumPy counts them first, and refuses if they have become fewer
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
        """Let go of what has not been taken, and keep nothing more; may be called twice."""
        with self._lock:
            self._wanted = self._wanted[:0].copy()
            self._aside.clear()
            self._waiting = 0

    def _take(self, slot: np.ndarray) -> list[np.ndarray]:
        self._wanted[slot] = False
        return [array[slot] for array in self._arrays]

    def _set_aside(self, least: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield what was set aside, until it is fewer lines than `least`."""
        while self._waiting >= least:
            some, count = list[tuple[np.ndarray, ...]](), 0
            while self._aside and count < self._most:
                some.append(self._aside.popleft())
                count += len(some[-1][0])
            with self._lock:
                self._waiting -= count
            yield tuple(np.concatenate(each) for each in zip(*some, strict=True))
