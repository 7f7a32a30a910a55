"""Undo log of a server's tables; `mpips.failover.undo_log` has that of its shard.

The rows of a push are changed piece by piece, behind the pieces of the shard, and pieces are
numbered on behind those, table by table. Before a piece its lines are copied into one half of the
undo memory, with what says whether they have been touched, and then its number is published. So of
an update of which piece k is noted the shard is whole, and so are the pieces before k; the lines of
k are set back to what they were; and the push is applied from k on. An update takes 1.4 times as
long, as it is the copying that fetches the lines.

Lines of a lazy table are given to all rows of a push before the first of them is changed, and given
again they are the same: a row has one as soon as the index says so. A line that was given and not
put into the index yet is put there. A larger index that was not in use yet is made anew.

Which rows have changed since the last checkpoint, who takes over them does not know: the next one
has all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mpips.failover.undo_log import HALVES, PIECE, UndoLog
from mpips.kernels import row_undo
from mpips.kernels.atomics import publish
from mpips.layout.tables import Ownership, Table
from mpips.mpi.window import Field
from mpips.optim.row_rules import RowRule
from mpips.planning.tables import JobTable
from mpips.tables.server import ServedTable
from mpips.tables.shard import TableShard, row_fields
from mpips.transport.push import Push

ROW_UNDO_BYTES = 1 << 18  # of lines in a piece: with those that they are of, within an L2 cache


def row_undo_fields(tables: Sequence[JobTable], dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment that keep the old values of its rows."""
    if not tables:
        return ()
    item = np.dtype(dtype).itemsize
    widths = [table.rule.width(table.dim) for table in tables]
    numbers = max(width * _rows_of_piece(width * item) for width in widths)
    most = max(_rows_of_piece(width * item) for width in widths)
    return (Field("row_undo", dtype, (HALVES, numbers)), Field("touched", "i8", (HALVES, most)))


def _rows_of_piece(line_bytes: int) -> int:
    return max(1, ROW_UNDO_BYTES // line_bytes)


class RowUndo:
    """The old lines of a server's rows, while an update changes them. Collective: no.

    Args:
        log: Of the server.
        memory: Of the window: ``row_undo`` and ``touched``.
        tables: The server's rows.
    """

    def __init__(
        self, log: UndoLog, memory: tuple[np.ndarray, np.ndarray], tables: Sequence[ServedTable]
    ) -> None:
        self._log, (self._lines, self._touched), self._tables = log, memory, tables

    def pieces(self, slot: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> Iterator[slice]:
        """See `mpips.tables.shard.Undo`; those that are applied already are left out."""
        log, step = self._log, _rows_of_piece(lines.shape[1] * lines.itemsize)
        for at in range(0, len(slot), step):
            number, log.next = log.next, log.next + 1
            if number >= log.first:
                part = slice(at, at + step)
                kept = self._kept(number, len(slot[part]), lines.shape[1])
                row_undo.keep(slot[part], lines, stripes, *kept)
                publish(log.undo_log, PIECE, number)
                yield part

    def go_back(self, number: int, push: Push | None) -> int:
        """Undo what may be half done of a piece.

        See `mpips.failover.undo_log.DenseUndo.go_back`.
        """
        for served in self._tables:
            if served.shard.index is not None:
                served.shard.index.mend()
        if number < 0:
            return number
        assert push is not None, "tables are of one node"
        for served, (places, sums) in zip(self._tables, push.rows, strict=True):
            width = served.table.rule.width(served.table.dim)
            step = _rows_of_piece(width * sums.itemsize)
            pieces = -(-len(places) // step)
            if 0 <= number < pieces:
                part = places[number * step :][:step]
                served.shard.put_back(part, *self._kept(self._log.first, len(part), width))
            number -= pieces
        return number

    def _kept(self, number: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the lines of a piece are kept, and which of them had been touched."""
        half = number % HALVES
        lines = self._lines[half, : count * width].reshape(count, width)
        return lines, self._touched[half, :count]


def warm(table: Table, rule: RowRule, dtype: str) -> None:
    """Compile, or load from the cache on disk, the loops that only such a server needs."""
    capacity = "lazy" if table.lazy else "full"
    ownership = Ownership("", replace(table, rows=1, capacity=capacity), 1)
    memory = {f.name: np.zeros(f.shape, f.dtype) for f in row_fields(ownership, 0, rule, dtype)}
    shard, width = TableShard(ownership, 0, memory, rule), rule.width(table.dim)
    place, touched, lines = np.zeros(1, "i8"), np.zeros((2, 1), "i8"), np.zeros((2, width), dtype)
    undo = RowUndo(UndoLog(np.zeros(8, "i8")), (lines, touched), ())
    shard.apply(place, np.zeros((1, table.dim), dtype), rule.rate, undo)
    if shard.index is not None:
        shard.index.mend()
    shard.put_back(place, lines[:1], touched[0])
