"""When the rows of a lazy table were pushed last, and the eviction of those that are old."""

import numpy as np

from mpips.tables.copy_on_write import CopyOnWriteRows
from mpips.tables.slot_index import RowIndex


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
        self,
        seen: np.ndarray,
        after: int,
        index: RowIndex,
        lines: np.ndarray,
        stripes: np.ndarray,
    ) -> None:
        self.seen, self._after, self._index = seen, after, index
        self._lines, self._stripes = lines, stripes
        self._cut: CopyOnWriteRows | None = None
        self.epoch = self.evicted = 0
        self.shrunk = False

    @property
    def whole(self) -> bool:
        """Whether nobody was stopped in the midst of an eviction."""
        return self._index.whole

    @property
    def in_snapshot(self) -> bool:
        """Whether a snapshot is being taken: no row may be evicted then."""
        return self._cut is not None and not self._cut.over

    def note(self, slot: np.ndarray, epochs: np.ndarray | None = None) -> None:
        """Note when lines were pushed; None for the epoch of the updates, or later."""
        self.seen[slot] = np.maximum(self.seen[slot], self.epoch) if epochs is None else epochs

    def begin_snapshot(self, cut: CopyOnWriteRows) -> None:
        """Note a snapshot, by whose lines rows are found until it is over."""
        self._cut, self.shrunk = cut, False

    def evict(self, over: int) -> bool:
        """Have rows be untouched again that have not been pushed for so long.

        Args:
            over: Epochs of which nothing more is pushed.

        Returns:
            Whether that was done; not while a snapshot is taken.
        """
        if self.in_snapshot:
            return False
        limit = over - self._after
        count = self._index.evict(limit, self.seen, self._lines, self._stripes)
        self.evicted += count
        self.shrunk |= count > 0
        return True
