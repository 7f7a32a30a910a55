"""Index of a lazy table, and eviction of its old rows.

Other processes read its memory while it grows.
"""

import numpy as np

from mpips.kernels import row_eviction, rows
from mpips.mpi.pages import give_back

FIRST_BITS = 10  # bits of the smallest index


def bits_for(lines: int) -> int:
    """Return the size of an index for a number of lines, as its number of bits."""
    bits = FIRST_BITS
    while rows.FULL << bits < lines * rows.FULL_OF:
        bits += 1
    return bits


class RowIndex:
    """Map from rows to their lines. Rows get lines in the order of their first use.

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
        """Number of rows with a line."""
        return int(self._header[rows.COUNT])

    @property
    def in_use(self) -> np.ndarray:
        """The part of the index that is in use."""
        return self._part(int(self._header[rows.BITS]))

    def local(self, slot: np.ndarray) -> np.ndarray:
        """Return the places in the server of the rows with these lines."""
        return self._keys[slot].astype(np.int64)

    def take(self, local: np.ndarray) -> np.ndarray | None:
        """Return the line of each row, new if it has none; None if there are not enough lines."""
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
        """Whether no eviction was interrupted."""
        return not self._header[rows.MOVES] & 1

    def evict(self, limit: int, seen: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> int:
        """Free the lines of rows last pushed before `limit`, and fill the gaps with the last lines.

        The index is rebuilt with another size beside the one in use. The memory of the old one, and
        of the lines after the last used one, goes back to the system.

        Args:
            limit: See `row_eviction.evict`.
            seen: The same.
            lines: The same.
            stripes: The same.

        Returns:
            Number of evicted rows.
        """
        header, keys, before = self._header, self._keys, self.count
        evicted = int(np.count_nonzero(seen[:before] < max(0, limit)))
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
        """Build the index of a size, and use it; clears its memory if lines were ever moved."""
        if self._header[rows.MOVES]:
            self._part(bits).fill(0)
        rows.fill_index(bits, self._header, self._index, self._keys)

    def _part(self, bits: int) -> np.ndarray:
        """Return the memory of the index of a size."""
        return self._index[1 << bits : 2 << bits]

    def mend(self) -> None:
        """Finish an interrupted assignment of a line, and clear an interrupted larger index.

        A smaller index whose memory was not given back yet is given back.
        """
        rows.mend_index(self._header, self._index, self._keys)
        size = 1 << int(self._header[rows.BITS])
        larger = self._index[2 * size : 4 * size]
        larger.fill(0)
        give_back(larger)
        give_back(self._index[:size])

    def _grow(self) -> None:
        """Build an index of twice the size, and give back the memory of the previous one."""
        bits = int(self._header[rows.BITS])
        self._fill(bits + 1)
        give_back(self._part(bits))


class RowAges:
    """Epochs of the last pushes of rows, in memory that outlasts their server. Collective: no.

    Args:
        seen: Epoch of each line's last push, dtype uint32.
        after: Number of epochs without a push after which a row is evicted.
        index: Index of the table.
        lines: Lines of the table.
        stripes: Stripe words of the table.

    Attributes:
        seen: As given.
        epoch: Epoch of the next updates.
        evicted: Number of rows that this object has evicted.
        shrunk: Whether rows were evicted since the last snapshot.
    """

    def __init__(
        self, seen: np.ndarray, after: int, index: RowIndex, lines: np.ndarray, stripes: np.ndarray
    ) -> None:
        self.seen, self._after, self._index = seen, after, index
        self._lines, self._stripes = lines, stripes
        self.epoch = self.evicted = 0
        self.shrunk = False

    def note(self, slot: np.ndarray, epochs: np.ndarray | None = None) -> None:
        """Set the epochs of lines; None for the epoch of the updates, unless theirs is later."""
        self.seen[slot] = np.maximum(self.seen[slot], self.epoch) if epochs is None else epochs

    def evict(self, over: int) -> None:
        """Reset the rows that were not pushed for too many epochs to untouched.

        No snapshot may be under way, since it finds rows by their lines.

        Args:
            over: Number of epochs whose pushes are all applied.
        """
        count = self._index.evict(over - self._after, self.seen, self._lines, self._stripes)
        self.evicted += count
        self.shrunk |= count > 0
