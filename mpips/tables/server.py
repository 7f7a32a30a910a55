"""Server with rows of tables beside its shard.

A push has gradients of both, and is one update: the server's versions begin and commit around all
of it, and its number goes into the ledger once. A server whose shard is empty has rows all the
same, and takes every push.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint import Checkpoint, TableRows
from mpips.mpi.pages import LargePages
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.planning.tables import JobTable
from mpips.ps.parts import BLOCK_BYTES
from mpips.ps.shard import Server
from mpips.tables.copy_on_write import CopyOnWriteRows
from mpips.tables.saver import TableSaver
from mpips.tables.shard import TableShard, row_fields
from mpips.transport.push import Push
from mpips.transport.remote_rows import Lets, RowReplies, ServedRows
from mpips.transport.wire import Packing

if TYPE_CHECKING:
    from mpips.failover.undo_log import RowUndo

SEEN = "seen"  # what is saved beside the slots of a row, where rows are evicted: when it was pushed
BLOCK_ROWS = 1 << 13  # most rows of a block: between two of an update MPI is entered


def table_fields(
    table: JobTable, servers: int, server: int, dtype: str, most: int | None = None
) -> tuple[Field, ...]:
    """Return the fields of a server's segment for its rows of a table; see `row_fields`."""
    fields = row_fields(table.owned_by(servers), server, table.rule, dtype, most)
    return tuple(replace(field, sparse=True) for field in fields)


class ServedTable:
    """A server's rows of a table: changed by pushes, saved and filled as a whole. Collective: no.

    Args:
        table: The table.
        servers: Number of servers.
        server: Which of them.
        memory: Its fields, by their names.

    Attributes:
        table: The table.
        shard: Its rows.
    """

    def __init__(
        self, table: JobTable, servers: int, server: int, memory: Mapping[str, np.ndarray]
    ) -> None:
        self.table, self._server = table, server
        self._ownership = table.owned_by(servers)
        self.shard = TableShard(self._ownership, server, memory, table.rule)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take: of a lazy table those touched, with keys, ages and index."""
        return sum(array.nbytes for array in self.shard.used())

    def snapshot(self, since: bool = False) -> "SnapshotTable":
        """Return the rows that have been changed, as they are now; see `TableShard.snapshot`.

        Args:
            since: Leave out those that have not been changed since the last snapshot.
        """
        return SnapshotTable(self, self.shard.snapshot(since))

    def changed_rows(self) -> TableRows:
        """Return copies of all rows that have been changed."""
        pieces = zip(*self.shard.snapshot().pieces(), strict=True)
        return self.named(*(np.concatenate(each) for each in pieces))

    def named(
        self, slot: np.ndarray, lines: np.ndarray, seen: np.ndarray | None = None
    ) -> TableRows:
        """Return lines, which they are and when they were pushed, as rows by their numbers."""
        numbers = self._ownership.rows_of(self._server, self.shard.places(slot))
        params, slots = self._parts(lines)
        if seen is not None:
            slots[SEEN] = seen
        return TableRows(numbers, params, slots)

    def _parts(self, lines: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the values and the slots of lines, views."""
        dim, slots = self.table.dim, dict[str, np.ndarray]()
        at = dim
        for name, width in self.table.rule.slots(dim):
            slots[name] = lines[:, at : at + width]
            at += width
        return lines[:, :dim], slots

    def blocks(self, sums: np.ndarray, block_bytes: int | None) -> Iterator[slice]:
        """Yield the blocks in which an update of rows is made.

        Args:
            sums: Gradients of the rows, shape (n_rows, dim).
            block_bytes: Most bytes of a block of `sums`; None for all rows at once.
        """
        step = max(1, len(sums))
        if block_bytes is not None:
            step = max(1, min(BLOCK_ROWS, block_bytes // (self.table.dim * sums.itemsize)))
        for begin in range(0, len(sums), step):
            yield slice(begin, begin + step)

    def owned(self, rows: np.ndarray) -> int:
        """Return how many of some rows are this server's."""
        return int(np.count_nonzero(self._ownership.locate(rows)[0] == self._server))

    def fill(self, saved: TableRows) -> None:
        """Take those of some rows that are this server's, before anybody reads them."""
        owners, places = self._ownership.locate(saved.rows)
        mine = np.flatnonzero(owners == self._server)
        lines = np.empty((len(mine), self.table.rule.width(self.table.dim)), saved.params.dtype)
        params, slots = self._parts(lines)
        params[:] = saved.params[mine]
        for name, slot in slots.items():
            slot[:] = saved.slots[name][mine]
        seen = saved.slots.get(SEEN)
        self.shard.put(places[mine], lines, None if seen is None else seen[mine])


class SnapshotTable:
    """A server's rows of a table at a snapshot; see `mpips.checkpoint.RowSource`. Collective: no.

    Args:
        served: The rows.
        snapshot: Which of them, as they are.

    Attributes:
        count: How many they are.
    """

    def __init__(self, served: ServedTable, snapshot: CopyOnWriteRows) -> None:
        self._served, self._snapshot, self.count = served, snapshot, snapshot.count

    def pieces(self) -> Iterator[TableRows]:
        """Yield them; once."""
        for piece in self._snapshot.pieces():
            yield self._served.named(*piece)

    def close(self) -> None:
        """Let go of them; may be called twice."""
        self._snapshot.close()


def fill_tables(tables: Sequence[ServedTable], saved: Checkpoint | None) -> None:
    """Fill the rows that a checkpoint has, whoever has saved them, in pieces.

    Args:
        tables: Those of one owner, before anybody reads them.
        saved: The checkpoint, or None where the run begins.

    Raises:
        UserError: If it cannot be read.
    """
    if saved is None:
        return
    for served in tables:
        if served.shard.ages:
            served.shard.ages.epoch = int(saved.state["allocator"]["cursor"][0])
        for piece in saved.read_table(served.table.name):
            served.fill(piece)


def evict_old(tables: Sequence[ServedTable], over: int) -> bool:
    """Have old rows of an owner's tables be untouched again, where so many epochs are over.

    Returns:
        Whether that was done; not while a snapshot is taken.
    """
    ages = [each.shard.ages for each in tables if each.shard.ages]
    if any(each.in_snapshot for each in ages):
        return False
    for each in ages:
        each.evict(over)
    return True


class OwnerTables:
    """Rows of all tables that one owner has. Collective: no.

    Args:
        window: Where the rows lie.
        tables: Of the job.
        ranks: Of all owners, as they began.
        owner: Number of the owner.
        dtype: Of rows.

    Attributes:
        tables: Its rows of each.
        served: Its rows as workers of other nodes read them.
    """

    def __init__(
        self,
        window: Window,
        tables: Sequence[JobTable],
        ranks: Sequence[int],
        owner: int,
        dtype: np.dtype,
    ) -> None:
        self.tables = []
        for table in tables:
            fields = table_fields(table, len(ranks), owner, dtype.name)
            memory = {field.name: window.view(ranks[owner], field.name) for field in fields}
            self.tables.append(ServedTable(table, len(ranks), owner, memory))
        self.served = [ServedRows(each.shard.pull, each.table.dim) for each in self.tables]
        self._pages = LargePages(
            lambda: [array for each in self.tables for array in each.shard.used()]
        )

    def saver(self, job: Job, *saved: Any) -> TableSaver:
        """Return what saves a shard with rows; by option those changed since the last checkpoint.

        From now on rows that change are marked, if that option is given.

        Args:
            job: The run.
            saved: What else `Saver` is given.
        """
        tables = self.tables

        def take(since: bool) -> dict[str, SnapshotTable]:
            return {each.table.name: each.snapshot(since) for each in tables}

        if job.config.checkpoint_rows != "changed":
            return TableSaver(take, job, *saved)
        for each in tables:
            each.shard.begin_marking()

        def counts() -> list[tuple[int, int]] | None:
            if any(each.shard.ages and each.shard.ages.shrunk for each in tables):
                return None
            return [(each.shard.marked, each.shard.touched) for each in tables]

        return TableSaver(take, job, *saved, counts=counts)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows of all tables take."""
        return sum(served.nbytes for served in self.tables)

    @property
    def changed(self) -> dict[str, int]:
        """How many rows of each table have been changed."""
        return {each.table.name: each.shard.touched for each in self.tables}

    @property
    def evicted(self) -> dict[str, int]:
        """How many rows were evicted, of each table of which any are."""
        ages = {each.table.name: each.shard.ages for each in self.tables}
        return {name: found.evicted for name, found in ages.items() if found}


class OwnedRows(OwnerTables):
    """Rows of all tables that a server owns beside its shard; see `Server.own`. Collective: no.

    Args:
        server: The server, which has its grants if reads are consistent.
        place: The job's ranks, the store's window, and the number of the server.
        tables: Of the job.
        replies: How rows for workers of other nodes are packed.

    Attributes:
        undo: Keeps the old lines of an update, if another server can take the rows over.
    """

    def __init__(
        self,
        server: Server,
        place: tuple[Cluster, Window, int],
        tables: Sequence[JobTable],
        replies: Packing,
    ) -> None:
        cluster, window, number = place
        dtype = server.params.dtype
        super().__init__(window, tables, cluster.roles.servers, number, dtype)
        self._server = server
        self.undo: RowUndo | None = None
        self._remote: RowReplies | None = None
        if cluster.nodes > 1:
            noted = lambda rank: self._note_read(cluster.roles.workers.index(rank))  # noqa: E731
            args = cluster, self.served, dtype, replies, number, noted if server.grants else None
            self._remote = RowReplies(*args, server.clocks.lets)
        if server.grants is not None:
            server.grants.noted = self._note_read
        self._over: tuple[int, Sequence[int]] | None = None  # what `epochs_over` has to do

    def answer_when(self, lets: Lets) -> None:
        """Have remote workers wait until `lets` lets them read; see `RowReplies`."""
        if self._remote is not None:
            self._remote.lets = lets

    def _note_read(self, worker: int) -> None:
        """Note that a worker reads rows at this version."""
        if self._server.recorder is not None:
            self._server.recorder.note_read(worker)

    @property
    def whole(self) -> bool:
        """Whether nobody was stopped in the midst of an eviction."""
        return all(each.shard.ages is None or each.shard.ages.whole for each in self.tables)

    def epochs_over(self, epochs: int, pushes: Sequence[int]) -> None:
        """Note that of so many epochs nothing is pushed beyond so many pushes of each worker.

        Rows are evicted, once all of these are applied and no snapshot is taken. Where that is
        recorded it is within the next push, behind all reads of the version before.
        """
        self._over = epochs, pushes
        if self._server.recorder is None:
            self._evict()

    def _evict(self) -> None:
        """Evict rows if any are to be, and may be now."""
        if self._over is None:
            return
        epochs, pushes = self._over
        if (self._server.applied >= pushes).all() and evict_old(self.tables, epochs):
            self._over = None
            if self._server.recorder is not None:
                self._server.recorder.note_eviction(epochs)

    def serve(self) -> bool:
        """Do what is done between two updates; returns whether anybody reads rows. Blocks: no."""
        if self._server.recorder is None:
            self._evict()
        self._pages.look()
        return self.answer()

    def answer(self) -> bool:
        """Answer remote workers that read rows; returns whether there are any. Blocks: no."""
        return self._remote is not None and self._remote.serve()

    def answer_some(self) -> None:
        """Send a little of what remote workers wait for, within an update."""
        if self._remote is not None:
            self._remote.serve(most=1, between=False)

    def apply(self, push: Push, version: int, oldest: int) -> None:
        """See `mpips.ps.parts.DensePart.apply`."""
        if self._server.recorder is not None:
            self._evict()
        for served, (places, sums) in zip(self.tables, push.rows, strict=True):
            if served.shard.ages:
                served.shard.ages.epoch = push.batch[0]
            rate = self._server.stale.rate(served.table.rate(version), oldest) * push.factors
            for block in served.blocks(sums, None if self._remote is None else BLOCK_BYTES):
                if self._remote is not None:
                    self._server.get_on()
                served.shard.apply(places[block], sums[block], rate, self.undo)
