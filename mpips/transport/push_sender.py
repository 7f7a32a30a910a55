"""Pushes to servers of other nodes: the worker's half.

A header announces the push and the body waits at the sender (a synchronous send) until the server
has room, so that a server's memory depends on neither the number of workers nor their speed. The
gradient's buffer is free when the send has completed.

Where there are tables, a push's rows follow its gradient (`mpips.transport.rows`), also to a
server whose shard is empty.

Where a server needs what a gradient was computed from (`mpips.optim.staleness`), the worker's
replica of push ``seq`` lies in shared memory beside the gradient, stays as long, and is sent behind
it.

With aggregation one worker of each node, the **node aggregator**, sends for all of them: it takes
the mean of the gradients that its node has announced (their sum where a packer keeps a state, and
then makes the mean), at most one a worker, in one pass over where they lie, and frees their buffers
at once. It waits for a gradient of every worker; while nothing is on its way, for no longer than
the last message took. So a link that is not the bottleneck delays nobody by much, and one that is
carries each node's gradients as one. All remote servers get the same pushes in the same message,
and apply the mean at as many times the rate.

A body may be packed: see `mpips.transport.wire`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.atomics import observe, publish
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.layout import Shard
from mpips.mpi.start import BODIES, HEADERS, Request, tag_of
from mpips.mpi.window import Field, Window, transfer_pieces
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable
from mpips.transport.push import HEADER_WORDS, ROWS_BYTES, VERSION
from mpips.transport.wire import Packer, Packing

if TYPE_CHECKING:
    from mpips.transport.rows import RowsPacker

Owner = tuple[int, int, Shard]  # server number, rank, shard
BUFFERS = 2  # open pushes a worker, and open messages a node aggregator
PUSHED = 0  # word of a worker: number of pushes announced
HELD = 1  # word of a worker: number of the last snapshot for which it announces no more for now


@dataclass(frozen=True)
class PushOptions:
    """How pushes go from workers to servers.

    Attributes:
        inbox: Remote bodies that a server holds at a time; with 2, one is received while the other
            is applied. At a snapshot there may be one more.
        aggregate: Whether the gradients of a node go to remote servers in one message.
        packing: How what goes to remote servers is packed.
        origins: Whether the replicas that they were computed from are pushed as well.
        tables: Of which every server has rows, beside its shard.
        kept: Whether pushes are kept until they are applied, as ranks of several nodes may die
            (`mpips.transport.acknowledged`).
    """

    inbox: int = 2
    aggregate: bool = False
    packing: Packing = field(default_factory=Packing)
    origins: bool = False
    tables: Sequence[JobTable] = ()
    kept: bool = False


def worker_fields(n: int, shards: int, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a worker's segment that carry its pushes."""
    return (
        Field("pushed", "i8", (8,)),
        Field("headers", "i8", (BUFFERS, HEADER_WORDS)),
        Field("versions", "i8", (BUFFERS, shards)),
        Field("grads", dtype, (BUFFERS, n)),
    )


def aggregator_fields(workers: int) -> tuple[Field, ...]:
    """Return the fields of a node aggregator's segment: what it has carried of each worker."""
    return (Field("carried", "i8", (workers,)),)


@dataclass(frozen=True)
class Announced:
    """What a worker of this node writes beside its gradients.

    Attributes:
        worker: Worker number.
        words: Shape (8,), dtype int64.
        headers: Shape (BUFFERS, HEADER_WORDS), dtype int64.
        versions: Versions read, shape (BUFFERS, servers), dtype int64.
        grads: Shape (BUFFERS, n_params).
        origins: What they were computed from, shape (BUFFERS, n_params), where servers need it.
    """

    worker: int
    words: np.ndarray
    headers: np.ndarray
    versions: np.ndarray
    grads: np.ndarray
    origins: np.ndarray | None = None

    @classmethod
    def of(cls, window: Window, worker: int, rank: int, origins: bool = False) -> "Announced":
        """Return the worker of that rank."""
        names = ("pushed", "headers", "versions", "grads", *["replicas"] * origins)
        return cls(worker, *(window.view(rank, name) for name in names))

    def header(self, seq: int, server: int) -> np.ndarray:
        """Return a copy of the header of push `seq`, with the version of one shard."""
        header = self.headers[seq % BUFFERS].copy()
        header[VERSION] = self.versions[seq % BUFFERS, server]
        return header

    def origin(self, seq: int, shard: Shard) -> np.ndarray | None:
        """Return what push `seq` was computed from, shape (shard.size,), if servers need it."""
        return None if self.origins is None else self.origins[seq % BUFFERS, shard.range]


def aggregators(cluster: Cluster, aggregate: bool) -> dict[int, int]:
    """Return the rank that sends each worker's remote pushes.

    Itself, or its node's node aggregator.

    The last worker of a node is its node aggregator: the first of all evaluates as well.
    """
    last = {cluster.node_of[rank]: rank for rank in cluster.roles.workers}
    return {r: last[cluster.node_of[r]] if aggregate else r for r in cluster.roles.workers}


class ShardSender:
    """Sends pushes to the server of one remote shard. Collective: no.

    Args:
        cluster: The job's ranks.
        owner: Number and rank of the server, and its shard.
        of: Whose pushes these are, or who sends those of its node.
        packing: How gradients are packed.
        rows: Packs the rows of pushes, where there are tables.

    Attributes:
        server: Number of the server.
        rank: Of who serves the shard.
        shard: The shard.
        packer: Packs gradients.
        bytes_sent: Of headers and bodies.
    """

    def __init__(
        self, cluster: Cluster, owner: Owner, of: Announced, packing: Packing,
        rows: "RowsPacker | None" = None,
    ) -> None:  # fmt: skip
        self.server, self.rank, self.shard = owner
        self.packer = Packer(packing, self.shard, of.grads.dtype, of.worker, BUFFERS)
        self._of, self._rows, self._failures = of, rows, cluster.failures
        self._begin_header = cluster.arrays.begin_send
        self._begin_body = cluster.arrays.begin_synchronous_send
        self._requests: list[list[Request]] = [[] for _ in range(BUFFERS)]
        self._headers: list[np.ndarray] = [np.zeros(0, "i8")] * BUFFERS
        self.bytes_sent = 0

    def send(self, seq: int) -> None:
        """Send push `seq`, which is announced. Blocks: no; its buffer is to stay as it is."""
        of, slot = self._of, seq % BUFFERS
        grad, header = of.grads[slot, self.shard.range], of.header(seq, self.server)
        body = self.packer.pack(grad, seq, slot)
        if self._rows is not None:
            header[ROWS_BYTES], pieces = self._rows.pack_in_turn(seq)
            body = (body or [grad]) + pieces
        if (origin := of.origin(seq, self.shard)) is not None:
            body += transfer_pieces(origin)
        self.send_message(slot, header[None], body)

    def send_message(self, slot: int, headers: np.ndarray, body: Sequence[np.ndarray]) -> None:
        """Send headers, and a body in pieces. Blocks: no; leave both alone until `done(slot)`."""
        begin, rank, tag = self._failures.begin_send, self.rank, tag_of(self.server, BODIES)
        sent = [begin(self._begin_header, headers, rank, tag_of(self.server, HEADERS))]
        sent += [begin(self._begin_body, piece, rank, tag) for piece in body]
        self._headers[slot] = headers
        self._requests[slot] += [request for request in sent if request is not None]
        self.bytes_sent += headers.nbytes + sum(piece.nbytes for piece in body)

    def done(self, slot: int) -> bool:
        """Return whether a buffer's push has left, or nobody waits for it. Blocks: no."""
        requests = self._requests[slot]
        if requests and self._failures.done(requests):
            requests.clear()
        return not requests

    def all_done(self) -> bool:
        """Return whether that holds for all buffers. Blocks: no; gets on."""
        return all(self.done(slot) for slot in range(BUFFERS))


class PushSender:
    """A worker's remote pushes, which it sends itself. Collective: no.

    Args:
        shards: Send them; there may be none.
        packed: Number of messages that this rank has packed before.

    Attributes:
        packed: The same, with those of this run.
    """

    def __init__(self, shards: Sequence[ShardSender] = (), packed: int = 0) -> None:
        self._shards, self.packed = shards, packed

    @property
    def bytes_sent(self) -> int:
        """Bytes of the bodies and headers that this rank has sent, as they were sent."""
        return sum(shard.bytes_sent for shard in self._shards)

    @property
    def state(self) -> dict[str, list[tuple[int, np.ndarray]]]:
        """What codecs keep between two pushes: pieces (begin, view) of vectors, by name."""
        found: dict[str, list[tuple[int, np.ndarray]]] = {}
        for sender in self._shards:
            for name, part in sender.packer.state.items():
                found.setdefault(name, []).append((sender.shard.begin, part))
        return found

    def begin_at(self, seq: int) -> None:
        """Note that pushes up to `seq` are applied, before the first one of this run."""

    def hold(self, number: int) -> bool:
        """Announce nothing for now, because of a snapshot.

        Returns:
            Whether `state` stays as it is until a worker of this node goes on. Blocks: no; gets
            on; call it again until then.
        """
        return True

    def writable(self, seq: int) -> bool:
        """Return whether the buffer of push `seq` may be written. Blocks: no; gets on."""
        return all(shard.done(seq % BUFFERS) for shard in self._shards)

    def send(self, seq: int) -> None:
        """Send push `seq`, which is announced. Blocks: no."""
        for shard in self._shards:
            shard.send(seq)
        self.packed += 1

    def sent(self) -> bool:
        """Return whether every remote push of this rank has left. Blocks: no; gets on."""
        return all(shard.all_done() for shard in self._shards)

    def resting(self) -> bool:
        """Return whether nothing is left to send before the next `send`. Blocks: no; gets on."""
        return self.sent()


class NodeMember(PushSender):
    """A node aggregator sends them.

    Args:
        carried: The node aggregator's word a worker, shape (workers,), dtype int64.
        me: This worker.
    """

    def __init__(self, carried: np.ndarray, me: Announced) -> None:
        super().__init__()
        self._carried, self._me, self._last = carried, me, 0

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        return observe(self._carried, self._me.worker) >= seq - BUFFERS

    def send(self, seq: int) -> None:
        """See `PushSender.send`."""
        self._last = seq

    def hold(self, number: int) -> bool:
        """See `PushSender.hold`; the node aggregator has to know."""
        publish(self._me.words, HELD, number)
        return True

    def sent(self) -> bool:
        """See `PushSender.sent`."""
        return observe(self._carried, self._me.worker) == self._last

    def resting(self) -> bool:
        """See `PushSender.resting`."""
        return True


class NodeAggregator(PushSender):
    """Sends the remote pushes of its node's workers.

    Args:
        shards: Send to the remote servers.
        carried: Its word a worker, shape (workers,), dtype int64.
        me: This worker.
        members: The workers of the node, itself included.
        packed: See `PushSender`.

    Attributes:
        messages: Messages sent, each to every remote server.
        pushes: Pushes in them.
    """

    def __init__(
        self, shards: Sequence[ShardSender], carried: np.ndarray, me: Announced,
        members: Sequence[Announced], packed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(shards, packed)
        self._carried, self._me, self._members = carried, me, members
        kind = me.grads.dtype
        self._bodies = [[np.zeros(to.shard.size, kind) for to in shards] for _ in range(BUFFERS)]
        self._begun_s: list[float | None] = [None] * BUFFERS  # when a message left
        self._took_s = [0.0] * BUFFERS  # until it was seen to have arrived
        self._first_s: float | None = None  # when a push was first seen that waits
        self.messages = self.pushes = 0

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        self._advance()
        return observe(self._carried, self._me.worker) >= seq - BUFFERS

    def send(self, seq: int) -> None:
        """See `PushSender.send`."""
        self._advance()

    def hold(self, number: int) -> bool:
        """See `PushSender.hold`.

        When all workers of the node hold, and all they announced has gone.
        """
        publish(self._me.words, HELD, number)
        held = all(observe(member.words, HELD) >= number for member in self._members)
        return not self._advance() and held

    def sent(self) -> bool:
        """See `PushSender.sent`."""
        left = self._advance()
        return super().sent() and not left

    def resting(self) -> bool:
        """See `PushSender.resting`: any worker of the node may push at any time."""
        self._advance()
        return False

    def _advance(self) -> bool:
        """Send what can be sent; returns whether a push is left that was announced."""
        ready = self._ready()
        idle = [slot for slot in range(BUFFERS) if self._idle(slot)]
        if ready and idle and (len(ready) == len(self._members) or self._waited(len(idle))):
            self._aggregate(idle[0], ready)
            self._first_s, ready = None, self._ready()
        return bool(ready)

    def _idle(self, slot: int) -> bool:
        """Return whether the last message of a slot has left; notes how long that took."""
        begun_s = self._begun_s[slot]
        if not super().writable(slot):
            return False
        if begun_s is not None:
            self._begun_s[slot], self._took_s[slot] = None, time.perf_counter() - begun_s
        return True

    def _waited(self, idle: int) -> bool:
        """Return whether what is ready has waited for the others for long enough."""
        now = time.perf_counter()
        if self._first_s is None:
            self._first_s = now
        return idle == BUFFERS and now - self._first_s >= max(self._took_s)

    def _ready(self) -> list[tuple[Announced, int]]:
        """Return the next push of each worker that has announced one."""
        following = [(m, observe(self._carried, m.worker) + 1) for m in self._members]
        return [(m, seq) for m, seq in following if observe(m.words, PUSHED) >= seq]

    def _aggregate(self, slot: int, ready: Sequence[tuple[Announced, int]]) -> None:
        rows, count = addresses_of(m.grads[seq % BUFFERS] for m, seq in ready), len(ready)
        self.messages += 1
        for to, body in zip(self._shards, self._bodies[slot], strict=True):
            weights = np.full(count, 1.0 if to.packer.sums else 1 / count)
            sum_rows(rows, weights, to.shard.range.start, body)
            headers = np.stack([member.header(seq, to.server) for member, seq in ready])
            to.send_message(slot, headers, to.packer.pack(body, self.messages, slot, count))
        self.packed += 1
        self.pushes += count
        self._begun_s[slot] = time.perf_counter()
        for member, seq in ready:
            publish(self._carried, member.worker, seq)
