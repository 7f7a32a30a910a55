"""Rows of one table on one server, in memory that others read.

The caller provides the memory, with the fields of `row_fields`, so that it can be part of a window.
Workers of the node read it with `NodeRows`, which writes nothing. The server applies gradients with
`TableShard`. Pages of untouched rows are never written, so the kernel allocates memory only for
touched rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from mpips.errors import UserError
from mpips.kernels import row_eviction, row_groups, row_reads, rows
from mpips.layout.tables import MOST_EPOCHS, Ownership, Table, combine
from mpips.mpi.window import Field
from mpips.optim.row_rules import RowRule
from mpips.tables.copy_on_write import CopyOnWriteRows
from mpips.tables.slot_index import RowAges, RowIndex, bits_for

Memory = Mapping[str, np.ndarray]  # fields of a server, by the names of `row_fields`
PARTS = ("lines", "stripes", "header", "index", "keys")  # in the order of `rows.LINES` to `KEYS`
PIECE_ROWS = 1 << 16
_NONE = np.zeros(0, np.uint32)


def row_fields(
    ownership: Ownership, server: int, rule: RowRule, dtype: str, most: int | None = None
) -> tuple[Field, ...]:
    """Return the fields of a server's segment for its rows of a table; they begin as zeros.

    ``lines`` has one line for each row: its parameters, then the rule's slots. ``stripes`` marks
    the touched lines, and the lines that are being written. A table of capacity ``lazy`` assigns
    lines to rows as they are touched: ``keys`` has the row of each line, ``index`` the line of each
    row, and ``header`` their sizes. If rows are evicted, ``seen`` has the epoch of each row's last
    push. All fields are sized for `most` lines, and use memory only once touched: nothing moves
    while the table grows.

    Args:
        ownership: Ownership of the table.
        server: Number of the server.
        rule: The update rule.
        dtype: dtype of the rows, float32 or float64.
        most: Lines of a lazy table; None for all of the server's rows.
    """
    table, count = ownership.table, ownership.count(server)
    evicts = table.evict_after is not None
    if table.lazy:
        count = min(count, rows.MOST_PLACES if most is None else most)
    fields = {
        "lines": (dtype, (count, rule.width(table.dim))),
        "stripes": ("i8", (-(-count // rows.STRIPE),)),
    }
    if table.lazy:
        size = bits_for(count) + evicts
        fields |= {"header": ("i8", (rows.HEADER_WORDS,))}
        fields |= {"index": ("u4", (2 << size,)), "keys": ("u4", (count,))}
    if evicts:
        fields["seen"] = ("u4", (count,))
    return tuple(Field(_name(ownership, part), *what, sparse=True) for part, what in fields.items())


def _name(ownership: Ownership, part: str) -> str:
    return f"tables/{ownership.name}/{part}"


class Reads(NamedTuple):
    """Conflicts of a read with updates.

    Attributes:
        again: Number of repeated reads, of rows that were written meanwhile.
        torn: Number of rows that stayed torn after many repeats.
    """

    again: int
    torn: int


class NodeRows:
    """Rows of a table at some of its servers, for reads in one pass. Collective: no.

    Args:
        ownership: Ownership of the table.
        memories: Fields of each of these servers, by its number; other fields are ignored.
    """

    def __init__(self, ownership: Ownership, memories: Mapping[int, Memory]) -> None:
        self.ownership = ownership
        names = [_name(ownership, part) for part in PARTS]
        self._memories = {
            server: [memory[name] for name in names if name in memory]
            for server, memory in memories.items()
        }
        self._where = np.zeros((ownership.servers, len(PARTS)), np.int64)
        for server, found in self._memories.items():
            self._where[server, : len(found)] = [array.ctypes.data for array in found]
        self._key = ownership.key()
        evicts = ownership.table.evict_after is not None
        self._gather = row_eviction.gather if evicts else row_reads.gather

    def gather(self, places: np.ndarray, out: np.ndarray) -> Reads:
        """Read these servers' rows of a step.

        Args:
            places: Places of the ids, from `Ownership.places`; rows of all servers.
            out: Gets the row of each id, shape (n_ids, dim), C-contiguous, dtype of the rows. Rows
                of other servers are left unchanged.

        Returns:
            Conflicts with updates.

        Raises:
            ValueError: If `out` has another shape.

        Blocks: no; a row that is written meanwhile is read again.
        """
        if out.shape != (len(places), self.ownership.table.dim):
            raise ValueError(f"rows of shape {out.shape} for {len(places)} places")
        if not self._memories:
            return Reads(0, 0)
        begins, width = self.ownership.begins, next(iter(self._memories.values()))[0].shape[1]
        found = self._gather(places, begins, self._where, self._key, width, _NONE, out)
        torn, again = divmod(found, row_reads.TORN)
        return Reads(again, torn)


class Undo(Protocol):
    """Undo log of lines, for a server that takes over after the death of this process."""

    def pieces(self, slot: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> Iterator[slice]:
        """Keep the lines of an update piece by piece; yields the rows that may change now.

        Args:
            slot: Line of each row.
            lines: Lines of the table.
            stripes: Stripe words of the table.
        """


class TableShard(NodeRows):
    """A server's rows of a table, for reads and updates; only the server may have it.

    Args:
        ownership: Ownership of the table.
        server: Number of the server.
        memory: Fields of the rows, zero in a fresh run.
        rule: The update rule.

    Attributes:
        index: Index of a lazy table.
        last_snapshot: The last snapshot; None if there was none.
        ages: Epochs of the last pushes, and eviction, if the table evicts rows.
    """

    def __init__(self, ownership: Ownership, server: int, memory: Memory, rule: RowRule) -> None:
        super().__init__(ownership, {server: memory})
        self.server, self.rule, self._memory = server, rule, self._memories[server]
        self._key = ownership.key(server)
        self._lines, self._stripes = self._memory[:2]
        self.index = RowIndex(*self._memory[2:]) if self._memory[2:] else None
        self._marks: np.ndarray | None = None
        self.last_snapshot: CopyOnWriteRows | None = None
        self.ages: RowAges | None = None
        if self.index and ownership.table.evict_after is not None:
            found = memory[_name(ownership, "seen")], ownership.table.evict_after
            self.ages = RowAges(*found, self.index, self._lines, self._stripes)

    def pull(self, local: np.ndarray, out: np.ndarray) -> Reads:
        """Read rows by their places in this server.

        Args:
            local: Places, shape (n,), int64, each in ``[0, ownership.count(server))``.
            out: Gets the rows, shape (n, dim), C-contiguous, dtype of the rows.

        Returns:
            Conflicts with updates.

        Raises:
            ValueError: If a place is outside the server, or `out` has another shape.
        """
        self._check(local)
        return self.gather(local + self.ownership.begins[self.server], out)

    def _check(self, local: np.ndarray) -> None:
        if len(local) and not 0 <= local.min() <= local.max() < self.ownership.count(self.server):
            raise ValueError(f"places {local.min()} to {local.max()} of server {self.server}")

    @property
    def touched(self) -> int:
        """Number of touched rows."""
        if self.index:
            return self.index.count
        return sum(map(len, self._touched()))

    def apply(
        self, local: np.ndarray, grads: np.ndarray, rate: float, undo: Undo | None = None
    ) -> None:
        """Make one update of rows.

        Args:
            local: Places of the rows in this server, shape (n,), int64; increasing.
            grads: Sum of each row's gradients, shape (n, dim), dtype of the rows, C-contiguous.
            rate: Learning rate of this update.
            undo: Undo log of the lines, if the server has one.

        Raises:
            ValueError: If a place is outside the server, or they do not increase.
            UserError: If a lazy table has no line left; then nothing is changed.
        """
        if row_groups.first_wrong(local, self.ownership.count(self.server)) >= 0:
            self._check(local)
            raise ValueError("places that do not increase")
        numbers = np.array(self.rule.numbers(rate))
        slot, memory = self._slots(local), (self._lines, self._stripes)
        if undo is None:
            self.rule.loop(slot, local, grads, *memory, self._key, numbers)
            return
        for part in undo.pieces(slot, *memory):
            self.rule.loop(slot[part], local[part], grads[part], *memory, self._key, numbers)

    def put_back(self, local: np.ndarray, kept: np.ndarray, touched: np.ndarray) -> None:
        """Restore the lines of rows that `rows.keep` kept; other arguments as for `apply`."""
        rows.put_back(self._slots(local), kept, touched, self._lines, self._stripes)

    def begin_marking(self) -> None:
        """Mark each row that changes from now on, in one byte; see `snapshot`."""
        self._marks = np.zeros(len(self._lines), bool)

    @property
    def marked(self) -> int:
        """Number of marked rows."""
        assert self._marks is not None, "it marks none"
        return int(np.count_nonzero(self._marks[: self._used]))

    def put(self, local: np.ndarray, lines: np.ndarray, seen: np.ndarray | None = None) -> None:
        """Write whole lines, parameters and slots, such as those of a checkpoint.

        Args:
            local: Places of the rows in this server, shape (n,), int64.
            lines: The lines, shape (n, width), dtype of the rows, C-contiguous.
            seen: Epoch of each row's last push; None for the epoch of the next updates.

        Raises:
            ValueError: If a place is outside the server.
            UserError: If a lazy table has no line left; then nothing is changed.
        """
        self._check(local)
        slot = self._slots(local)
        rows.put(slot, lines, self._lines, self._stripes)
        if self.ages and seen is not None:
            self.ages.note(slot, seen)

    def snapshot(self, marked: bool = False) -> CopyOnWriteRows:
        """Return a snapshot of the touched rows; later updates do not change it.

        Finish or close a snapshot before the next. A snapshot resets the marks. Rows of a lazy
        table come in the order of their first use, except rows that change meanwhile.

        Args:
            marked: Only marked rows, which have changed since the last snapshot.
        """
        used = self._used
        if marked and self._marks is not None:
            wanted = self._marks[:used]
        else:
            wanted = np.zeros(used, bool)
            for slot in self._touched():
                wanted[slot] = True
        if self._marks is not None:
            self.begin_marking()
        seen = [self.ages.seen] if self.ages else []
        self.last_snapshot = CopyOnWriteRows(self._lines, wanted, *seen)
        if self.ages:
            self.ages.shrunk = False
        return self.last_snapshot

    def used(self) -> list[np.ndarray]:
        """Return the memory of the rows; of a lazy table that of touched rows, and its index."""
        if self.index is None:
            return list(self._memory)
        count = self.index.count
        found = [self._lines[:count], self._stripes[: -(-count // rows.STRIPE)]]
        found += [self._memory[rows.KEYS][:count], self.index.in_use]
        return found + ([self.ages.seen[:count]] if self.ages else [])

    def places(self, slot: np.ndarray) -> np.ndarray:
        """Return the places in the server of the rows with these lines."""
        return self.index.local(slot) if self.index else slot

    @property
    def _used(self) -> int:
        """Number of lines that may be touched; reading other pages would allocate them."""
        return self.index.count if self.index else len(self._lines)

    def _touched(self) -> Iterator[np.ndarray]:
        """Yield the numbers of touched lines, part by part."""
        used = self._used
        for at in range(0, used, PIECE_ROWS):  # a part begins with a stripe
            words = self._stripes[at // rows.STRIPE : -(-min(at + PIECE_ROWS, used) // rows.STRIPE)]
            yield at + np.flatnonzero(words[:, None] >> np.arange(rows.STRIPE) & 1)

    def _slots(self, local: np.ndarray) -> np.ndarray:
        """Return the lines of rows that are about to change."""
        slot = local if self.index is None else self.index.take(local)
        if slot is None:
            most, name = len(self._lines), self.ownership.name
            got = f"more than {most:,} rows of table {name!r} touched at server {self.server}"
            expected = "at most those, which its memory holds"
            raise UserError(got, expected, "resume it with more servers, on more nodes")
        if self._marks is not None:
            self._marks[slot] = True
        if self.last_snapshot is not None:
            self.last_snapshot.keep(slot)
        if self.ages:
            self.ages.note(slot)
        return slot


def shard_in_memory(ownership: Ownership, rule: RowRule, dtype: str, most: int) -> TableShard:
    """Return all rows of a table with one owner, in memory of this process."""
    fields = row_fields(ownership, 0, rule, dtype, most)
    memory = {field.name: np.zeros(field.shape, field.dtype) for field in fields}
    return TableShard(ownership, 0, memory, rule)


def one_row(table: Table, rule: RowRule, dtype: str) -> TableShard:
    """Return a shard of a table with a single row, with which loops are compiled."""
    capacity = "lazy" if table.lazy else "full"
    ownership = Ownership("", replace(table, rows=1, capacity=capacity), 1)
    return shard_in_memory(ownership, rule, dtype, most=1)


def warm(table: Table, rule: RowRule, dtype: str) -> None:
    """Compile all loops that a table needs, or load them from the cache on disk."""
    shard, ids = one_row(table, rule, dtype), np.zeros(2, np.int64)
    grouped = shard.ownership.group(ids)
    shard.apply(grouped.local, combine(grouped, np.zeros((2, table.dim), dtype)), rule.rate)
    shard.pull(ids, np.empty((2, table.dim), dtype))
    for slot, lines, *_ in shard.snapshot().pieces():
        shard.put(shard.places(slot), lines)
    if shard.ages:
        shard.ages.evict(MOST_EPOCHS + 1)
