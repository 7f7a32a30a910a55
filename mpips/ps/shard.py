"""A server's shard: it applies pushes, and shows between two of them which version there is.

A server's segment is ``header | params | slots | applied``. Around every update it publishes
two words: the version begun before the first store, the version committed after the last. How that
is read: see `mpips.ps.client`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.cluster import words
from mpips.cluster.window import Field, Window
from mpips.cluster.world import Cluster
from mpips.kernels.atomics import find_ahead, no_limit, observe, publish
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.optim import Change, Leaving, Ranges, Rule
from mpips.optim.staleness import Staleness
from mpips.ps.consistency import Awaited, Clocks
from mpips.ps.frozen import Frozen
from mpips.transport.far import BEGUN, COMMITTED, STATE, Replies
from mpips.transport.push import Push
from mpips.transport.wire import Packing

if TYPE_CHECKING:
    from mpips.ps.recording import Recorder

STARTING, SERVING, CLOSED = range(3)  # values of STATE
BLOCK_BYTES = 1 << 20  # between two of an update a server of several nodes enters MPI
FRESH = Staleness()
STALENESS_BINS = 256  # the last bin holds everything above


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
    """What a server has done in this run.

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

    def count(self, staleness: int) -> None:
        """Count a gradient of that staleness."""
        self.staleness[min(staleness, STALENESS_BINS - 1)] += 1
        self.staleness_max = max(self.staleness_max, staleness)
        self.staleness_sum += staleness

    def recent(self) -> float | None:
        """Return the mean staleness since this was last asked; None where nothing has come."""
        now = (int(self.staleness.sum()), self.staleness_sum)
        (n, total), self.before = self.before, now
        return (now[1] - total) / (now[0] - n) if now[0] > n else None


class Block(NamedTuple):
    """A part of a shard that is updated at a time.

    Attributes:
        range: Where it lies in the shard.
        params: Its parameters.
        slots: The same part of each slot.
        rule: The rule with the block's settings; `scale` is its factor of the learning rate.
    """

    range: slice
    params: np.ndarray
    slots: tuple[np.ndarray, ...]
    rule: Rule
    scale: float


class Grants:
    """Consistent reads by workers of this node, the server's half. Collective: no.

    A worker publishes the number of the read that it wants; the server grants it between two
    updates, and holds until the worker has published the same number again. A number that is odd
    wants rows of tables (`mpips.ps.client.Held`).

    Attributes:
        noted: Called with the number of a worker that reads rows.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int) -> None:
        self._cluster, self._server = cluster, server_id
        self._granted = window.view(cluster.roles.servers[server_id], "granted_reads")
        near = [(w, r) for w, r in enumerate(cluster.roles.workers) if cluster.near(r)]
        self._ranks = cluster.roles.workers
        self.noted: Callable[[int], object] = lambda worker: None
        self._readers = [(w, window.view(r, "wants"), window.view(r, "reads")) for w, r in near]
        self._asked = (
            addresses_of((wants for _, wants, _ in self._readers), server_id),
            np.array([w for w, _ in near], np.int64),
            self._granted,
            no_limit(len(cluster.roles.workers)),
        )

    def serve(self) -> None:
        """Let those who asked read now. Blocks: until they have."""
        found = find_ahead(*self._asked, 0)
        if found >= 0:
            self._hold(found)

    def let_finish(self) -> None:
        """Hold for those who were let before, by a server that has died. Blocks: as `serve`."""
        granted = [(w, r, observe(self._granted, w)) for w, _, r in self._readers]
        self._wait_for([(self._ranks[w], reads, count) for w, reads, count in granted])

    def _hold(self, found: int) -> None:
        held: list[tuple[int, np.ndarray, int]] = []
        while found >= 0 and len(held) < len(self._readers):
            worker, wants, reads = self._readers[found]
            want = observe(wants, self._server)
            if want & 1:
                self.noted(worker)
            publish(self._granted, worker, want)
            held.append((self._ranks[worker], reads, want))
            found = find_ahead(*self._asked, (found + 1) % len(self._readers))
        self._wait_for(held)

    def _wait_for(self, held: Sequence[tuple[int, np.ndarray, int]]) -> None:
        lost = self._cluster.failures.lost
        for rank, reads, want in held:

            def has_read(rank: int = rank, reads: np.ndarray = reads, want: int = want) -> bool:
                return observe(reads, self._server) >= want or rank in lost

            self._cluster.wait(has_read, words.SHARD)


class Server:
    """A server's half of the store: it applies pushes to its shard. Collective: no.

    Args:
        rule: Update rule.
        rate: Learning rate as a function of the update's number.
        packing: How replies to far readers are packed.
        stale: What is done about stale pushes.

    Attributes:
        version: Updates applied to the shard, in resumed runs too; the header shows it to others.
        tally: What it has done.
        frozen: What workers' pushes leave alone; `leaving`, the rule without that.
        recorder: Writes down what is applied, if anything does.

    It has an attribute for each field of its segment, and for each who reads it.
    """

    resumes: tuple[int, int] | None = None  # worker and number of the push that is half applied

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        server_id: int,
        shard: Shard,
        rule: Rule,
        rate: Callable[[int], float],
        packing: Packing | None = None,
        stale: Staleness = FRESH,
    ) -> None:
        self._cluster, self.rule, self.rate, self.shard = cluster, rule, rate, shard
        view = lambda name: window.view(cluster.roles.servers[server_id], name)  # noqa: E731
        self.header, self.params, self.applied = view("header"), view("params"), view("applied")
        self.slots = tuple(view(f"slots/{name}") for name in rule.slots + stale.slots)
        self.stale = stale
        self._grants = Grants(cluster, window, server_id)
        packing = packing or Packing()
        self.replies = Replies(cluster, self.header, self.params, shard, server_id, packing)
        ranks = cluster.roles.workers
        self.clocks = Clocks(self.header, self.applied, ranks, self.replies.ask)
        self.frozen, self.leaving = Frozen(), Leaving(rule)
        self._blocks = self._cut()
        largest = max((block.params.size for block in self._blocks), default=0)
        scratch = largest if stale.origins else 0
        self._scratch = np.zeros(scratch, self.params.dtype)
        self.version = 0
        self.tally = Tally()
        self.recorder: Recorder | None = None

    def _cut(self, most: int = BLOCK_BYTES) -> list[Block]:
        """Cut what is updated into blocks of at most so many bytes; views are made once."""
        found, first, step = list[Block](), self.shard.begin, most // self.params.itemsize
        for begin, end, rule, scale in self.leaving.rule.parts(first, self.shard.end):
            for at in range(begin, end, step):
                p = slice(at - first, min(at + step, end) - first)
                slots = tuple(slot[p] for slot in self.slots)
                found.append(Block(p, self.params[p], slots, rule, scale))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of what it owns: parameters, slots and rows of tables."""
        return self.params.nbytes * (1 + len(self.slots))

    @property
    def rows_changed(self) -> dict[str, int]:
        """How many rows of each table have been changed."""
        return {}

    @property
    def rows_evicted(self) -> dict[str, int]:
        """How many rows were evicted, of each table of which any are."""
        return {}

    def epochs_over(self, epochs: int, pushes: Sequence[int]) -> None:
        """Note that of so many epochs nothing is pushed beyond so many pushes of each worker."""

    @property
    def idle(self) -> bool:
        """Whether no push has anything for this server."""
        return self.shard.size == 0

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
        start, count = time.perf_counter(), push.count
        version = self.version + count
        oldest = self.account(push)
        self._leave(self.frozen.of(push))
        publish(self.header, BEGUN, version)
        if self.stale.drops(oldest):
            self.tally.dropped += count
        else:
            self._update(push, version, oldest)
        # Before the ledger: who sees there that a push is applied reads a version that counts it.
        publish(self.header, COMMITTED, version)
        self.version = version
        self.leaving.count(count)
        self.record(push)
        self.clocks.publish()
        if self.recorder is not None:
            self.recorder.note(push, oldest, version)
        self._took(push, start)
        return version

    def finished(self, rank: int, pushes: int) -> None:
        """Note that a worker will have made so many pushes, and no more."""
        self.clocks.finished(rank, pushes)

    def void(self, numbers: Iterable[int]) -> None:
        """Note that the batches of these numbers make no push: clocks do not wait for them."""
        for number in numbers:
            self.clocks.advance(number)
        self.clocks.publish()

    def has_applied(self, pushes: Sequence[int]) -> bool:
        """Whether so many pushes of each worker are applied; an empty shard gets none."""
        return self.idle or all(observe(self.applied, w) == count for w, count in enumerate(pushes))

    def is_done(self, final: Mapping[int, int]) -> bool:
        """Whether all is applied that any worker has pushed.

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

    def account(self, push: Push) -> int:
        """Count the staleness of each push in a message; returns the largest."""
        version, oldest = self.version, 0
        for part in push:
            assert part.seq == observe(self.applied, part.worker) + 1, "pushes out of order"
            self.tally.count(version - part.version)
            oldest = max(oldest, version - part.version)
        return oldest

    def record(self, push: Push) -> None:
        """Write a push into the ledger."""
        for part in push:
            publish(self.applied, part.worker, part.seq)
            self.clocks.advance(part.number)
        self.tally.handled += push.count

    def _took(self, push: Push, start: float) -> None:
        """Count what a push took since `start`, and tell a trace of it."""
        end = time.perf_counter()
        self.tally.busy_s += end - start
        if words.is_traced():
            words.applied(start, end, ((part.worker, part.seq) for part in push))

    def _leave(self, frozen: Ranges) -> None:
        """Leave these arrays alone in the next update."""
        if self.leaving.leave(frozen):
            self._blocks = self._cut()

    def _update(self, push: Push, version: int, oldest: int) -> None:
        lr = self.stale.rate(self.rate(version), oldest) * push.factors
        own = len(self.rule.slots)
        for block in self.blocks():
            part, params, slots, rule, scale = block
            grad = push.grad[part]
            if push.origin is not None and not isinstance(rule, Change):
                out = self._scratch[: grad.size]
                self.stale.compensate(out, grad, params, push.origin[part], slots[own:])
                grad = out
            self._apply(block, grad, version, lr * scale)

    def _apply(self, block: Block, grad: np.ndarray, step: int, lr: float) -> None:
        """Apply a block's rule; see `mpips.optim.Rule.apply`."""
        own = len(self.rule.slots)
        block.rule.apply(block.params, grad, block.slots[:own], step, lr)

    def blocks(self, some: Sequence[Block] | None = None) -> Iterator[Block]:
        """Yield the parts of the shard that are updated at a time, or others; enter MPI between."""
        far = self._cluster.nodes > 1  # somebody there may read, or send
        for block in self._blocks if some is None else some:
            if far and block.range.start:
                self._cluster.progress()
                self.replies.serve(between=False)
            yield block

    def want_read(self, rank: int, request: tuple[Any, ...]) -> None:
        """Note that a far worker asked for a reply (`mpips.transport.far.ReplyReads`)."""
        start, (consistent, *needs) = time.perf_counter(), request
        self.clocks.want(rank, consistent, Awaited(*needs))
        words.answered(rank, start)

    def serve_reads(self) -> bool:
        """Let those who asked read the shard now, between two updates.

        Returns:
            Whether anybody reads rows of tables.

        Blocks: until near readers have copied the shard; far ones get a reply.
        """
        if self.clocks.held:
            self.clocks.let()
        self._grants.serve()
        self.replies.serve()
        return False
