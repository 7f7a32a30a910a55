"""Index of a lazy table, and the eviction of its old rows.

Others read its memory while it grows.
"""

import numpy as np

from mpips.kernels import row_eviction, rows
from mpips.mpi.pages import give_back
from mpips.tables.copy_on_write import CopyOnWriteRows

FIRST_BITS = 10  # of the index, at first


def bits_for(lines: int) -> int:
    """Return the size of an index of so many lines, as the number of its bits."""
    bits = FIRST_BITS
    while rows.FULL << bits < lines * rows.FULL_OF:
        bits += 1
    return bits


class RowIndex:
    """Which line a row has: lines are given in the order in which rows are touched.

    Args:
        header: See `rows.take_lines`.
        index: The same.
        keys: The same.
    """

    def __init__(self, header: np.ndarray, index: np.ndarray, keys: np.ndarray) -> None:
        self._header, self._index, self._keys = header, index, keys
        if not header[rows.BITS]:
            header[rows.LINE_BITS] = len(keys).bit_length()
            rows.fill_index(FIRST_BITS, header, index, keys)

    @property
    def count(self) -> int:
        """How many rows have a line."""
        return int(self._header[rows.COUNT])

    @property
    def in_use(self) -> np.ndarray:
        """The part of the index that is in use."""
        return self._part(int(self._header[rows.BITS]))

    def local(self, slot: np.ndarray) -> np.ndarray:
        """Return the places in the server of the rows that have these lines."""
        return self._keys[slot].astype(np.int64)

    def take(self, local: np.ndarray) -> np.ndarray | None:
        """Return the line of each row, new where it has none; None where there are not enough."""
        slot = np.empty(len(local), np.int64)
        done = 0
        while True:
            done = rows.take_lines(local, done, self._header, self._index, self._keys, slot)
            if done == len(local):
                return slot
            if self.count == len(self._keys):
                return None
            self._grow()

    @property
    def whole(self) -> bool:
        """Whether nobody was stopped in the midst of an eviction."""
        return not self._header[rows.MOVES] & 1

    def evict(self, limit: int, seen: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> int:
        """Take the lines from rows that were seen before `limit`; the last ones go to their places.

        A new index is filled beside the one in use, of another size, and the old one is given back,
        with the memory of the lines behind those that are left.

        Args:
            limit: See `row_eviction.evict`.
            seen: The same.
            lines: The same.
            stripes: The same.

        Returns:
            How many rows these were.
        """
        header, keys, before = self._header, self._keys, self.count
        evicted = row_eviction.count_older(limit, before, seen)
        if not evicted:
            return 0
        old, bits = self.in_use, bits_for(before - evicted)
        bits += bits == header[rows.BITS]
        row_eviction.evict(limit, header, keys, seen, lines, stripes)
        self._fill(bits)
        row_eviction.free_lines(before, header, keys, lines, stripes)
        give_back(old)
        give_back(lines[before - evicted : before])
        return evicted

    def _fill(self, bits: int) -> None:
        """Make the index of a size, and use it; it was in use before only if lines were moved."""
        if self._header[rows.MOVES]:
            self._part(bits).fill(0)
        rows.fill_index(bits, self._header, self._index, self._keys)

    def _part(self, bits: int) -> np.ndarray:
        """Return the index of a size."""
        return self._index[1 << bits : 2 << bits]

    def mend(self) -> None:
        """Finish to give a row its line; begin anew to make a larger index, which was not in use.

        A smaller one that was not given back yet is.
        """
        rows.mend_index(self._header, self._index, self._keys)
        size = 1 << int(self._header[rows.BITS])
        larger = self._index[2 * size : 4 * size]
        larger.fill(0)
        give_back(larger)
        give_back(self._index[:size])

    def _grow(self) -> None:
        """Make an index of twice the size, and give the memory of the one before it back."""
        bits = int(self._header[rows.BITS])
        self._fill(bits + 1)
        give_back(self._part(bits))


class RowAges:
    """When rows were pushed, in memory that outlasts their server. Collective: no.

    Args:
        seen: The epoch of each line, dtype uint32.
        after: Epochs without a push, after which a row is evicted.
        index: Which line a row has.
        lines: Of the table.
        stripes: Its stripe words.

    Attributes:
        seen: As given.
        epoch: Of the updates that come.
        evicted: Rows that were, by this object.
        shrunk: Whether any was since the last snapshot.
    """

    def __init__(
        self, seen: np.ndarray, after: int, index: RowIndex, lines: np.ndarray, stripes: np.ndarray
    ) -> None:
        self.seen, self._after, self._index = seen, after, index
        self._lines, self._stripes = lines, stripes
        self._snapshot: CopyOnWriteRows | None = None
        self.epoch = self.evicted = 0
        self.shrunk = False

    @property
    def whole(self) -> bool:
        """Whether nobody was stopped in the midst of an eviction."""
        return self._index.whole

    @property
    def in_snapshot(self) -> bool:
        """Whether a snapshot is being taken: no row may be evicted then."""
        return self._snapshot is not None and not self._snapshot.over

    def note(self, slot: np.ndarray, epochs: np.ndarray | None = None) -> None:
        """Note when lines were pushed; None for the epoch of the updates, or later."""
        self.seen[slot] = np.maximum(self.seen[slot], self.epoch) if epochs is None else epochs

    def begin_snapshot(self, snapshot: CopyOnWriteRows) -> None:
        """Note a snapshot, by whose lines rows are found until it is over."""
        self._snapshot, self.shrunk = snapshot, False

    def evict(self, over: int) -> bool:
        """Have rows be untouched again that have not been pushed for so long.

        Args:
            over: Epochs of which nothing more is pushed.

        Returns:
            Whether that was done; not while a snapshot is taken.
        """
        if self.in_snapshot:
            return False
        count = self._index.evict(over - self._after, self.seen, self._lines, self._stripes)
        self.evicted += count
        self.shrunk |= count > 0
        return True
