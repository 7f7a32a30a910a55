"""Embedding tables in rounds: owners update their rows once a round.

Which owner has a row is a function of its number (`mpips.layout.tables.Ownership`), as with
servers. A worker writes the places and the gradients of a step's rows into its own segment while it
computes, by owner and in the order of places. Then, in round k:

    barrier of the node | workers send remote owners their rows; an owner merges the lists of all
    workers, local ones where they lie, and applies the rule of the rows | barrier of the node

An owner adds up in the order of the workers, whenever their rows come, so that how ranks lie on
nodes changes no bit. Every worker sends every remote owner a message in every round, if an empty
one: an owner that has them all knows that nobody reads what it changes now.

Rows are read while workers compute: those of the node in its memory, which nobody writes then,
remote ones by request (`mpips.transport.remote_rows`). A node may be a round ahead of another one.
So a request says how many rounds the rows are to hold, and an owner that is behind answers later;
owners answer whenever they wait, and in a thread while they compute.

Old rows are evicted with the last round of an epoch, behind its update, when nobody reads.
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
from mpips.tables.step_rows import RowsAtWork
from mpips.transport.remote_rows import RowReplies
from mpips.transport.rows import RowsPacker, RowsUnpacker, Section, Sections, pieces_of, rows_fields
from mpips.transport.wire import Packing, pull_codec, push_codec

if TYPE_CHECKING:  # where a loop is compiled, this is among its names
    from mpips.kernels.intrinsics import array_at

Matrix = np.ndarray

NOTHING_YET = -1  # version of rows that nobody may read
PLACES, SUMS, COUNT, DONE, NEXT, WORDS = range(6)  # of a list; DONE and NEXT are the loop's own
NONE = np.int64(1 << 62)  # behind all places


class RoundTables:
    """The tables of a job as a rank has them in rounds. Collective: construction and `free`.

    Args:
        job: The run, with tables.
        transfers: Where bytes and waiting are counted.

    Attributes:
        rows: On a worker, what reads and pushes rows; None on servers.
        owned: The rows that this rank owns; None where it owns none.
    """

    distance_max = 0  # rounds whose rows a read has lacked

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
        self.rows: RowsAtWork | None = None
        self.owned: OwnedTables | None = None
        self._sender = _Sender(job, tables, self._window, transfers)
        if job.worker_id is not None:
            self.rows = RowsAtWork(cluster, self._window, tables, _read_packing(job).codec)
            self.rows.want(job.base_step)
        if cluster.rank in cluster.roles.owners:
            self.owned = OwnedTables(job, tables, self._window, transfers)
            if cluster.nodes > 1:
                cluster.serving = self.owned.serve
        self._background: Background | None = None  # of a rank that computes while remote ones read
        if self.rows and self.owned and not all(map(cluster.is_local, cluster.roles.workers)):
            self._background = Background(self.owned.serve)
            self.rows.alone = self._background.paused

    def serving(self) -> AbstractContextManager[None]:
        """Return what lets remote workers read this rank's rows while it computes."""
        return nullcontext() if self._background is None else self._background

    def of_epoch(self, epoch: int, over: int) -> bool:
        """Say of which epoch the next round is.

        Args:
            epoch: It.
            over: How many epochs are over with it.

        Returns:
            Whether old rows are evicted with it: no checkpoint may be being written then.
        """
        ends = self._evicts and over > self._over
        self._over = over
        if self.owned is not None:
            self.owned.of_epoch(epoch, over if ends else None)
        return ends

    def begin(self, step: int) -> list[Request]:
        """Begin round `step`.

        Send this worker's rows to remote owners, receive those of remote workers.

        Returns:
            What is to be waited for before the round ends.
        """
        if self.owned is not None:
            self.owned.receive()
        return self._sender.send(step)

    def end(self, step: int) -> None:
        """Have rows be read from now on as they are after round `step`."""
        if self.rows is not None:
            self.rows.want(step)

    def settle(self, step: int) -> None:
        """Have the rows hold all that was pushed in rounds up to `step`, the last one: they do."""

    def free(self) -> None:
        """Free the window; may be called twice. Collective: yes."""
        if self._background is not None:
            self._background.end()
        self._cluster.serving = self._background = None
        self.rows = self.owned = None
        self._sender.free()
        self._window.free()


def _fields(job: Job, tables: Sequence[JobTable], rank: int, lines: Lines) -> tuple[Field, ...]:
    """Return the fields of a rank's segment, with so many lines of lazy tables."""
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
    """Return how rows that workers push to other nodes are packed."""
    return Packing(push_codec(job.config), job.config.seed)


def _read_packing(job: Job) -> Packing:
    """Return how rows that they read from there are."""
    return Packing(pull_codec(job.config), job.config.seed, job.base_step)


class _Sender:
    """Sends a worker's rows to owners on other nodes; nothing on servers."""

    def __init__(
        self, job: Job, tables: Sequence[JobTable], window: Window, transfers: Transfers
    ) -> None:
        cluster, owners = job.cluster, job.cluster.roles.owners
        how, sums = (tables, len(owners)), _push_packing(job)
        self._arrays, self._transfers = cluster.arrays, transfers
        self._packers = [
            (rank, RowsPacker(window, cluster.rank, *how, owner, sums, job.worker_id))
            for owner, rank in enumerate(owners)
            if job.worker_id is not None and not cluster.is_local(rank)
        ]

    def send(self, step: int) -> list[Request]:
        """Begin to send the rows of round `step`."""
        requests = []
        for rank, packer in self._packers:
            for piece in pieces_of(packer.pack(step), packer.most):
                requests.append(self._arrays.begin_send(piece, rank, TAG_ROW_SUMS))
                self._transfers.bytes_sent += piece.nbytes
        return requests

    def free(self) -> None:
        """Let go of the window's memory; may be called twice."""
        self._packers = []


class OwnedTables(OwnerTables):
    """The rows of one owner, and what comes in for them. Collective: no.

    Args:
        job: The run.
        tables: Its tables.
        window: The memory of its ranks.
        transfers: Where waiting is counted.
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
        """Fill the rows that the run's checkpoint has, and let them be read.

        Raises:
            UserError: If the checkpoint cannot be read.
        """
        fill_tables(self.tables, job.checkpoint)
        self._replies.version = job.base_step

    def of_epoch(self, epoch: int, over: int | None) -> None:
        """Say of which epoch the next update is, and how many are over if old rows go with it."""
        self._over = over
        for served in self.tables:
            if served.shard.ages:
                served.shard.ages.epoch = epoch

    def serve(self) -> None:
        """Answer remote workers, unless another thread of this rank does just now. Blocks: no."""
        if self._lock.acquire(blocking=False):
            try:
                self._replies.serve()
            finally:
                self._lock.release()

    def receive(self) -> None:
        """Begin to receive the round's rows of remote workers."""
        self._coming = [request for each in self._incoming for request in each.receive()]

    def collect(self, step: int, weights: np.ndarray) -> None:
        """Add up the rows of all workers of round `step`. Blocks: until they are here."""
        self._transfers.wait(self._coming)
        found = [each.sections(step) for each in self._incoming]
        for number, sums in enumerate(self._sums):
            sums.merge([sections[number] for sections in found], weights)

    def sum_squares(self) -> float:
        """Return the square of the norm of what was added up."""
        return sum(sum_squares(sums.rows.reshape(-1)) for sums in self._sums)

    def scale(self, factor: float) -> None:
        """Scale what was added up."""
        for sums in self._sums:
            scale(sums.rows.reshape(-1), factor)

    def apply(self, step: int, factor: float) -> None:
        """Make update `step` at `factor` times the rates, and then evict old rows if they go."""
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
    """What one worker brings into rounds for one owner.

    On the node it lies there, else it is received.
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
        """Begin to receive the rows of a round."""
        if self._unpacker is None:
            return []
        pieces = pieces_of(self._place, self._place.size)
        return [self._begin(piece, self._rank, TAG_ROW_SUMS) for piece in pieces]

    def sections(self, step: int) -> Sequence[Section]:
        """Return the rows of round `step` by table, when they are here; once a round."""
        if self._unpacker is None:
            return [sections.of(step, self._owner) for sections in self._local]
        return self._unpacker.unpack(self._rank, self._place)


@kernel()
def merge_rows(lists: Matrix, weights: Vector, local: Vector, out: Matrix) -> int:
    """Sum the rows of workers' lists, each times its worker's weight, in the order of the workers.

    Args:
        lists: A column a worker, shape (WORDS, workers), dtype int64: the address of its places,
            which are int64 and increase, that of its gradients, of out's dtype, and how many it
            has. What they point to stays alive during the call. Other words are overwritten.
        weights: Shape (workers,), dtype float64; rounded to out's dtype.
        local: Where the places go, each once, increasing; as long as all lists together need.
        out: Where the sums go, shape (len(local), dim).

    Returns:
        How many rows there are.
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
    """The rows of a round that an owner has of one table, added up over workers.

    Attributes:
        local: Their places in the owner, increasing, shape (n,), dtype int64.
        rows: The sum of each, shape (n, dim).
    """

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        self.local, self.rows = np.empty(0, np.int64), np.empty((0, dim), dtype)
        self._room = self.local, self.rows

    def merge(self, sections: Sequence[Section], weights: np.ndarray) -> None:
        """Add up what workers have, each times its weight; who has weight 0 is left out."""
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
    """Compile, or load from the cache on disk, the loop that adds up rows."""
    section = Section(np.zeros(1, np.int64), np.zeros((1, 1), dtype))
    _Sums(1, np.dtype(dtype)).merge([section], np.ones(1))
