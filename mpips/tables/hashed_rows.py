"""Rows of the ids that a worker has of a table whose ids are hashed; those that share a row."""

import numpy as np

from mpips.datasets.hashed import Seen
from mpips.layout.tables import digests_of, rows_of


class HashedRows:
    """Finds the rows of ids, and notes which of them stand for several. Collective: no.

    Args:
        name: Of the table.
        rows: How many it has.

    Attributes:
        seen: What was noted.
    """

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows, self.seen = name, rows, Seen(rows)
        self._ids = self._numbers = np.empty(0, np.int64)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id; most often these are the ids of the call before.

        Args:
            ids: Integers or words, shape (n,).

        Returns:
            Shape (n,), int64; not to be written.

        Raises:
            UserError: If they are neither.
        """
        if ids.dtype != self._ids.dtype or not np.array_equal(ids, self._ids):
            digests = digests_of(self._name, ids)
            self.seen.add(digests)
            self._ids, self._numbers = ids.copy(), rows_of(digests, self._rows)
        return self._numbers
