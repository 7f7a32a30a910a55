"""A server with tables that another can go on for: see `mpips.ps.journal`, which is of its shard.

The rows of a push are changed piece by piece, behind the pieces of the shard, and pieces are
numbered on behind those, table by table. Before a piece its lines are copied into one half of the
undo memory, with what says whether they have been touched, and then its number is published. So of
an update of which piece k is noted the shard is whole, and so are the pieces before k; the lines of
k are set back to what they were; and the push is applied from k on. An update takes 1.4 times as
long, as it is the copying that fetches the lines.

Lines of a lazy table are given to all rows of a push before the first of them is changed, and given
again they are the same: a row has one as soon as the index says so. A line that was given and not
put into the index yet is put there. A larger index that was not in use yet is made anew.

Which rows have changed since the last checkpoint, who adopts them does not know: the next one has
all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpips.cluster.window import Field, Window
from mpips.cluster.world import Cluster
from mpips.kernels import row_undo
from mpips.kernels.atomics import observe, publish
from mpips.layout.tables import Ownership, Table
from mpips.optim.row_rules import RowRule
from mpips.planning.tables import JobTable
from mpips.ps.journal import HALVES, NUMBER_BITS, PIECE, Adopted, Journaled
from mpips.ps.table_server import ServedTable, TableServer
from mpips.ps.table_shard import TableShard, row_fields
from mpips.transport.push import Push
from mpips.transport.wire import Packing

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
    """The undo memory of a server's rows; see `mpips.ps.table_shard.Undo`. Collective: no.

    Args:
        memory: Of the window: ``row_undo``, ``touched`` and ``journal``.
    """

    def __init__(self, memory: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        self._lines, self._touched, self._journal = memory
        self._next = self._first = 0

    def begin(self, number: int, first: int) -> None:
        """Begin an update.

        Args:
            number: Of its first piece, as it is published.
            first: Of the first one that is not applied yet.
        """
        self._next, self._first = number, first

    def pieces(self, slot: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> Iterator[slice]:
        """See `mpips.ps.table_shard.Undo`; those before the first are left out."""
        step = _rows_of_piece(lines.shape[1] * lines.itemsize)
        for at in range(0, len(slot), step):
            number, self._next = self._next, self._next + 1
            if number >= self._first:
                part = slice(at, at + step)
                kept = self.kept(number, len(slot[part]), lines.shape[1])
                row_undo.keep(slot[part], lines, stripes, *kept)
                publish(self._journal, PIECE, number)
                yield part

    def kept(self, number: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the lines of a piece are kept, and which of them had been touched."""
        half = number % HALVES
        lines = self._lines[half, : count * width].reshape(count, width)
        return lines, self._touched[half, :count]


class JournaledTables(TableServer, Journaled):
    """A server with tables that another can go on for; see `TableServer`. Collective: no."""

    def __init__(
        self,
        tables: Sequence[JobTable],
        replies: Packing,
        consistent: bool,
        cluster: Cluster,
        window: Window,
        server_id: int,
        *args: Any,
    ) -> None:
        super().__init__(tables, replies, consistent, cluster, window, server_id, *args)
        rank = cluster.roles.servers[server_id]
        undo, touched = window.view(rank, "row_undo"), window.view(rank, "touched")
        self._row_undo = RowUndo((undo, touched, self._journal))

    def _update(self, push: Push, version: int, oldest: int) -> None:
        number = version << NUMBER_BITS | self.pieces
        self._row_undo.begin(number, number + self._whole_pieces())
        super()._update(push, version, oldest)

    def _whole_pieces(self) -> int:
        """Return how many pieces of the next update's rows are applied already."""
        return 0

    def _change(
        self, served: ServedTable, places: np.ndarray, sums: np.ndarray, rate: float
    ) -> None:
        served.shard.apply(places, sums, rate, self._row_undo)


class AdoptedTables(JournaledTables, Adopted):
    """The shard and the rows of a server that has died; see `Adopted`. Collective: no."""

    _done = 0  # pieces of the rows of the update that was under way

    def recover(self, find: Callable[[int, int], Push | None]) -> bool:
        """See `Adopted.recover`; it cannot be where rows were just being evicted."""
        ages = [each.shard.ages for each in self.tables]
        return all(each is None or each.whole for each in ages) and super().recover(find)

    def _whole_pieces(self) -> int:
        done, self._done = self._done, 0
        return done

    def _go_back(self, begun: int, push: Push | None) -> None:
        """See `Adopted._go_back`; also where rows were being changed."""
        for served in self.tables:
            served.shard.mend()
        version, number = divmod(observe(self._journal, PIECE), 1 << NUMBER_BITS)
        if version != begun or number < self.pieces:
            super()._go_back(begun, push)
            return
        assert push is not None, "tables are of one node"
        self._rest, self._done = [], number - self.pieces
        self._put_back(push, number)

    def _put_back(self, push: Push, number: int) -> None:
        """Undo what was done to a piece of the rows."""
        first = self.pieces
        for served, (places, sums) in zip(self.tables, push.rows, strict=True):
            width = served.table.rule.width(served.table.dim)
            step = _rows_of_piece(width * sums.itemsize)
            pieces = -(-len(places) // step)
            if first <= number < first + pieces:
                part = places[(number - first) * step :][:step]
                served.shard.put_back(part, *self._row_undo.kept(number, len(part), width))
            first += pieces


def warm(table: Table, rule: RowRule, dtype: str) -> None:
    """Compile, or load from the cache on disk, the loops that only such a server needs."""
    capacity = "lazy" if table.lazy else "full"
    ownership = Ownership("", replace(table, rows=1, capacity=capacity), 1)
    memory = {f.name: np.zeros(f.shape, f.dtype) for f in row_fields(ownership, 0, rule, dtype)}
    shard, width = TableShard(ownership, 0, memory, rule), rule.width(table.dim)
    touched, journal, place = (np.zeros(shape, np.int64) for shape in ((HALVES, 1), 8, 1))
    undo = RowUndo((np.zeros((HALVES, width), dtype), touched, journal))
    shard.apply(place, np.zeros((1, table.dim), dtype), rule.rate, undo)
    shard.mend()
    shard.put_back(place, *undo.kept(0, 1, width))
