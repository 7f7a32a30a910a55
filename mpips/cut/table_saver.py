"""Checkpoints of an owner that has rows of tables beside its shard."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import TableRows
from mpips.cut.saver import Files, Saver
from mpips.kernels.vectors import all_finite

PIECE_ROWS = 1 << 12
MOST_LINKS = 16  # files that are read, and checked, to go on from a chain of checkpoints
TakeRows: TypeAlias = Callable[[], Mapping[str, TableRows]]


class Changes(NamedTuple):
    """Which rows have been changed since they were copied last.

    Attributes:
        take: Returns copies of them, by table.
        counts: Returns of each table how many they are, and how many have ever been changed.
    """

    take: TakeRows
    counts: Callable[[], Sequence[tuple[int, int]]]


class TableSaver(Saver):
    """Saves one owner's shard, and those of its rows that have been changed.

    The rows are copied at the cut, whatever is done with the shard. With `changes` they are those
    that have been changed since the last checkpoint, to whose rows they add. All of them are saved
    first in a run, after a checkpoint that was not committed, and before a chain has more than
    `MOST_LINKS` or more rows than there are.

    Args:
        take: Returns copies of the rows, by table.
        args: See `Saver`; the others likewise.
        changes: Of the rows; None to save all of them each time.
    """

    def __init__(
        self, take: TakeRows, *args: Any, changes: Changes | None = None, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self._take, self._changes = take, changes
        self._rows: Mapping[str, TableRows] = {}
        self._base: int | None = None  # the last checkpoint, once it is committed
        self._last: int | None = None  # that this has a part in
        self._links = self._added = 0  # behind it, and their rows
        self._adds_to: int | None = None  # what the rows add to that are being saved

    def snapshot(self, step: int | None = None) -> None:
        """See `Snapshots.snapshot`."""
        super().snapshot(step)
        self._adds_to, self._base, self._last = self._next_base(step), None, step
        if self._adds_to is None or self._changes is None:
            self._rows, self._links, self._added = self._take(), 0, 0
        else:
            self._rows = self._changes.take()
            self._links += 1
            self._added += sum(len(table.rows) for table in self._rows.values())

    def _next_base(self, step: int | None) -> int | None:
        """Return the step of the checkpoint to add to; None where all rows are to be saved."""
        base = self._base
        if self._changes is None or base is None or step is None or step <= base:
            return None
        marked, touched = map(sum, zip(*self._changes.counts(), strict=True))
        long = self._links == MOST_LINKS or self._added + marked >= touched
        return None if long and touched else base

    def committed(self, step: int) -> None:
        """Learn that the checkpoint of a step is committed: the next one may add to it."""
        if step == self._last:  # else it is of before this shard was taken over
            self._base = step

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        tables, self._rows = self._rows, {}
        if not all(_sound(table.params) for table in tables.values()):
            return None
        written = super()._write_files(folder, step, arrays)
        if written is None:
            return None
        return (*written, checkpoint.write_rows(folder, self.owner, step, tables, self._adds_to))


def _sound(params: np.ndarray) -> bool:
    """Return whether all rows are finite; a piece at a time, for they are a view."""
    return all(
        all_finite(params[begin : begin + PIECE_ROWS].reshape(-1))
        for begin in range(0, len(params), PIECE_ROWS)
    )
