"""Pushes to servers of other nodes: the worker's half.

A header announces the push. The body waits at the sender (a synchronous send) until the server has
room. So a server's memory depends on neither the number of workers nor their speed. The gradient's
buffer is free when the send has completed.

With tables, a push's rows follow its gradient (`mpips.transport.rows`), also to a server with an
empty shard.

A server may need the parameters at which a gradient was computed (`mpips.optim.staleness`). Then
the worker's replica of push ``seq`` lies in shared memory beside the gradient, for as long, and is
sent after it.

With aggregation one worker of each node, the **node aggregator**, sends for all of them. It takes
the announced gradients of its node, at most one of each worker, and averages them in one pass. Then
it frees their buffers. If a packer keeps a state, it sums them, and the packer averages. The
aggregator waits for a gradient of every worker. If no message is on its way, it waits no longer
than the last message took. So a link that is not the bottleneck delays the workers little, and a
bottleneck carries each node's gradients as one. All remote servers get the same pushes in one
message, and apply the mean at as many times the rate.

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
BUFFERS = 2  # open pushes of a worker, and open messages of a node aggregator
PUSHED = 0  # word of a worker: number of pushes announced
HELD = 1  # word of a worker: number of the last snapshot for which it holds its pushes


@dataclass(frozen=True)
class PushOptions:
    """Options of pushes from workers to servers.

    Attributes:
        inbox: Remote bodies that a server holds at a time. With 2, it receives one while it applies
            the other. At a snapshot there may be one more.
        aggregate: Whether the gradients of a node go to remote servers in one message.
        packing: Packing of messages to remote servers.
        origins: Whether the replicas at which gradients were computed are pushed as well.
        tables: Tables; every server has rows of them beside its shard.
        kept: Whether pushes are kept until they are applied, since ranks of several nodes may die
            (`mpips.transport.acknowledged`).
    """

    inbox: int = 2
    aggregate: bool = False
    packing: Packing = field(default_factory=Packing)
    origins: bool = False
    tables: Sequence[JobTable] = ()
    kept: bool = False


def worker_fields(n: int, shards: int, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a worker's segment for its pushes."""
    return (
        Field("pushed", "i8", (8,)),
        Field("headers", "i8", (BUFFERS, HEADER_WORDS)),
        Field("versions", "i8", (BUFFERS, shards)),
        Field("grads", dtype, (BUFFERS, n)),
    )


def aggregator_fields(workers: int) -> tuple[Field, ...]:
    """Return the field of a node aggregator's segment: pushes that it has sent, by worker."""
    return (Field("carried", "i8", (workers,)),)


@dataclass(frozen=True)
class Announced:
    """Headers and gradients in the segment of a worker of this node.

    Attributes:
        worker: Worker number.
        words: Words of the worker, shape (8,), dtype int64.
        headers: Headers, shape (BUFFERS, HEADER_WORDS), dtype int64.
        versions: Versions read, shape (BUFFERS, servers), dtype int64.
        grads: Gradients, shape (BUFFERS, n_params).
        origins: Parameters of the gradients, shape (BUFFERS, n_params); None if no server needs
            them.
    """

    worker: int
    words: np.ndarray
    headers: np.ndarray
    versions: np.ndarray
    grads: np.ndarray
    origins: np.ndarray | None = None

    @classmethod
    def of(cls, window: Window, worker: int, rank: int, origins: bool = False) -> "Announced":
        """Return the segment of the worker at a rank."""
        names = ("pushed", "headers", "versions", "grads", *["replicas"] * origins)
        return cls(worker, *(window.view(rank, name) for name in names))

    def header(self, seq: int, server: int) -> np.ndarray:
        """Return a copy of the header of push `seq`, with the version of one shard."""
        header = self.headers[seq % BUFFERS].copy()
        header[VERSION] = self.versions[seq % BUFFERS, server]
        return header

    def origin(self, seq: int, shard: Shard) -> np.ndarray | None:
        """Return the parameters of a push's gradient, shape (shard.size,), if servers need them."""
        return None if self.origins is None else self.origins[seq % BUFFERS, shard.range]


def aggregators(cluster: Cluster, aggregate: bool) -> dict[int, int]:
    """Return the rank that sends each worker's remote pushes: itself or its node aggregator.

    The last worker of a node is its node aggregator, since the first one also evaluates.
    """
    last = {cluster.node_of[rank]: rank for rank in cluster.roles.workers}
    return {r: last[cluster.node_of[r]] if aggregate else r for r in cluster.roles.workers}


class ShardSender:
    """Sends pushes to the server of one remote shard. Collective: no.

    Args:
        cluster: The job's ranks.
        owner: Number and rank of the server, and its shard.
        announced: Segment of the worker, or of its node aggregator.
        packing: Packing of gradients.
        rows: Packs the rows of pushes; None without tables.

    Attributes:
        server: Number of the server.
        rank: Rank that serves the shard.
        shard: The shard.
        packer: Packs gradients.
        bytes_sent: Bytes of headers and bodies.
    """

    def __init__(
        self, cluster: Cluster, owner: Owner, announced: Announced, packing: Packing,
        rows: "RowsPacker | None" = None,
    ) -> None:  # fmt: skip
        self.server, self.rank, self.shard = owner
        self.packer = Packer(packing, self.shard, announced.grads.dtype, announced.worker, BUFFERS)
        self._announced, self._rows, self._failures = announced, rows, cluster.failures
        self._begin_header = cluster.arrays.begin_send
        self._begin_body = cluster.arrays.begin_synchronous_send
        self._requests: list[list[Request]] = [[] for _ in range(BUFFERS)]
        self._headers: list[np.ndarray] = [np.zeros(0, "i8")] * BUFFERS
        self.bytes_sent = 0

    def send(self, seq: int) -> None:
        """Send push `seq`, which is announced. Blocks: no; keep its buffer until it is done."""
        announced, slot = self._announced, seq % BUFFERS
        grad, header = announced.grads[slot, self.shard.range], announced.header(seq, self.server)
        body = self.packer.pack(grad, seq, slot)
        if self._rows is not None:
            header[ROWS_BYTES], pieces = self._rows.pack_in_turn(seq)
            body = (body or [grad]) + pieces
        if (origin := announced.origin(seq, self.shard)) is not None:
            body += transfer_pieces(origin)
        self.send_message(slot, header[None], body)

    def send_message(self, slot: int, headers: np.ndarray, body: Sequence[np.ndarray]) -> None:
        """Send headers, and a body in pieces. Blocks: no; change neither until `done(slot)`."""
        begin, rank, tag = self._failures.begin_send, self.rank, tag_of(self.server, BODIES)
        sent = [begin(self._begin_header, headers, rank, tag_of(self.server, HEADERS))]
        sent += [begin(self._begin_body, piece, rank, tag) for piece in body]
        self._headers[slot] = headers
        self._requests[slot] += [request for request in sent if request is not None]
        self.bytes_sent += headers.nbytes + sum(piece.nbytes for piece in body)

    def done(self, slot: int) -> bool:
        """Return whether a buffer's push has left, or its server is dead. Blocks: no."""
        requests = self._requests[slot]
        if requests and self._failures.done(requests):
            requests.clear()
        return not requests

    def all_done(self) -> bool:
        """Return whether all buffers are done. Blocks: no; makes progress."""
        return all(self.done(slot) for slot in range(BUFFERS))


class PushSender:
    """A worker's remote pushes, which it sends itself. Collective: no.

    Args:
        shards: Senders of the remote shards; may be empty.
        packed: Number of messages that this rank packed in earlier jobs of the run.

    Attributes:
        packed: Number of messages packed so far, with those of this job.
    """

    def __init__(self, shards: Sequence[ShardSender] = (), packed: int = 0) -> None:
        self._shards, self.packed = shards, packed

    @property
    def bytes_sent(self) -> int:
        """Bytes of the bodies and headers that this rank has sent, as packed."""
        return sum(shard.bytes_sent for shard in self._shards)

    @property
    def state(self) -> dict[str, list[tuple[int, np.ndarray]]]:
        """State that codecs keep between pushes: pieces (begin, view) of vectors, by name."""
        found: dict[str, list[tuple[int, np.ndarray]]] = {}
        for sender in self._shards:
            for name, part in sender.packer.state.items():
                found.setdefault(name, []).append((sender.shard.begin, part))
        return found

    def begin_at(self, seq: int) -> None:
        """Note that pushes up to `seq` are applied, before the first one of this job."""

    def hold(self, number: int) -> bool:
        """Announce no pushes for now, because of a snapshot.

        Args:
            number: Number of the snapshot.

        Returns:
            Whether `state` stays unchanged until a worker of this node continues. Blocks: no; makes
            progress; call it again until then.
        """
        return True

    def writable(self, seq: int) -> bool:
        """Return whether the buffer of push `seq` may be written. Blocks: no; makes progress."""
        return all(shard.done(seq % BUFFERS) for shard in self._shards)

    def send(self, seq: int) -> None:
        """Send push `seq`, which is announced. Blocks: no."""
        for shard in self._shards:
            shard.send(seq)
        self.packed += 1

    def sent(self) -> bool:
        """Return whether every remote push of this rank has left. Blocks: no; makes progress."""
        return all(shard.all_done() for shard in self._shards)

    def resting(self) -> bool:
        """Return whether nothing remains to send until the next `send`. Blocks: no; progresses."""
        return self.sent()


class NodeMember(PushSender):
    """A worker whose node aggregator sends its pushes.

    Args:
        carried: The node aggregator's word for each worker, shape (workers,), dtype int64.
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
        """See `PushSender.hold`; tells the node aggregator."""
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
        shards: Senders to the remote servers.
        carried: Its word for each worker, shape (workers,), dtype int64.
        me: This worker.
        members: The workers of the node, including this one.
        packed: See `PushSender`.

    Attributes:
        messages: Number of messages, each to every remote server.
        pushes: Number of pushes in them.
    """

    def __init__(
        self, shards: Sequence[ShardSender], carried: np.ndarray, me: Announced,
        members: Sequence[Announced], packed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(shards, packed)
        self._carried, self._me, self._members = carried, me, members
        kind = me.grads.dtype
        self._bodies = [[np.zeros(to.shard.size, kind) for to in shards] for _ in range(BUFFERS)]
        self._begun_s: list[float | None] = [None] * BUFFERS  # when a message was sent
        self._took_s = [0.0] * BUFFERS  # duration until its arrival was noticed
        self._first_s: float | None = None  # when a waiting push was first seen
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

        True once all workers of the node hold, and all their announced pushes are sent.
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
        """Send a message if possible; returns whether announced pushes remain."""
        ready = self._ready()
        idle = [slot for slot in range(BUFFERS) if self._idle(slot)]
        if ready and idle and (len(ready) == len(self._members) or self._waited(len(idle))):
            self._aggregate(idle[0], ready)
            self._first_s, ready = None, self._ready()
        return bool(ready)

    def _idle(self, slot: int) -> bool:
        """Return whether the last message of a slot has left; notes its duration."""
        begun_s = self._begun_s[slot]
        if not super().writable(slot):
            return False
        if begun_s is not None:
            self._begun_s[slot], self._took_s[slot] = None, time.perf_counter() - begun_s
        return True

    def _waited(self, idle: int) -> bool:
        """Return whether the ready pushes have waited for the others for long enough."""
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
