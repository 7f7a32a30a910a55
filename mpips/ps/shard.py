"""Server of a shard: header, version, ledger of pushes, and parts.

A server's segment is ``header | params | slots | applied``. Around every update it publishes
two words: the version begun before the first store, the version committed after the last. How that
is read: see `mpips.ps.client`.
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
STALENESS_BINS = 256  # the last bin holds everything above


class Observer(NamedTuple):
    """What is called with what a server has applied or dropped.

    Attributes:
        note: Called with a push, the version that it was applied to, the staleness of the oldest
            gradient in it, and when the server took it.
        note_all: Called with headers of pushes that the compiled loop has applied, each with the
            version read, shape (pushes, HEADER_WORDS); with the version before them; and with the
            seconds that they took. None: the server applies each push by itself.
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
    """What a server has done in this run: the observer that each server has.

    Attributes:
        handled: Gradients applied or dropped.
        dropped: Of these, those that changed nothing.
        staleness: Gradients by their staleness, shape (STALENESS_BINS,).
        staleness_sum: Of all of them.
        staleness_max: The largest.
        busy_s: Seconds in applying them.
        before: How many there were, and the sum of their staleness, when `recent` was last asked.
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

    def count_all(self, said: np.ndarray, before: int, busy_s: float) -> None:
        """Count pushes that were applied, of one gradient each; see `Observer.note_all`."""
        staleness = np.arange(before, before + len(said)) - said[:, VERSION]
        binned = np.clip(staleness, 0, STALENESS_BINS - 1)
        self.staleness += np.bincount(binned, minlength=STALENESS_BINS)
        self.staleness_sum += int(staleness.sum())
        self.staleness_max = max(self.staleness_max, int(staleness.max()))
        self.handled += staleness.size
        self.busy_s += busy_s

    def recent(self) -> float | None:
        """Return the mean staleness since this was last asked; None where nothing has come."""
        now = (int(self.staleness.sum()), self.staleness_sum)
        (n, total), self.before = self.before, now
        return (now[1] - total) / (now[0] - n) if now[0] > n else None


def trace_push(push: Push, version: int, oldest: int, start: float) -> None:
    """Write an applied push into this rank's trace, unless that has ended; see `Observer.note`."""
    status_board.applied(start, time.perf_counter(), ((each.worker, each.seq) for each in push))


class Frozen:
    """What each worker's pushes leave alone, as `mpips.ps.worker.Freezing` tells a server.

    Attributes:
        nothing: Whether no worker has left anything alone so far.
    """

    def __init__(self) -> None:
        self._of: dict[int, deque[tuple[int, Ranges]]] = {}  # by worker: from which push on
        self.nothing = True

    def note(self, worker: int, first: int, frozen: Ranges) -> None:
        """Note what a worker's pushes leave alone from number `first` on."""
        self.nothing = False
        self._of.setdefault(worker, deque()).append((first, frozen))

    def of(self, push: Push) -> Ranges:
        """Return what a push leaves alone; with several in it, what all of them do."""
        return common(self._one(part.worker, part.seq) for part in push)

    def _one(self, worker: int, seq: int) -> Ranges:
        since = self._of.get(worker, deque())
        while len(since) > 1 and since[1][0] <= seq:  # pushes come in their order
            since.popleft()
        return since[0][1] if since and since[0][0] <= seq else ()


class Server:
    """A server's half of the store: it applies pushes to what it owns. Collective: no.

    Args:
        cluster: The job's ranks.
        window: Where its segment is.
        server_id: Number of the shard.
        design: Of the store.

    Attributes:
        version: Updates applied to the shard, in resumed runs too; the header shows it to others.
        parts: What a push changes: `dense`, and `rows` where there are tables.
        observers: Learn of what was applied or dropped.
        readers: Called between two updates: they let others read, and return whether anybody does.
        idle: Whether no push has anything for this server.
        tally: What it has done.
        frozen: What workers' pushes leave alone.
        grants: Where reads by workers of this node are consistent.
        recorder: Writes down what is applied, if anything does.
        undo: What another server needs to go on after this one's death, if one can.
        resumes: Worker and number of the push that comes next, where it is applied in part.

    It has an attribute for each field of its segment, for each who reads it, and for each feature
    that a job may ask for.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int, design: "Design") -> None:
        shard, rule, stale = design.shards[server_id], design.rule, design.stale
        self._cluster, self.shard, self.stale = cluster, shard, stale
        view = lambda name: window.view(cluster.roles.servers[server_id], name)  # noqa: E731
        self.header, self.params, self.applied = view("header"), view("params"), view("applied")
        self.slots = tuple(view(f"slots/{name}") for name in rule.slots + stale.slots)
        several = cluster.nodes > 1  # somebody there may read, or send
        between = self.get_on if several else None
        update = rule, design.rate
        self.dense = DensePart(shard, self.params, self.slots, update, stale, between)
        self.parts: list[DensePart | OwnedRows] = [self.dense]
        how = self.header, self.params, shard, server_id, design.replies
        self.replies = Replies(cluster, *how)
        ranks = cluster.roles.workers
        self.clocks = VectorClock(self.header, self.applied, ranks, self.replies.ask)
        self.version, self.idle = 0, shard.size == 0
        self.frozen, self.tally = Frozen(), Tally()
        self.observers: list[Observer] = [Observer(self.tally.count, self.tally.count_all)]
        if status_board.is_traced():
            self.observers.append(Observer(trace_push))
        self.readers: list[Callable[[], object]] = [self._answer] if several else []
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
        """Own rows of tables, too: every push may have rows for this server."""
        self.rows, self.idle = rows, False
        self.parts.append(rows)
        self.readers.append(rows.serve)

    def record_by(self, recorder: "Recorder") -> None:
        """Have what is applied written down."""
        self.recorder = recorder
        self.observers.append(Observer(recorder.note))

    @property
    def nbytes(self) -> int:
        """Bytes of what it owns: parameters, slots and rows of tables."""
        return sum(part.nbytes for part in self.parts)

    def start_from(self, version: int) -> None:
        """Set the version of a shard whose parameters and slots were just filled."""
        self.version = version
        publish(self.header, BEGUN, version)
        publish(self.header, COMMITTED, version)
        publish(self.header, STATE, SERVING)

    def close(self) -> None:
        """Say in the header that nothing more will be applied."""
        publish(self.header, STATE, CLOSED)

    def apply(self, push: Push) -> int:
        """Apply a push, the next of its worker, and record it in the ledger.

        A mean of several workers' gradients is applied once, at as many times the rate, or the
        sum of their factors of it: for SGD the same as one after another, if these are alike. It
        counts as many versions, and is as stale as the oldest in it. A push that is dropped counts
        as a version that changes nothing.

        Returns:
            The shard's version after it.

        Blocks: no; with several nodes, enters MPI between blocks.
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
            self._leave_alone(push)
        publish(self.header, BEGUN, version)
        if self.stale.limit is not None and oldest > self.stale.limit:
            self.tally.dropped += len(pushes)
        else:
            for part in self.parts:
                part.apply(push, version, oldest)
        # Before the ledger: who sees there that a push is applied reads a version that counts it.
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
        """Note in the ledger that a worker's pushes up to one are applied."""
        publish(self.applied, worker, seq)

    @property
    def is_plain(self) -> bool:
        """Return whether a push changes nothing at present that `applied_all` does not know."""
        known = all(observer.note_all for observer in self.observers)
        return known and self.frozen.nothing and self.resumes is None

    def applied_all(self, said: np.ndarray, busy_s: float) -> None:
        """Note pushes that `mpips.ps.local_pushes` has applied, whose words are published.

        Args:
            said: Their headers, each with the version read, shape (pushes, HEADER_WORDS).
            busy_s: Seconds that it took.
        """
        before = self.version
        self.version += len(said)
        self.clocks.advance(*said[:, NUMBER].tolist())
        self.clocks.publish()
        for observer in self.observers:
            assert observer.note_all is not None, "a push that has to be applied by itself"
            observer.note_all(said, before, busy_s)

    def _leave_alone(self, push: Push) -> None:
        """Leave alone what a push leaves alone, and count its updates."""
        if self.dense.leaving.leave(self.frozen.of(push)):
            self.dense.cut()
        self.dense.leaving.count(push.count)

    def finished(self, rank: int, pushes: int) -> None:
        """Note that a worker will have made so many pushes, and no more."""
        self.clocks.finished(rank, pushes)

    def skip_batches(self, numbers: Iterable[int]) -> None:
        """Note that the batches of these numbers make no push: clocks do not wait for them."""
        self.clocks.advance(*numbers)
        self.clocks.publish()

    def has_applied(self, pushes: Sequence[int]) -> bool:
        """Return whether so many pushes of each worker are applied; an empty shard gets none."""
        return self.idle or self.ledger == list(pushes)

    @property
    def ledger(self) -> list[int]:
        """How many pushes of each worker are applied."""
        return [observe(self.applied, worker) for worker in range(self.applied.size)]

    def is_done(self, final: Mapping[int, int]) -> bool:
        """Return whether all is applied that any worker has pushed.

        Args:
            final: Pushes of each worker that has finished, by rank.
        """
        ranks = self._cluster.roles.workers
        return len(final) == len(ranks) and self.has_applied([final[rank] for rank in ranks])

    def settle(self, step: int) -> int:
        """Get ready for a checkpoint; returns its step, which is `step` where pushes are counted.

        All servers have applied the same pushes when they call it.
        """
        return step

    def want_read(self, rank: int, request: tuple[Any, ...]) -> None:
        """Note a remote worker's request (`mpips.transport.remote_reads.ReplyReads`)."""
        start, (consistent, *needs) = time.perf_counter(), request
        self.clocks.held.append((rank, consistent, ReadRequirement(*needs)))
        if self.resumes is None:
            self.clocks.let()
        status_board.answered(rank, start)

    def serve_reads(self) -> bool:
        """Let those who asked read now, between two updates.

        Returns:
            Whether anybody reads rows of tables.

        Blocks: until local readers have copied the shard; remote ones get a reply.
        """
        busy = False
        if self.resumes is None:  # else the shard is of no version
            for serve in self.readers:
                busy |= serve() is True
        return busy

    def _answer(self) -> None:
        """Answer remote workers that read the shard."""
        if self.clocks.held:
            self.clocks.let()
        self.replies.serve()

    def get_on(self) -> None:
        """Enter MPI within an update, and send a little of what remote workers wait for."""
        self._cluster.progress()
        self.replies.serve(between=False)
        if self.rows is not None:
            self.rows.answer_some()
