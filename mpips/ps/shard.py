"""Server of a shard: header, version, ledger of pushes, and parts.

A server's segment is ``header | params | slots | applied``. Around every update it publishes two
words: the begun version before the first store, and the committed version after the last. Workers
read as described in `mpips.ps.client`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.health import status_board
from mpips.kernels.atomics import observe, publish
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.optim import Ranges, common
from mpips.optim.staleness import Staleness
from mpips.ps.client import Grants
from mpips.ps.consistency import ReadRequirement, VectorClock
from mpips.ps.parts import DensePart
from mpips.transport.push import NUMBER, VERSION, Push
from mpips.transport.remote_reads import BEGUN, COMMITTED, STATE, Replies

if TYPE_CHECKING:
    from mpips.failover.undo_log import UndoLog
    from mpips.ps.design import Design
    from mpips.ps.replay_log import Recorder
    from mpips.tables.server import OwnedRows

STARTING, SERVING, CLOSED = range(3)  # values of STATE
FRESH = Staleness()
STALENESS_BINS = 256  # the last bin counts all larger values, too


class Observer(NamedTuple):
    """Functions that are called after a server has applied or dropped pushes.

    Attributes:
        note: Called with a push, the version before it, the staleness of its oldest gradient, and
            the time when the server began with it.
        note_all: Called with the headers of pushes that the compiled loop has applied, each with
            the version read, shape (pushes, HEADER_WORDS); with the version before them; and with
            the seconds that they took. If None, the server applies each push by itself.
    """

    note: Callable[[Push, int, int, float], object]
    note_all: Callable[[np.ndarray, int, float], object] | None = None


def server_fields(size: int, slots: Sequence[str], dtype: str, workers: int) -> tuple[Field, ...]:
    """Return the fields of a server's segment for a shard of `size` elements."""
    return (
        Field("header", "i8", (8,)),
        Field("params", dtype, (size,)),
        *(Field(f"slots/{name}", dtype, (size,)) for name in slots),
        Field("applied", "i8", (workers,)),
        Field("granted_reads", "i8", (workers,)),
    )


@dataclass
class Tally:
    """Counts of a server's pushes in this run; one of the server's observers.

    Attributes:
        handled: Gradients applied or dropped.
        dropped: Gradients dropped.
        staleness: Number of gradients by staleness, shape (STALENESS_BINS,), dtype int64.
        staleness_sum: Sum of the staleness of all gradients.
        staleness_max: Largest staleness.
        busy_s: Seconds spent in updates.
        before: Number of gradients and sum of their staleness at the last call of `recent`.
    """

    handled: int = 0
    dropped: int = 0
    staleness: np.ndarray = field(default_factory=lambda: np.zeros(STALENESS_BINS, "i8"))
    staleness_sum: int = 0
    staleness_max: int = 0
    busy_s: float = 0.0
    before: tuple[int, int] = (0, 0)

    def count(self, push: Push, version: int, oldest: int, start: float) -> None:
        """Count an applied push; see `Observer.note`."""
        for each in (push, *push.others):
            staleness = version - each.version
            self.staleness[min(staleness, STALENESS_BINS - 1)] += 1
            self.staleness_sum += staleness
            self.handled += 1
        self.staleness_max = max(self.staleness_max, oldest)
        self.busy_s += time.perf_counter() - start

    def count_all(self, headers: np.ndarray, before: int, busy_s: float) -> None:
        """Count applied pushes of one gradient each; see `Observer.note_all`."""
        staleness = np.arange(before, before + len(headers)) - headers[:, VERSION]
        binned = np.clip(staleness, 0, STALENESS_BINS - 1)
        self.staleness += np.bincount(binned, minlength=STALENESS_BINS)
        self.staleness_sum += int(staleness.sum())
        self.staleness_max = max(self.staleness_max, int(staleness.max()))
        self.handled += staleness.size
        self.busy_s += busy_s

    def recent(self) -> float | None:
        """Return the mean staleness since the last call; None if no gradient has come."""
        now = (int(self.staleness.sum()), self.staleness_sum)
        (n, total), self.before = self.before, now
        return (now[1] - total) / (now[0] - n) if now[0] > n else None


def trace_push(push: Push, version: int, oldest: int, start: float) -> None:
    """Write an applied push into this rank's trace, if it is open; see `Observer.note`."""
    status_board.applied(start, time.perf_counter(), ((each.worker, each.seq) for each in push))


class Frozen:
    """Frozen ranges of each worker's pushes, as announced by `mpips.ps.worker.Freezing`.

    Attributes:
        nothing: Whether no worker has ever frozen a range.
    """

    def __init__(self) -> None:
        # By worker: first push, and the ranges frozen from that push on.
        self._of: dict[int, deque[tuple[int, Ranges]]] = {}
        self.nothing = True

    def note(self, worker: int, first: int, frozen: Ranges) -> None:
        """Note the frozen ranges of a worker's pushes from number `first` on."""
        self.nothing = False
        self._of.setdefault(worker, deque()).append((first, frozen))

    def of(self, push: Push) -> Ranges:
        """Return the frozen ranges of a push; if it is aggregated, those that its parts share."""
        return common(self._of_worker(part.worker, part.seq) for part in push)

    def _of_worker(self, worker: int, seq: int) -> Ranges:
        since = self._of.get(worker, deque())
        while len(since) > 1 and since[1][0] <= seq:  # a worker's pushes come in order
            since.popleft()
        return since[0][1] if since and since[0][0] <= seq else ()


class Server:
    """A server's half of the store: applies pushes to its parts. Collective: no.

    Args:
        cluster: The job's ranks.
        window: The window with the server's segment.
        server_id: Number of the shard.
        design: Design of the store.

    Attributes:
        version: Number of updates of the shard, over all jobs of a run; the header publishes it.
        parts: Parts that a push updates: `dense`, and `rows` if there are tables.
        observers: Called after pushes are applied or dropped.
        readers: Called between two updates. Each one lets other ranks read, and returns True if a
            rank reads.
        idle: Whether no push has data for this server.
        tally: Counts of pushes.
        frozen: Frozen ranges of the workers' pushes.
        grants: Consistent reads by workers of this node; None if reads are not consistent.
        recorder: Records pushes for `mpips replay`; None if the job keeps no record.
        undo: Data by which another server can finish or undo an update after this one's death; None
            if no server can take over the shard.
        resumes: Worker and number of a push that is applied in part and must come next; else None.

    The class has an attribute for each field of its segment, for each kind of reader, and for each
    optional feature of a job.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int, design: "Design") -> None:
        shard, rule, stale = design.shards[server_id], design.rule, design.stale
        self._cluster, self.shard, self.stale = cluster, shard, stale
        view = lambda name: window.view(cluster.roles.servers[server_id], name)  # noqa: E731
        self.header, self.params, self.applied = view("header"), view("params"), view("applied")
        self.slots = tuple(view(f"slots/{name}") for name in rule.slots + stale.slots)
        several_nodes = cluster.nodes > 1  # ranks of other nodes may read or push
        between = self.enter_mpi if several_nodes else None
        update = rule, design.rate
        self.dense = DensePart(shard, self.params, self.slots, update, stale, between)
        self.parts: list[DensePart | OwnedRows] = [self.dense]
        args = self.header, self.params, shard, server_id, design.replies
        self.replies = Replies(cluster, *args)
        ranks = cluster.roles.workers
        self.clocks = VectorClock(self.header, self.applied, ranks, self.replies.ask)
        self.version, self.idle = 0, shard.size == 0
        self.frozen, self.tally = Frozen(), Tally()
        self.observers: list[Observer] = [Observer(self.tally.count, self.tally.count_all)]
        if status_board.is_traced():
            self.observers.append(Observer(trace_push))
        self.readers: list[Callable[[], object]] = [self._answer] if several_nodes else []
        self.grants: Grants | None = None
        self.rows: OwnedRows | None = None
        self.recorder: Recorder | None = None
        self.undo: UndoLog | None = None
        self.resumes: tuple[int, int] | None = None

    def hold_for(self, grants: Grants) -> None:
        """Let workers of this node read between two updates."""
        self.grants = grants
        self.readers.append(grants.serve)

    def own(self, rows: "OwnedRows") -> None:
        """Add rows of tables: every push may have rows for this server."""
        self.rows, self.idle = rows, False
        self.parts.append(rows)
        self.readers.append(rows.serve)

    def record_by(self, recorder: "Recorder") -> None:
        """Record pushes with a recorder."""
        self.recorder = recorder
        self.observers.append(Observer(recorder.note))

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, slots and rows of tables."""
        return sum(part.nbytes for part in self.parts)

    def start_from(self, version: int) -> None:
        """Set and publish the version of a shard whose parameters and slots are complete."""
        self.version = version
        publish(self.header, BEGUN, version)
        publish(self.header, COMMITTED, version)
        publish(self.header, STATE, SERVING)

    def close(self) -> None:
        """Publish in the header that no more pushes will be applied."""
        publish(self.header, STATE, CLOSED)

    def apply(self, push: Push) -> int:
        """Apply a push, the next of its worker, and record it in the ledger.

        The mean of k workers' gradients is applied once, with the learning rate times the sum of
        their k rate factors. For SGD with equal factors, this equals k single updates. It counts as
        k versions, and its staleness is that of its oldest gradient. A dropped push counts as a
        version without changes.

        Returns:
            Version of the shard after the push.

        Blocks: no; in a job on several nodes, enters MPI between blocks.
        Reference: Li et al., OSDI 2014, section 3.
        """
        start, before, pushes = time.perf_counter(), self.version, (push, *push.others)
        version, oldest = before + len(pushes), 0
        for each in pushes:
            assert each.seq == observe(self.applied, each.worker) + 1, "pushes out of order"
            oldest = max(oldest, before - each.version)
        if self.undo is not None:
            assert self.resumes in (None, (push.worker, push.seq)), "another one is half applied"
            self.undo.begin(push, version)
        if not self.frozen.nothing:
            self._freeze(push)
        publish(self.header, BEGUN, version)
        if self.stale.limit is not None and oldest > self.stale.limit:
            self.tally.dropped += len(pushes)
        else:
            for part in self.parts:
                part.apply(push, version, oldest)
        # Before the ledger: a rank that sees the push there must read a version that counts it.
        publish(self.header, COMMITTED, version)
        self.version, self.resumes = version, None
        for each in pushes:
            publish(self.applied, each.worker, each.seq)
            self.clocks.advance(each.number)
        self.clocks.publish()
        for observer in self.observers:
            observer.note(push, before, oldest, start)
        return version

    def note(self, worker: int, seq: int) -> None:
        """Set the number of a worker's applied pushes in the ledger."""
        publish(self.applied, worker, seq)

    @property
    def is_plain(self) -> bool:
        """Whether the compiled loop can apply the next push, and `applied_all` note it."""
        known = all(observer.note_all for observer in self.observers)
        return known and self.frozen.nothing and self.resumes is None

    def applied_all(self, headers: np.ndarray, busy_s: float) -> None:
        """Note pushes that `mpips.ps.local_pushes` has applied; the loop has published their words.

        Args:
            headers: Headers of the pushes, each with the version read, shape (pushes,
                HEADER_WORDS), dtype int64.

            busy_s: Seconds spent in their updates.
        """
        before = self.version
        self.version += len(headers)
        self.clocks.advance(*headers[:, NUMBER].tolist())
        self.clocks.publish()
        for observer in self.observers:
            assert observer.note_all is not None, "a push that has to be applied by itself"
            observer.note_all(headers, before, busy_s)

    def _freeze(self, push: Push) -> None:
        """Freeze the ranges that a push freezes, and count its updates."""
        if self.dense.leaving.leave(self.frozen.of(push)):
            self.dense.cut()
        self.dense.leaving.count(push.count)

    def finished(self, rank: int, pushes: int) -> None:
        """Note that the worker at a rank makes no pushes beyond number `pushes`."""

    def skip_batches(self, numbers: Iterable[int]) -> None:
        """Note that these batches, by number, make no pushes, so that no clock waits for them."""
        self.clocks.advance(*numbers)
        self.clocks.publish()

    def has_applied(self, pushes: Sequence[int]) -> bool:
        """Return whether so many pushes of each worker are applied; True if the shard is empty."""
        return self.idle or self.ledger == list(pushes)

    @property
    def ledger(self) -> list[int]:
        """Number of applied pushes of each worker."""
        return [observe(self.applied, worker) for worker in range(self.applied.size)]

    def is_done(self, final: Mapping[int, int]) -> bool:
        """Return whether all pushes of all workers are applied.

        Args:
            final: Final number of pushes of each finished worker, by rank.
        """
        ranks = self._cluster.roles.workers
        return len(final) == len(ranks) and self.has_applied([final[rank] for rank in ranks])

    def settle(self, step: int) -> int:
        """Prepare for a checkpoint and return its step.

        All servers have applied the same pushes when they call it.

        Args:
            step: Number of pushes; here, it is the step.
        """
        return step

    def want_read(self, rank: int, request: tuple[Any, ...]) -> None:
        """Note a remote worker's request (`mpips.transport.remote_reads.ReplyReads`)."""
        start, (consistent, *needs) = time.perf_counter(), request
        self.clocks.held.append((rank, consistent, ReadRequirement(*needs)))
        if self.resumes is None:
            self.clocks.let(len(self.clocks.held) - 1)
        status_board.answered(rank, start)

    def serve_reads(self) -> bool:
        """Let ranks read that have asked to, between two updates.

        Returns:
            Whether a rank reads rows of tables.

        Blocks: until local readers have copied the shard. Remote readers get a reply.
        """
        busy = False
        if self.resumes is None:  # else an update is half done
            for serve in self.readers:
                busy |= serve() is True
        return busy

    def _answer(self) -> None:
        """Answer remote reads of the shard."""
        if self.clocks.held:
            self.clocks.let()
        self.replies.serve()

    def enter_mpi(self) -> None:
        """Enter MPI within an update, and send a part of the replies to remote workers."""
        self._cluster.progress()
        self.replies.serve(between=False)
        if self.rows is not None:
            self.rows.answer_some()
