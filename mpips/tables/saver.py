"""Checkpoints of an owner that has rows of tables beside its shard."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import RowSource, TableRows
from mpips.kernels.vectors import all_finite
from mpips.snapshot.saver import Answer, Files, ShardSaver

PIECE_ROWS = 1 << 12
MOST_LINKS = 16  # longest chain of checkpoints, whose files a resume reads and checks


class SnapshotRows(RowSource, Protocol):
    """Rows of a table at a snapshot; later updates do not change them."""

    def close(self) -> None:
        """Drop the rows that are not copied yet."""


TakeRows: TypeAlias = Callable[[bool], Mapping[str, SnapshotRows]]


class TableSaver(ShardSaver):
    """Saves an owner's shard and the changed rows of its tables.

    The rows are copied from the live table into the file, a piece at a time, while training
    continues; with ``stall`` training waits. With `counts` a checkpoint contains the rows changed
    since the previous one, and adds to its rows. It contains all touched rows in four cases: first
    in a run, after a checkpoint that was not committed, after an eviction, and before a chain of
    checkpoints has more than `MOST_LINKS` links or more rows than are touched.

    Args:
        take: Returns a snapshot of the rows, by table; given true, only of rows changed since the
            last one.
        args: See `ShardSaver`; the named ones likewise.
        counts: Returns for each table the number of rows changed since the last snapshot, and the
            number of touched rows. It returns None after an eviction of rows. If `counts` is None,
            all touched rows are saved each time.
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
        self._base: int | None = None  # step of the last checkpoint, once it is committed
        self._last: int | None = None  # step of the last checkpoint that this owner took part in
        self._links = self._added = 0  # links of the chain so far, and their rows
        self._adds_to: int | None = None  # step of the checkpoint that the present one adds to

    def snapshot(self, step: int | None = None) -> None:
        """See `ArraySaver.snapshot`."""
        super().snapshot(step)
        self._adds_to, self._base, self._last = self._next_base(step), None, step
        self._rows = self._take(self._adds_to is not None)
        if self._adds_to is None:
            self._links = self._added = 0
        else:
            self._links += 1
            self._added += sum(table.count for table in self._rows.values())

    def _next_base(self, step: int | None) -> int | None:
        """Return the step of the checkpoint to add to; None to save all rows."""
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
        """Note that the checkpoint of a step is committed: the next one may add to it."""
        if step == self._last:  # else the checkpoint is from before this shard was taken over
            self._base = step

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        tables = {name: _CheckedRows(rows) for name, rows in self._rows.items()}
        try:  # rows first: until they are written, changing rows are queued in memory
            record = checkpoint.write_rows(folder, self.number, step, tables, self._adds_to)
        except _NotFiniteError:
            return None
        written = super()._write_files(folder, step, arrays)
        return None if written is None else (*written, record)

    def _report(self, answer: Answer) -> None:
        for rows in self._rows.values():
            rows.close()
        self._rows = {}
        super()._report(answer)


class _NotFiniteError(Exception):
    """A row is not finite."""


class _CheckedRows:
    """Rows that are checked as they are read; raises if one is not finite."""

    def __init__(self, rows: SnapshotRows) -> None:
        self._rows, self.count = rows, rows.count

    def pieces(self) -> Iterator[TableRows]:
        for piece in self._rows.pieces():
            if not _are_finite(piece.params):
                raise _NotFiniteError
            yield piece


def _are_finite(params: np.ndarray) -> bool:
    """Return whether all rows are finite; checks some at a time, since they are a view."""
    return all(
        all_finite(params[begin : begin + PIECE_ROWS].reshape(-1))
        for begin in range(0, len(params), PIECE_ROWS)
    )
