"""Embedding tables in rounds: owners update their rows once a round.

The number of a row determines its owner (`mpips.layout.tables.Ownership`), as with servers. A
worker writes the places and gradients of a step's rows into its own segment, by owner and in the
order of places. Then, in round k:

    barrier of the node | workers send remote owners their rows; an owner merges the lists of all
    workers, reading local ones in place, and applies the rule of the rows | barrier of the node

An owner sums in the order of the workers, whatever the order of arrival. So the placement of ranks
on nodes changes no bit. Every worker sends every remote owner a message in every round, even if it
is empty. Once an owner has all messages, no rank reads the rows that it changes.

Workers read rows while they compute. Local rows are read from shared memory, which no rank writes
then. Remote rows are read by request (`mpips.transport.remote_rows`). One node may be a round ahead
of another. So a request contains the number of rounds that the rows must contain, and an owner that
is behind answers later. Owners answer whenever they wait, and in a thread while they compute.

Old rows are evicted after the update of the last round of an epoch, when no rank reads.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.ledger import epochs_over
from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.vectors import scale, sum_squares
from mpips.mpi.start import TAG_ROW_SUMS, Request
from mpips.mpi.waiting import Background
from mpips.mpi.window import Field, Plan, Window
from mpips.planning.job import Job
from mpips.planning.tables import JobTable, tables_of
from mpips.rounds.base import BLOCK_BYTES, Transfers
from mpips.tables.capacity import Lines, lines_of
from mpips.tables.server import OwnerTables, evict_old, fill_tables, table_fields
from mpips.tables.step_rows import StepRows
from mpips.transport.remote_rows import RowReplies
from mpips.transport.rows import RowsPacker, RowsUnpacker, Section, Sections, pieces_of, rows_fields
from mpips.transport.wire import Packing, pull_codec, push_codec

if TYPE_CHECKING:  # names in the compiled loop
    from mpips.kernels.intrinsics import array_at

Matrix = np.ndarray

NOTHING_YET = -1  # version of rows that no rank may read yet
PLACES, SUMS, COUNT, DONE, NEXT, WORDS = range(6)  # of a list; the loop uses DONE and NEXT
NONE = np.int64(1 << 62)  # larger than all places


class RoundTables:
    """Tables of a job at one rank, in rounds. Collective: construction and `free`.

    Args:
        job: The run, with tables.
        transfers: Counts bytes and waiting.

    Attributes:
        rows: Reads and pushes rows on a worker; None on servers.
        owned: Rows that this rank owns, and their sums; None if it owns none.
        owner: The same, as in mode hybrid.
    """

    distance_max = 0  # number of rounds that a read lacked

    def __init__(self, job: Job, transfers: Transfers) -> None:
        cluster, tables = job.cluster, tables_of(job)
        self._cluster = cluster
        owners, dtype = cluster.roles.owners, job.config.dtype
        size = lambda rank, lines: Plan(_fields(job, tables, rank, lines)).nbytes  # noqa: E731
        lines = lines_of(cluster, tables, owners, dtype, size)
        plans = [Plan(_fields(job, tables, rank, lines)) for rank in range(cluster.world)]
        self._window = Window(cluster, plans, job.config.window == "shared", remote_reads=False)
        self._evicts = any(table.table.evict_after is not None for table in tables)
        self._over = epochs_over(job.allocator())
        self.rows: StepRows | None = None
        self.owned: OwnedTables | None = None
        self.owner: OwnerTables | None = None
        self._transfers, self._packers = transfers, list[tuple[int, RowsPacker]]()
        if job.worker_id is not None:
            self.rows = StepRows(cluster, self._window, tables, _read_packing(job).codec)
            self.rows.want(job.base_step)
            packing, rows = _push_packing(job), (self._window, cluster.rank, tables, len(owners))
            for owner, rank in enumerate(owners):
                if not cluster.is_local(rank):
                    packer = RowsPacker(*rows, owner, packing, job.worker_id)
                    self._packers.append((rank, packer))
        if cluster.rank in cluster.roles.owners:
            self.owner = self.owned = OwnedTables(job, tables, self._window, transfers)
            if cluster.nodes > 1:
                cluster.serving = self.owned.serve
        self._background: Background | None = None  # if remote ranks read while this one computes
        if self.rows and self.owned and not all(map(cluster.is_local, cluster.roles.workers)):
            self._background = Background(self.owned.serve)
            self.rows.alone = self._background.paused

    def serving(self) -> AbstractContextManager[None]:
        """Return a context in which remote workers can read this rank's rows while it computes."""
        return nullcontext() if self._background is None else self._background

    def of_epoch(self, epoch: int, over: int) -> bool:
        """Set the epoch of the next round.

        Args:
            epoch: The epoch.
            over: Number of epochs that have ended after the round.

        Returns:
            Whether the round evicts old rows; then no checkpoint may be under way.
        """
        ends = self._evicts and over > self._over
        self._over = over
        if self.owned is not None:
            self.owned.of_epoch(epoch, over if ends else None)
        return ends

    def begin(self, step: int) -> list[Request]:
        """Begin round `step`.

        Send this worker's rows to remote owners, and receive the rows of remote workers.

        Returns:
            Requests to complete before the round ends.
        """
        if self.owned is not None:
            self.owned.receive()
        requests, send = list[Request](), self._cluster.arrays.begin_send
        for rank, packer in self._packers:
            for piece in pieces_of(packer.pack(step), packer.most):
                requests.append(send(piece, rank, TAG_ROW_SUMS))
                self._transfers.bytes_sent += piece.nbytes
        return requests

    def end(self, step: int) -> None:
        """Read rows as of the end of round `step` from now on."""
        if self.rows is not None:
            self.rows.want(step)

    def settle(self, step: int) -> None:
        """Apply all pushes up to `step`, the last round; in rounds they already are."""

    def free(self) -> None:
        """Free the window; may be called twice. Collective: yes."""
        if self._background is not None:
            self._background.end()
        self._cluster.serving = self._background = None
        self.rows = self.owned = self.owner = None
        self._packers = []
        self._window.free()


def _fields(job: Job, tables: Sequence[JobTable], rank: int, lines: Lines) -> tuple[Field, ...]:
    """Return the fields of a rank's segment, for these numbers of lines of lazy tables."""
    roles, dtype, found = job.cluster.roles, job.config.dtype, tuple[Field, ...]()
    count = len(roles.owners)
    if rank in roles.owners:
        owner = roles.owners.index(rank)
        for table in tables:
            found += table_fields(table, count, owner, dtype, lines.get((table.name, owner)))
    if rank in roles.workers:
        found += rows_fields(tables, count, dtype)
    return found


def _push_packing(job: Job) -> Packing:
    """Return the packing of rows that workers push to other nodes."""
    return Packing(push_codec(job.config), job.config.seed)


def _read_packing(job: Job) -> Packing:
    """Return the packing of rows that workers read from other nodes."""
    return Packing(pull_codec(job.config), job.config.seed, job.base_step)


class OwnedTables(OwnerTables):
    """Rows of one owner, and the workers' gradients of them. Collective: no.

    Args:
        job: The run.
        tables: Tables of the job.
        window: Memory of the node's ranks.
        transfers: Counts waiting.
    """

    def __init__(
        self, job: Job, tables: Sequence[JobTable], window: Window, transfers: Transfers
    ) -> None:
        cluster, dtype, owners = job.cluster, job.dtype, job.cluster.roles.owners
        me = owners.index(cluster.rank)
        super().__init__(window, tables, owners, me, dtype)
        self._cluster, self._transfers = cluster, transfers
        self._incoming = [
            _Incoming(job, tables, window, me, rank) for rank in cluster.roles.workers
        ]
        self._sums = [_Sums(table.dim, dtype) for table in tables]
        self._coming: list[Request] = []
        self._replies = RowReplies(cluster, self.served, dtype, _read_packing(job), me)
        self._replies.version, self._lock = NOTHING_YET, Lock()
        self._over: int | None = None

    def fill(self, job: Job) -> None:
        """Fill the rows from the run's checkpoint, and allow reads of them.

        Raises:
            UserError: If the checkpoint cannot be read.
        """
        fill_tables(self.tables, job.checkpoint)
        self._replies.version = job.base_step

    def of_epoch(self, epoch: int, over: int | None) -> None:
        """Set the epoch of the next update, and the ended epochs if it evicts old rows."""
        self._over = over
        for served in self.tables:
            if served.shard.ages:
                served.shard.ages.epoch = epoch

    def serve(self) -> None:
        """Answer remote workers, unless another thread of this rank does so now. Blocks: no."""
        if self._lock.acquire(blocking=False):
            try:
                self._replies.serve()
            finally:
                self._lock.release()

    def receive(self) -> None:
        """Begin to receive the round's rows of remote workers."""
        self._coming = [request for each in self._incoming for request in each.receive()]

    def collect(self, step: int, weights: np.ndarray) -> None:
        """Sum the rows of all workers in round `step`. Blocks: until they are here."""
        self._transfers.wait(self._coming)
        found = [each.sections(step) for each in self._incoming]
        for number, sums in enumerate(self._sums):
            sums.merge([sections[number] for sections in found], weights)

    def sum_squares(self) -> float:
        """Return the squared norm of the sums."""
        return sum(sum_squares(sums.rows.reshape(-1)) for sums in self._sums)

    def scale(self, factor: float) -> None:
        """Scale the sums."""
        for sums in self._sums:
            scale(sums.rows.reshape(-1), factor)

    def apply(self, step: int, factor: float) -> None:
        """Make update `step` at `factor` times the rates, and then evict old rows if it is time."""
        start, remote = perf_counter(), self._cluster.nodes > 1
        for served, sums in zip(self.tables, self._sums, strict=True):
            rate = served.table.rate(step) * factor
            for block in served.blocks(sums.rows, BLOCK_BYTES if remote else None):
                served.shard.apply(sums.local[block], sums.rows[block], rate)
                if remote:
                    self._cluster.progress()
        self._pages.look()
        if self._over is not None and not evict_old(self.tables, self._over):
            raise AssertionError("rows are evicted while a checkpoint is being written")
        self._replies.version = step
        self._transfers.busy_s += perf_counter() - start


class _Incoming:
    """Gradients of one worker for one owner.

    A local worker's are read in its segment, a remote worker's are received.
    """

    def __init__(
        self, job: Job, tables: Sequence[JobTable], window: Window, owner: int, rank: int
    ) -> None:
        cluster, codec = job.cluster, _push_packing(job).codec
        self._begin, self._rank, self._owner = cluster.arrays.begin_receive, rank, owner
        self._local: list[Sections] = []
        self._unpacker: RowsUnpacker | None = None
        if cluster.is_local(rank):
            self._local = [Sections(window, rank, table.name) for table in tables]
        else:
            owners = len(cluster.roles.owners)
            self._unpacker = RowsUnpacker(tables, owners, owner, job.dtype.name, codec)
            self._place = self._unpacker.place()

    def receive(self) -> list[Request]:
        """Begin to receive the rows of a round; returns the requests."""
        if self._unpacker is None:
            return []
        pieces = pieces_of(self._place, self._place.size)
        return [self._begin(piece, self._rank, TAG_ROW_SUMS) for piece in pieces]

    def sections(self, step: int) -> Sequence[Section]:
        """Return the rows of round `step` by table, once they are here; call it once a round."""
        if self._unpacker is None:
            return [sections.of(step, self._owner) for sections in self._local]
        return self._unpacker.unpack(self._rank, self._place)


@kernel()
def merge_rows(lists: Matrix, weights: Vector, local: Vector, out: Matrix) -> int:
    """Sum the rows of workers' lists, each times its worker's weight, in the order of the workers.

    Args:
        lists: One column for each worker, shape (WORDS, workers), dtype int64: address of its
            places, which are int64 and increase; address of its gradients, of out's dtype; and
            their number. The memory at the addresses stays alive during the call. Other words are
            overwritten.
        weights: Weight of each worker, shape (workers,), dtype float64; rounded to out's dtype.
        local: Gets the places, each once, increasing; as long as all lists together.
        out: Gets the sums, shape (len(local), dim).

    Returns:
        Number of rows.
    """
    real, dim, count = out.dtype.type, out.shape[1], 0
    size, following = dim * out.itemsize, lists[NEXT]
    for k in range(following.size):
        lists[DONE, k] = 0
        following[k] = array_at(lists[PLACES, k], local, 1)[0] if lists[COUNT, k] else NONE
    while True:
        least = NONE
        for k in range(following.size):
            least = min(least, following[k])
        if least == NONE:
            return count
        row, first = out[count], True
        for k in range(following.size):
            if following[k] != least:
                continue
            done = lists[DONE, k]
            given = array_at(lists[SUMS, k] + size * done, out, dim)
            weight = real(weights[k])
            if first:
                for j in range(dim):
                    row[j] = weight * given[j]
            else:
                for j in range(dim):
                    row[j] += weight * given[j]
            first = False
            done += 1
            lists[DONE, k], following[k] = done, NONE
            if done < lists[COUNT, k]:
                following[k] = array_at(lists[PLACES, k] + 8 * done, local, 1)[0]
        local[count] = least
        count += 1


class _Sums:
    """Gradients of an owner's rows of one table in a round, summed over workers.

    Attributes:
        local: Places of the rows in the owner, increasing, shape (n,), dtype int64.
        rows: Sum of each row's gradients, shape (n, dim).
    """

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        self.local, self.rows = np.empty(0, np.int64), np.empty((0, dim), dtype)
        self._room = self.local, self.rows

    def merge(self, sections: Sequence[Section], weights: np.ndarray) -> None:
        """Sum the workers' gradients, each times the worker's weight; skips workers of weight 0."""
        lists = np.zeros((WORDS, len(sections)), np.int64)
        for k, (places, sums) in enumerate(sections):
            if weights[k]:
                at = places.ctypes.data, sums.ctypes.data, len(places)
                lists[[PLACES, SUMS, COUNT], k] = at
        most = int(lists[COUNT].sum())
        if len(self._room[0]) < most:
            size, rows = most + most // 2, self._room[1]
            self._room = np.empty(size, np.int64), np.empty((size, rows.shape[1]), rows.dtype)
        local, rows = self._room
        n = merge_rows(lists, weights, local, rows)
        self.local, self.rows = local[:n], rows[:n]


def warm(dtype: str) -> None:
    """Compile the loop that sums rows, or load it from the cache on disk."""
    section = Section(np.zeros(1, np.int64), np.zeros((1, 1), dtype))
    _Sums(1, np.dtype(dtype)).merge([section], np.ones(1))
