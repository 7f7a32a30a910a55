"""Server with rows of tables beside its shard.

A push has gradients of both, and is one update. The server's versions begin and commit around all
of it, and its number goes into the ledger once. A server with an empty shard still has rows, and
applies every push.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint import Checkpoint, TableRows
from mpips.kernels.vectors import all_finite
from mpips.mpi.pages import LargePages
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.planning.tables import JobTable
from mpips.ps.parts import BLOCK_BYTES
from mpips.ps.shard import Server
from mpips.tables.copy_on_write import CopyOnWriteRows
from mpips.tables.saver import NotFiniteError, TableSaver
from mpips.tables.shard import TableShard, row_fields
from mpips.transport.push import Push
from mpips.transport.remote_rows import Lets, RowReplies, ServedRows
from mpips.transport.wire import Packing

if TYPE_CHECKING:
    from mpips.failover.undo_log import RowUndo

SEEN = "seen"  # saved beside a row's slots if rows are evicted: epoch of its last push
BLOCK_ROWS = 1 << 13  # most rows of a block; the server enters MPI between two blocks


def table_fields(
    table: JobTable, servers: int, server: int, dtype: str, most: int | None = None
) -> tuple[Field, ...]:
    """Return the fields of a server's segment for its rows of a table; see `row_fields`."""
    return row_fields(table.owned_by(servers), server, table.rule, dtype, most)


class ServedTable:
    """A server's rows of a table: applies pushes, saves and fills the rows. Collective: no.

    Args:
        table: The table.
        servers: Number of servers.
        server: Number of this server.
        memory: Fields of the rows, by name.

    Attributes:
        table: The table.
        shard: Rows of the server.
    """

    def __init__(
        self, table: JobTable, servers: int, server: int, memory: Mapping[str, np.ndarray]
    ) -> None:
        self.table, self._server = table, server
        self._ownership = table.owned_by(servers)
        self.shard = TableShard(self._ownership, server, memory, table.rule)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows; of a lazy table those of touched rows, with keys, ages and index."""
        return sum(array.nbytes for array in self.shard.used())

    def snapshot(self, since: bool = False) -> "SnapshotTable":
        """Return the changed rows at this moment; see `TableShard.snapshot`.

        Args:
            since: Only rows that have changed since the last snapshot.
        """
        return SnapshotTable(self, self.shard.snapshot(since))

    def changed_rows(self) -> TableRows:
        """Return copies of all changed rows."""
        pieces = zip(*self.shard.snapshot().pieces(), strict=True)
        return self.named(*(np.concatenate(each) for each in pieces))

    def named(
        self, slot: np.ndarray, lines: np.ndarray, seen: np.ndarray | None = None
    ) -> TableRows:
        """Return lines as rows by their numbers.

        Args:
            slot: Numbers of the lines.
            lines: The lines, shape (n, width).
            seen: Epoch of each line's last push, if rows are evicted.
        """
        numbers = self._ownership.rows_of(self._server, self.shard.places(slot))
        params, slots = self._parts(lines)
        if seen is not None:
            slots[SEEN] = seen
        return TableRows(numbers, params, slots)

    def _parts(self, lines: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the parameters and the slots of lines, as views."""
        dim, slots = self.table.dim, dict[str, np.ndarray]()
        at = dim
        for name, width in self.table.rule.slots(dim):
            slots[name] = lines[:, at : at + width]
            at += width
        return lines[:, :dim], slots

    def blocks(self, sums: np.ndarray, block_bytes: int | None) -> Iterator[slice]:
        """Yield the blocks of an update of rows.

        Args:
            sums: Gradients of the rows, shape (n_rows, dim).
            block_bytes: Most bytes of a block of `sums`; None for all rows at once.
        """
        step = max(1, len(sums))
        if block_bytes is not None:
            step = max(1, min(BLOCK_ROWS, block_bytes // (self.table.dim * sums.itemsize)))
        for begin in range(0, len(sums), step):
            yield slice(begin, begin + step)

    def owned(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask of the rows that the server owns, shape (n_rows,), dtype bool."""
        return self._ownership.locate(rows)[0] == self._server

    def fill(self, saved: Checkpoint) -> None:
        """Write the server's own rows of a checkpoint, before any rank reads them."""
        for piece in saved.read_table(self.table.name, self.owned):
            width = self.table.rule.width(self.table.dim)
            lines = np.empty((len(piece.rows), width), piece.params.dtype)
            params, slots = self._parts(lines)
            params[:] = piece.params
            for name, slot in slots.items():
                slot[:] = piece.slots[name]
            places = self._ownership.locate(piece.rows)[1]
            self.shard.put(places, lines, piece.slots.get(SEEN))


class SnapshotTable:
    """A server's rows of a table at a snapshot; see `mpips.checkpoint.RowSource`. Collective: no.

    Args:
        served: Rows of the table.
        snapshot: Snapshot of their lines.

    Attributes:
        count: Number of rows.
    """

    def __init__(self, served: ServedTable, snapshot: CopyOnWriteRows) -> None:
        self._served, self._snapshot, self.count = served, snapshot, snapshot.count

    def pieces(self) -> Iterator[TableRows]:
        """Yield the rows in pieces; iterate once.

        Raises:
            NotFiniteError: If a row is not finite.
        """
        for piece in self._snapshot.pieces():
            rows = self._served.named(*piece)
            if not all_finite(rows.params.reshape(-1)):
                raise NotFiniteError
            yield rows

    def close(self) -> None:
        """Drop the rows that are not copied yet; may be called twice."""
        self._snapshot.close()


def fill_tables(tables: Sequence[ServedTable], saved: Checkpoint | None) -> None:
    """Fill the rows of a checkpoint, in pieces, whatever the owners that saved them.

    Args:
        tables: Tables of one owner, before any rank reads them.
        saved: The checkpoint; None at the start of a run.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    if saved is None:
        return
    for served in tables:
        if served.shard.ages:
            served.shard.ages.epoch = int(saved.state["allocator"]["cursor"][0])
        served.fill(saved)


def evict_old(tables: Sequence[ServedTable], over: int) -> bool:
    """Evict the old rows of an owner's tables.

    Args:
        tables: Tables of the owner.
        over: Number of epochs whose pushes are all applied.

    Returns:
        Whether rows could be evicted; false while a snapshot is under way.
    """
    snapshots = [each.shard.last_snapshot for each in tables if each.shard.ages]
    if any(taken is not None and not taken.over for taken in snapshots):
        return False
    for each in tables:
        if each.shard.ages:
            each.shard.ages.evict(over)
    return True


class OwnerTables:
    """Rows of all tables of one owner. Collective: no.

    Args:
        window: Window with the rows.
        tables: Tables of the job.
        ranks: Ranks of all owners at the start.
        owner: Number of the owner.
        dtype: dtype of the rows.

    Attributes:
        tables: Rows of each table.
        served: Rows of each table for reads from other nodes.
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
        """Return the saver of a shard with rows; see `TableSaver`.

        Args:
            job: The run.
            saved: Other arguments of `ShardSaver`.
        """
        return TableSaver(self.tables, job, *saved)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all tables."""
        return sum(served.nbytes for served in self.tables)

    @property
    def changed(self) -> dict[str, int]:
        """Number of changed rows of each table."""
        return {each.table.name: each.shard.touched for each in self.tables}

    @property
    def evicted(self) -> dict[str, int]:
        """Number of evicted rows of each table with eviction."""
        ages = {each.table.name: each.shard.ages for each in self.tables}
        return {name: found.evicted for name, found in ages.items() if found}


class OwnedRows(OwnerTables):
    """Rows of all tables that a server owns beside its shard; see `Server.own`. Collective: no.

    Args:
        server: The server; it has its grants if reads are consistent.
        place: The job's ranks, the store's window, and the number of the server.
        tables: Tables of the job.
        replies: Packing of rows for workers of other nodes.

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
        self._over: tuple[int, Sequence[int]] | None = None  # arguments of `epochs_over`

    def answer_when(self, lets: Lets) -> None:
        """Answer reads of remote workers only if `lets` allows; see `RowReplies`."""
        if self._remote is not None:
            self._remote.lets = lets

    def _note_read(self, worker: int) -> None:
        """Record that a worker reads rows of this version."""
        if self._server.recorder is not None:
            self._server.recorder.note_read(worker)

    @property
    def whole(self) -> bool:
        """Whether no eviction was interrupted."""
        indices = [each.shard.index for each in self.tables]
        return all(index is None or index.whole for index in indices)

    def epochs_over(self, epochs: int, pushes: Sequence[int]) -> None:
        """Note that these epochs end with these numbers of pushes of each worker.

        Rows are evicted once all these pushes are applied and no snapshot is under way. With a
        recorder this happens at the next push, after all reads of the version before.
        """
        self._over = epochs, pushes
        if self._server.recorder is None:
            self._evict()

    def _evict(self) -> None:
        """Evict rows if an eviction is due and possible."""
        if self._over is None:
            return
        epochs, pushes = self._over
        if (self._server.applied >= pushes).all() and evict_old(self.tables, epochs):
            self._over = None
            if self._server.recorder is not None:
                self._server.recorder.note_eviction(epochs)

    def serve(self) -> bool:
        """Work between two updates; returns whether remote workers wait for rows. Blocks: no."""
        if self._server.recorder is None:
            self._evict()
        self._pages.look()
        return self.answer()

    def answer(self) -> bool:
        """Answer remote workers' reads of rows; returns whether there are any. Blocks: no."""
        return self._remote is not None and self._remote.serve()

    def answer_some(self) -> None:
        """Send one message that remote workers wait for, during an update."""
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
                    self._server.enter_mpi()
                served.shard.apply(places[block], sums[block], rate, self.undo)
