"""Gradients on their way from a worker to the servers; both halves of the protocol.

On a node the gradient stays where the worker computed it, in one of two buffers of shared
memory: the worker fills buffer ``seq % 2``, writes the push's description beside it and
publishes ``seq``; each server applies its slice of it there and publishes ``applied[worker]``;
the buffer is free once every near server has applied it.

To another node a header announces the push and the body waits at the sender (a synchronous
send) until the server has room in a pool of fixed size, so that a server's memory depends on
neither the number of workers nor their speed. Each place in the pool is a receive posted to
whoever sends first: the MPI library matches it and lets the body come as soon as it is announced,
without waiting for the server's loop. The buffer is free when the send has completed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpips.cluster import Cluster, all_done
from mpips.kernels import observe, publish
from mpips.layout import Shard
from mpips.ledger import Range
from mpips.window import Field, Window, transfer_pieces

TAG_HEADER, TAG_REST = 2, 3
BODY_TAGS = 1 << 14  # a body's tag is the push's number modulo this; MPI promises 32767 tags
BUFFERS = 2  # open pushes a worker
HEADER_WORDS = 8  # worker, seq, epoch, begin, end, samples, loss (its bits), version read
PUSHED = 0  # header word of a worker: number of pushes announced


@dataclass(frozen=True)
class Push:
    """One worker's gradient for one shard, as a server takes it.

    Attributes:
        worker: Worker number.
        seq: Number of the push, 1 for a worker's first.
        batch: The batch that it was computed from.
        samples: Samples in the batch.
        loss: Mean loss over the batch.
        version: Version of this shard that the worker had read.
        grad: Gradient of the shard, shape (shard.size,).
    """

    worker: int
    seq: int
    batch: Range
    samples: int
    loss: float
    version: int
    grad: np.ndarray

    @classmethod
    def unpack(cls, words: np.ndarray, grad: np.ndarray) -> "Push":
        """Build a push from its header, shape (HEADER_WORDS,), dtype int64."""
        worker, seq, epoch, begin, end, samples, _, version = words.tolist()
        loss = float(words[6:7].view("f8")[0])
        return cls(worker, seq, (epoch, begin, end), samples, loss, version, grad)


def worker_fields(n: int, shards: int, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a worker's segment that carry its pushes."""
    return (
        Field("pushed", "i8", (8,)),
        Field("headers", "i8", (BUFFERS, HEADER_WORDS)),
        Field("versions", "i8", (BUFFERS, shards)),
        Field("grads", dtype, (BUFFERS, n)),
    )


class Sender:
    """A worker's half of the channel. Collective: no."""

    def __init__(
        self, cluster: Cluster, window: Window, worker_id: int, shards: Sequence[Shard]
    ) -> None:
        self._cluster, self._worker, self._shards = cluster, worker_id, shards
        self._words = window.view(cluster.rank, "pushed")
        self._headers = window.view(cluster.rank, "headers")
        self._versions = window.view(cluster.rank, "versions")
        self._grads = window.view(cluster.rank, "grads")
        owners = [(k, r) for k, r in enumerate(cluster.roles.servers) if shards[k].size]
        self._near = [window.view(r, "applied") for k, r in owners if cluster.near(r)]
        self._far = [(k, r) for k, r in owners if not cluster.near(r)]
        self._sends: list[list[MPI.Request]] = [[] for _ in range(BUFFERS)]
        self._sent: list[np.ndarray] = [np.zeros((0, HEADER_WORDS), "i8")] * BUFFERS
        self.seq = 0

    def buffer(self, seq: int) -> np.ndarray:
        """Return the gradient buffer of push `seq`, shape (n,)."""
        return self._grads[seq % BUFFERS]

    def writable(self, seq: int) -> bool:
        """Whether the buffer of push `seq` may be written: its last push has left it."""
        last = seq - BUFFERS
        if any(observe(applied, self._worker) < last for applied in self._near):
            return False
        return all_done(self._sends[seq % BUFFERS])

    def push(self, batch: Range, samples: int, loss: float, versions: np.ndarray) -> int:
        """Announce the gradient in ``buffer(seq + 1)``. Blocks: no.

        Args:
            batch: The batch that it was computed from.
            samples: Samples in the batch.
            loss: Mean loss over the batch.
            versions: Version read of each shard, shape (shards,), dtype int64.

        Returns:
            The push's number.
        """
        self.seq += 1
        slot = self.seq % BUFFERS
        header = self._headers[slot]
        header[:6] = (self._worker, self.seq, *batch, samples)
        header[6:7].view("f8")[0] = loss
        self._versions[slot] = versions
        publish(self._words, PUSHED, self.seq)
        if self._far:
            self._send_far(slot)
        return self.seq

    def _send_far(self, slot: int) -> None:
        comm, grad = self._cluster.comm, self._grads[slot]
        headers = np.repeat(self._headers[slot][None], len(self._far), axis=0)
        requests = []
        for header, (k, rank) in zip(headers, self._far, strict=True):
            header[7] = self._versions[slot, k]
            requests.append(comm.Isend(header, rank, TAG_HEADER))
            first, *rest = transfer_pieces(grad[self._shards[k].range])
            requests.append(self._cluster.bodies.Issend(first, rank, self.seq % BODY_TAGS))
            requests += [comm.Issend(piece, rank, TAG_REST) for piece in rest]
        self._sends[slot], self._sent[slot] = requests, headers  # alive until sent

    def sent(self) -> bool:
        """Whether every far push has left."""
        return all(all_done(requests) for requests in self._sends)


@dataclass(eq=False)
class _Body:
    """A place in the pool that is being filled, or is full.

    Attributes:
        grad: The place, shape (shard.size,).
        requests: What has to complete; the first piece, of whoever sends it, at first.
        status: Of the first piece.
        key: Worker and tag, once the first piece is here.
        withdrawn: Whether the receive was cancelled.
    """

    grad: np.ndarray
    requests: list[MPI.Request]
    status: MPI.Status
    key: tuple[int, int] | None = None
    withdrawn: bool = False


class Receiver:
    """A server's half of the channel. Collective: no.

    Args:
        applied: The server's ledger, shape (workers,); read here, written by the store.
        inbox: Far bodies held at a time; with 2, one is received while the other is applied.
    """

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        server_id: int,
        shard: Shard,
        dtype: str,
        applied: np.ndarray,
        inbox: int,
    ) -> None:
        self._cluster, self._server, self._shard, self._applied = cluster, server_id, shard, applied
        workers = cluster.roles.workers
        near, view = [(w, r) for w, r in enumerate(workers) if cluster.near(r)], window.view
        self._near: deque[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = deque(
            (w, view(r, "pushed"), view(r, "headers"), view(r, "versions"), view(r, "grads"))
            for w, r in near
        )
        self._far = {r: w for w, r in enumerate(workers) if not cluster.near(r)}
        room = inbox if self._far and shard.size else 0
        self._free = [np.zeros(shard.size, dtype) for _ in range(room)]
        self._far_first = False
        self._headers: dict[tuple[int, int], np.ndarray] = {}
        self._posted: list[_Body] = []
        self._bodies: list[_Body] = []
        self._lent: np.ndarray | None = None

    @property
    def bodies(self) -> int:
        """Number of far bodies that are, or may yet be, received, and are not yet taken."""
        return len(self._posted) + len(self._bodies)

    def take(self, limit: np.ndarray | None = None, fetch: bool = True) -> Push | None:
        """Return the next push, or None if none is here. Blocks: no.

        The push before it must have been applied: its memory is given back by this call.

        Args:
            limit: Take pushes up to ``seq <= limit[worker]`` only, shape (workers,).
            fetch: Whether more far bodies may be fetched into the pool, near pushes taken.
        """
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None
        if not self._shard.size:
            return None
        if self._far:
            self._attend(limit, fetch)
        self._far_first = not self._far_first  # in turn, so that neither side starves
        if self._far_first:
            return self._take_far() or (self._take_near(limit) if fetch else None)
        return (self._take_near(limit) if fetch else None) or self._take_far()

    def close(self) -> None:
        """Take back the receives that are posted. Blocks: until MPI has let them go."""
        self._withdraw()
        self._cluster.wait(lambda: not self._settle())

    def _take_near(self, limit: np.ndarray | None) -> Push | None:
        for _ in range(len(self._near)):
            worker, words, headers, versions, grads = self._near[0]
            self._near.rotate(-1)  # in turn, so that no worker waits for ever
            seq = observe(self._applied, worker) + 1
            if observe(words, PUSHED) < seq or (limit is not None and seq > limit[worker]):
                continue
            header = headers[seq % BUFFERS].copy()
            header[7] = versions[seq % BUFFERS, self._server]
            return Push.unpack(header, grads[seq % BUFFERS, self._shard.range])
        return None

    def _attend(self, limit: np.ndarray | None, fetch: bool) -> None:
        """Get on with far pushes: headers, bodies that have come, room for more."""
        comm, status = self._cluster.comm, MPI.Status()
        while (found := comm.Improbe(MPI.ANY_SOURCE, TAG_HEADER, status)) is not None:
            header = np.empty(HEADER_WORDS, "i8")
            found.Recv(header)
            self._headers[int(header[0]), int(header[1]) % BODY_TAGS] = header
        self._settle()
        if not fetch:
            self._withdraw()
        elif limit is None:
            while self._free:
                self._post(MPI.ANY_SOURCE)
        else:
            self._post_up_to(limit)

    def _post(self, source: int) -> None:
        grad, status = self._free.pop(), MPI.Status()
        first = transfer_pieces(grad)[0]
        request = self._cluster.bodies.Irecv(first, source, MPI.ANY_TAG)
        self._posted.append(_Body(grad, [request], status))

    def _post_up_to(self, limit: np.ndarray) -> None:
        """Make room for pushes up to `limit`, one at a time: others might fill the pool."""
        if self.bodies:
            return
        for rank, worker in self._far.items():
            if observe(self._applied, worker) < limit[worker]:
                self._post(rank)
                return

    def _withdraw(self) -> None:
        for body in self._posted:
            if not body.withdrawn:
                body.requests[0].Cancel()  # a body that is on its way comes none the less
                body.withdrawn = True

    def _settle(self) -> bool:
        """Sort out the posted receives that are complete; returns whether any is left."""
        waiting = []
        for body in self._posted:
            if not body.requests[0].Test(body.status):
                waiting.append(body)
            elif body.status.Is_cancelled():
                self._free.append(body.grad)
            else:
                rank = body.status.Get_source()
                body.key = self._far[rank], body.status.Get_tag()
                rest = transfer_pieces(body.grad)[1:]
                body.requests = [self._cluster.comm.Irecv(p, rank, TAG_REST) for p in rest]
                self._bodies.append(body)
        self._posted = waiting
        return bool(waiting)

    def _take_far(self) -> Push | None:
        for body in self._bodies:
            header = self._headers.get(body.key) if body.key else None
            if header is None or not all_done(body.requests):
                continue
            if header[1] != observe(self._applied, int(header[0])) + 1:
                continue  # an earlier body of this worker is still coming
            self._bodies.remove(body)
            del self._headers[int(header[0]), int(header[1]) % BODY_TAGS]
            self._lent = body.grad
            return Push.unpack(header, body.grad)
        return None
