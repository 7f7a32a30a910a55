"""Rows of a table in a checkpoint, by their numbers.

The table's description in the checkpoint determines the values of untouched rows. So reading them
needs no code of the program.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpips.checkpoint import Checkpoint, Ordered
from mpips.errors import UserError
from mpips.layout import tables
from mpips.layout.tables import Grouped, Init, Normal, Ownership, Table, Uniform, Zeros
from mpips.optim.row_rules import Sgd
from mpips.tables.shard import shard_in_memory


def _ownership(name: str, description: Mapping[str, Any]) -> Ownership:
    """Return a table with a single owner, from its description in a checkpoint."""
    kinds: dict[str, Callable[[float], Init]] = {
        "Normal": Normal, "Uniform": Uniform, "Zeros": lambda scale: Zeros()
    }  # fmt: skip
    init = kinds[description["init"]](float(description["scale"]))
    table = Table(description["rows"], description["dim"], init, hashed=description["hashed"])
    return Ownership(name, table, 1, description["seed"])


def _untouched(owned: Ownership, grouped: Grouped, dtype: np.dtype) -> np.ndarray:
    """Return the initial values of rows, shape (k, dim)."""
    lazy = replace(owned, table=replace(owned.table, capacity="lazy"))
    found = np.empty((len(grouped.local), owned.table.dim), dtype)
    shard_in_memory(lazy, Sgd(), dtype.name, most=1).pull(grouped.local, found)
    return found


def find_rows(checkpoint: Checkpoint, name: str, ids: Any) -> np.ndarray:
    """Return rows of a table as they were saved.

    Args:
        checkpoint: The checkpoint.
        name: Name of the table.
        ids: Row numbers, integers of any shape, duplicates allowed; for a table with hashed ids any
            integers or strings.

    Returns:
        The rows, shape (*ids.shape, dim), the checkpoint's dtype.

    Raises:
        UserError: If there is no such table, an id is out of range, or the checkpoint cannot be
            read.
    """
    if not checkpoint.tables:
        raise UserError(f"rows of table {name!r} in a run without tables", "one that has tables")
    return SavedRows(checkpoint).pull(name, ids)


class SavedRows:
    """Rows of a checkpoint's tables; keeps a table's row numbers, not values, after its first use.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._kept: dict[str, list[Ordered]] = {}

    def pull(self, name: str, ids: Any) -> np.ndarray:
        """Return rows of a table; see `find_rows`."""
        if name not in self._kept:
            self._kept[name] = self._checkpoint.ordered_rows(name)
        ids, dtype = tables.as_array(name, ids), self._checkpoint.dtype
        owned = _ownership(name, self._checkpoint.tables[name])
        flat = ids.reshape(-1)
        if owned.table.hashed:
            flat = tables.rows_of(tables.digests_of(name, flat), owned.table.rows)
        grouped = owned.group(flat)
        numbers = owned.rows_of(0, grouped.local)
        found = _untouched(owned, grouped, dtype)
        for piece in self._kept[name]:
            piece.read(numbers, found)
        out = np.empty((ids.size, owned.table.dim), dtype)
        out[grouped.order] = np.repeat(found, np.diff(grouped.starts), axis=0)
        return out.reshape(*ids.shape, owned.table.dim)
