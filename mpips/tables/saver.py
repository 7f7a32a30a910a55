"""Checkpoints of an owner that has rows of tables beside its shard."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import RowSource, TableRows
from mpips.kernels.vectors import all_finite
from mpips.snapshot.saver import Answer, Files, Saver

PIECE_ROWS = 1 << 12
MOST_LINKS = 16  # files that are read, and checked, to go on from a chain of checkpoints


class SnapshotRows(RowSource, Protocol):
    """Rows of a table as they are at a snapshot, whatever is done with them later."""

    def close(self) -> None:
        """Let go of them."""


TakeRows: TypeAlias = Callable[[bool], Mapping[str, SnapshotRows]]


class TableSaver(Saver):
    """Saves one owner's shard, and those of its rows that have been changed.

    The rows go from the live table into the file, a piece at a time, while training goes on; with
    ``stall`` it is held. With `counts` they are those that have been changed since the last
    checkpoint, to whose rows they add. All of them are saved first in a run, after a checkpoint
    that was not committed, after rows were evicted, and before a chain has more than `MOST_LINKS`
    or more rows than there are.

    Args:
        take: Returns the rows by table as they are now; given true, those changed since then.
        args: See `Saver`; the others likewise.
        counts: Returns of each table how many rows have been changed since they were taken last,
            and how many have ever been, or None where rows that were saved are no more; None to
            save all of them each time.
    """

    def __init__(
        self,
        take: TakeRows,
        *args: Any,
        counts: Callable[[], Sequence[tuple[int, int]] | None] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._take, self._counts = take, counts
        self._rows: Mapping[str, SnapshotRows] = {}
        self._base: int | None = None  # the last checkpoint, once it is committed
        self._last: int | None = None  # that this has a part in
        self._links = self._added = 0  # behind it, and their rows
        self._adds_to: int | None = None  # what the rows add to that are being saved

    def snapshot(self, step: int | None = None) -> None:
        """See `Snapshots.snapshot`."""
        super().snapshot(step)
        self._adds_to, self._base, self._last = self._next_base(step), None, step
        self._rows = self._take(self._adds_to is not None)
        if self._adds_to is None:
            self._links = self._added = 0
        else:
            self._links += 1
            self._added += sum(table.count for table in self._rows.values())

    def _next_base(self, step: int | None) -> int | None:
        """Return the step of the checkpoint to add to; None where all rows are to be saved."""
        base = self._base
        if self._counts is None or base is None or step is None or step <= base:
            return None
        counts = self._counts()
        if counts is None:
            return None
        marked, touched = map(sum, zip(*counts, strict=True))
        long = self._links == MOST_LINKS or self._added + marked >= touched
        return None if long and touched else base

    def committed(self, step: int) -> None:
        """Learn that the checkpoint of a step is committed: the next one may add to it."""
        if step == self._last:  # else it is of before this shard was taken over
            self._base = step

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        tables = {name: _Sound(rows) for name, rows in self._rows.items()}
        try:  # first: until they are written, rows that change are set aside
            record = checkpoint.write_rows(folder, self.number, step, tables, self._adds_to)
        except _Unsound:
            return None
        written = super()._write_files(folder, step, arrays)
        return None if written is None else (*written, record)

    def _report(self, answer: Answer) -> None:
        for rows in self._rows.values():
            rows.close()
        self._rows = {}
        super()._report(answer)


class _Unsound(Exception):
    """A row that is not finite."""


class _Sound:
    """Rows that are looked at as they come: `_Unsound` if one is not finite."""

    def __init__(self, rows: SnapshotRows) -> None:
        self._rows, self.count = rows, rows.count

    def pieces(self) -> Iterator[TableRows]:
        for piece in self._rows.pieces():
            if not _sound(piece.params):
                raise _Unsound
            yield piece


def _sound(params: np.ndarray) -> bool:
    """Return whether all rows are finite; some at a time, for they are a view."""
    return all(
        all_finite(params[begin : begin + PIECE_ROWS].reshape(-1))
        for begin in range(0, len(params), PIECE_ROWS)
    )
