"""Pushes to servers of other nodes: the worker's half.

A header announces the push and the body waits at the sender (a synchronous send) until the server
has room, so that a server's memory depends on neither the number of workers nor their speed. The
gradient's buffer is free when the send has completed.

Where there are tables, a push's rows follow its gradient (`mpips.transport.packed_rows`), also to a
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
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.atomics import observe, publish
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.layout import Shard
from mpips.mpi.start import Request
from mpips.mpi.tags import BODY_TAGS, TAG_HEADER, TAG_REST
from mpips.mpi.waiting import all_done
from mpips.mpi.window import Field, Window, transfer_pieces
from mpips.mpi.world import Cluster
from mpips.transport.push import HEADER_WORDS, ROWS_BYTES
from mpips.transport.wire import Packer, Packing

if TYPE_CHECKING:
    from mpips.transport.packed_rows import RowsPacker

BUFFERS = 2  # open pushes a worker, and open messages a node aggregator
PUSHED = 0  # word of a worker: number of pushes announced
HELD = 1  # word of a worker: number of the last cut for which it announces no more for now


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
        header[7] = self.versions[seq % BUFFERS, server]
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
    workers = cluster.roles.workers
    return {r: last[cluster.node_of[r]] if aggregate else r for r in workers}


class PushSender(ABC):
    """A worker's remote pushes. Collective: no.

    Attributes:
        packers: What packs for each remote server, where this rank sends.
        packed: Number of what they have packed, in the runs that this one continues too.
    """

    packers: Sequence[Packer] = ()
    packed = 0
    _messages: "Sequence[_Message]" = ()

    @property
    def bytes_sent(self) -> int:
        """Bytes of the bodies and headers that this rank has sent, as they were sent."""
        return sum(message.bytes_sent for message in self._messages)

    @property
    def state(self) -> dict[str, list[tuple[int, np.ndarray]]]:
        """What codecs keep between two pushes: pieces (begin, view) of vectors, by name."""
        found: dict[str, list[tuple[int, np.ndarray]]] = {}
        for packer in self.packers:
            for name, part in packer.state.items():
                found.setdefault(name, []).append((packer.shard.begin, part))
        return found

    def hold(self, cut: int) -> bool:
        """Announce nothing for now, because of a cut.

        Returns:
            Whether `state` stays as it is until a worker of this node goes on. Blocks: no; gets
            on; call it again until then.
        """
        return True

    @abstractmethod
    def writable(self, seq: int) -> bool:
        """Whether the buffer of push `seq` may be written. Blocks: no; gets on."""

    @abstractmethod
    def send(self, seq: int) -> None:
        """Send push `seq`, which is announced. Blocks: no."""

    @abstractmethod
    def empty(self) -> bool:
        """Whether nothing that this rank has to send is left. Blocks: no; gets on."""

    def resting(self) -> bool:
        """Whether nothing may have to be sent before the next `send`. Blocks: no; gets on."""
        return self.empty()


class _Message:
    """One message to each remote server, on its way or done."""

    def __init__(self, cluster: Cluster) -> None:
        self._arrays, self._bodies = cluster.arrays, cluster.bodies
        self._requests: list[Request] = []
        self._headers: list[np.ndarray] = []
        self._sent_s = 0.0
        self.took_s = 0.0  # until the last one was seen to have left
        self.bytes_sent = 0

    def send(
        self, number: int, parts: Sequence[tuple[int, np.ndarray, Sequence[np.ndarray]]]
    ) -> None:
        """Send (rank, headers, body in pieces) each. Blocks: no; leave all alone until `done`."""
        arrays, bodies, requests = self._arrays, self._bodies, []
        for rank, headers, (first, *rest) in parts:
            requests.append(arrays.begin_send(headers, rank, TAG_HEADER))
            tag = number % BODY_TAGS
            requests.append(bodies.begin_synchronous_send(first, rank, tag))
            # A tag of its own: of two bodies the later one may be seen to have come first.
            tag += TAG_REST
            requests += [arrays.begin_synchronous_send(piece, rank, tag) for piece in rest]
            self.bytes_sent += sum(part.nbytes for part in (headers, first, *rest))
        self._requests, self._headers = requests, [headers for _, headers, _ in parts]
        self._sent_s = time.perf_counter()

    def done(self) -> bool:
        """Whether it has left. Blocks: no."""
        if self._requests and all_done(self._requests):
            self._requests, self.took_s = [], time.perf_counter() - self._sent_s
        return not self._requests


def _all_left(messages: Sequence[_Message]) -> bool:
    """Whether all of these have left. Blocks: no; every one gets on."""
    left = [message.done() for message in messages]
    return all(left)


def _packers(
    packing: Packing, remote: Sequence[tuple[int, int, Shard]], me: Announced
) -> list[Packer]:
    return [Packer(packing, shard, me.grads.dtype, me.worker, BUFFERS) for *_, shard in remote]


class Direct(PushSender):
    """Each worker sends its own.

    Args:
        remote: Server number, rank and shard of each remote server with a shard; there may be none.
        me: This worker.
        packing: How bodies are packed.
        rows: Packs the rows for each of the servers; of none without tables.
    """

    def __init__(
        self,
        cluster: Cluster,
        remote: Sequence[tuple[int, int, Shard]],
        me: Announced,
        packing: Packing,
        rows: "Sequence[RowsPacker]" = (),
    ) -> None:
        self._remote, self._me, self._rows = remote, me, rows
        self._messages = [_Message(cluster) for _ in range(BUFFERS)]
        self.packers, self.packed = _packers(packing, remote, me), packing.before

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        return self._messages[seq % BUFFERS].done()

    def send(self, seq: int) -> None:
        """See `PushSender.send`."""
        me, grad = self._me, self._me.grads[seq % BUFFERS]
        parts = []
        for k, (server, rank, shard) in enumerate(self._remote):
            body = self.packers[k].pack(grad[shard.range], seq, seq % BUFFERS)
            header = me.header(seq, server)
            if self._rows:
                header[ROWS_BYTES], pieces = self._rows[k].pack_in_turn(seq)
                body = (body or [grad[shard.range]]) + pieces
            if (origin := me.origin(seq, shard)) is not None:
                body += transfer_pieces(origin)
            parts.append((rank, header[None], body))
        self.packed += 1
        self._messages[seq % BUFFERS].send(seq, parts)

    def empty(self) -> bool:
        """See `PushSender.empty`."""
        return _all_left(self._messages)


class NodeMember(PushSender):
    """A node aggregator sends them.

    Args:
        carried: The node aggregator's word a worker, shape (workers,), dtype int64.
        me: This worker.
    """

    def __init__(self, carried: np.ndarray, me: Announced) -> None:
        self._carried, self._me, self._last = carried, me, 0

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        return observe(self._carried, self._me.worker) >= seq - BUFFERS

    def send(self, seq: int) -> None:
        """See `PushSender.send`."""
        self._last = seq

    def hold(self, cut: int) -> bool:
        """See `PushSender.hold`; the node aggregator has to know."""
        publish(self._me.words, HELD, cut)
        return True

    def empty(self) -> bool:
        """See `PushSender.empty`."""
        return observe(self._carried, self._me.worker) == self._last

    def resting(self) -> bool:
        """See `PushSender.resting`."""
        return True


class NodeAggregator(PushSender):
    """Sends the remote pushes of its node's workers.

    Args:
        remote: Server number, rank and shard of each remote server with a shard.
        carried: Its word a worker, shape (workers,), dtype int64.
        me: This worker.
        members: The workers of the node, itself included.
        packing: How bodies are packed.

    Attributes:
        messages: Messages sent, each to every remote server.
        pushes: Pushes in them.
    """

    def __init__(
        self,
        cluster: Cluster,
        remote: Sequence[tuple[int, int, Shard]],
        carried: np.ndarray,
        me: Announced,
        members: Sequence[Announced],
        packing: Packing,
    ) -> None:
        self._remote, self._carried, self._me, self._members = remote, carried, me, members
        self._messages = [_Message(cluster) for _ in range(BUFFERS)]
        kind = me.grads.dtype
        self._bodies = [
            [np.zeros(shard.size, kind) for *_, shard in remote] for _ in range(BUFFERS)
        ]
        self.packers, self.packed = _packers(packing, remote, me), packing.before
        self._first_s: float | None = None  # when a push was first seen that waits
        self.messages = self.pushes = 0

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        self._advance()
        return observe(self._carried, self._me.worker) >= seq - BUFFERS

    def send(self, seq: int) -> None:
        """See `PushSender.send`."""
        self._advance()

    def hold(self, cut: int) -> bool:
        """See `PushSender.hold`.

        When all workers of the node hold, and all they announced has gone.
        """
        publish(self._me.words, HELD, cut)
        held = all(observe(member.words, HELD) >= cut for member in self._members)
        return not self._advance() and held

    def empty(self) -> bool:
        """See `PushSender.empty`."""
        left = self._advance()
        return _all_left(self._messages) and not left

    def resting(self) -> bool:
        """See `PushSender.resting`: any worker of the node may push at any time."""
        self._advance()
        return False

    def _advance(self) -> bool:
        """Send what can be sent; returns whether a push is left that was announced."""
        ready = self._ready()
        idle = [k for k, message in enumerate(self._messages) if message.done()]
        if ready and idle and (len(ready) == len(self._members) or self._waited(len(idle))):
            self._aggregate(idle[0], ready)
            self._first_s, ready = None, self._ready()
        return bool(ready)

    def _waited(self, idle: int) -> bool:
        """Whether what is ready has waited for the others for long enough."""
        now = time.perf_counter()
        if self._first_s is None:
            self._first_s = now
        longest_s = max(message.took_s for message in self._messages)
        return idle == BUFFERS and now - self._first_s >= longest_s

    def _ready(self) -> list[tuple[Announced, int]]:
        """Return the next push of each worker that has announced one."""
        following = [(m, observe(self._carried, m.worker) + 1) for m in self._members]
        return [(m, seq) for m, seq in following if observe(m.words, PUSHED) >= seq]

    def _aggregate(self, slot: int, ready: Sequence[tuple[Announced, int]]) -> None:
        rows, count = addresses_of(m.grads[seq % BUFFERS] for m, seq in ready), len(ready)
        parts = []
        self.messages += 1
        both = zip(self._bodies[slot], self.packers, strict=True)
        for (server, rank, shard), (body, packer) in zip(self._remote, both, strict=True):
            weights = np.full(count, 1.0 if packer.sums else 1 / count)
            sum_rows(rows, weights, shard.range.start, body)
            headers = np.stack([member.header(seq, server) for member, seq in ready])
            parts.append((rank, headers, packer.pack(body, self.messages, slot, count)))
        self.packed += 1
        self.pushes += len(ready)
        self._messages[slot].send(self.messages, parts)
        for member, seq in ready:
            publish(self._carried, member.worker, seq)
