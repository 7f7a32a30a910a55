"""Checkpoints of an owner that has rows of tables beside its shard."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import TableRows
from mpips.cut.saver import Files, Saver
from mpips.kernels.vectors import all_finite

PIECE_ROWS = 1 << 12
TakeRows: TypeAlias = Callable[[], Mapping[str, TableRows]]


class TableSaver(Saver):
    """Saves one owner's shard, and those of its rows that have been changed.

    The rows are copied at the cut, whatever is done with the shard.

    Args:
        take: Returns copies of the rows, by table.
        args: See `Saver`; the others likewise.
    """

    def __init__(self, take: TakeRows, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._take = take
        self._rows: Mapping[str, TableRows] = {}

    def snapshot(self, step: int | None = None) -> None:
        """See `Snapshots.snapshot`."""
        super().snapshot(step)
        self._rows = self._take()

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        tables, self._rows = self._rows, {}
        if not all(_sound(table.params) for table in tables.values()):
            return None
        written = super()._write_files(folder, step, arrays)
        if written is None:
            return None
        return (*written, checkpoint.write_rows(folder, self.owner, step, tables))


def _sound(params: np.ndarray) -> bool:
    """Return whether all rows are finite; a piece at a time, for they are a view."""
    return all(
        all_finite(params[begin : begin + PIECE_ROWS].reshape(-1))
        for begin in range(0, len(params), PIECE_ROWS)
    )
