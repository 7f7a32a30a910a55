"""Pushes to servers of other nodes where ranks may die: they are kept until they are applied.

As in `mpips.transport.push_sender` a header announces a push, and the body waits at the sender
until the server has room. But a worker's buffer is free only when every remote server has said that
the push is in its ledger: a send that is complete says nothing of bytes that were on their way when
a process died. So whatever of a push some remote shard is without lies in the memory of its
worker's node, with the word that announces it, and any rank there can send it again (`Sending`).

When a worker dies, a server drops what has come of it in part, and has a rank of its node send all
that it announced and the shard's ledger is without (`mpips.failover.resending`). A push may so come
twice. The ledger says which, and the second is dropped.

When a server dies and another one of its node takes its shard over (`mpips.failover.takeover`),
that one says to each remote worker how many of its pushes are applied. A worker that hears that of
another rank than before sends there from now on, and again what the shard is without.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpips.kernels.atomics import observe
from mpips.layout import Shard
from mpips.mpi.messages import begin_receive_found
from mpips.mpi.start import Request
from mpips.mpi.tags import TAG_APPLIED, TAG_KEPT
from mpips.mpi.window import transfer_pieces
from mpips.mpi.world import Cluster
from mpips.transport.push import HEADER_WORDS, Push
from mpips.transport.push_receiver import Arrival
from mpips.transport.push_sender import BUFFERS, PUSHED, Announced, PushSender
from mpips.transport.wire import Packer, Packing, Unpacker

HEADERS, BODIES, REPLIES = range(3)  # what a shard's tags are of
SHARDS_MAX = 4096  # shards with tags of their own
APPLIED_WORDS = 2  # number of the server, and pushes of this worker


def tag_of(server: int, what: int) -> int:
    """Return the tag of HEADERS, BODIES or REPLIES of a server's shard."""
    return TAG_KEPT + 3 * (server % SHARDS_MAX) + what


class Sending:
    """Sends one worker's pushes for one remote shard, from where they lie. Collective: no.

    Args:
        cluster: The job's ranks.
        server: Number of the server.
        rank: Of it.
        shard: Its shard.
        of: The worker, of this node, dead or alive.
        packing: How bodies are packed, without a state.

    Attributes:
        bytes_sent: Of headers and bodies.
    """

    def __init__(
        self, cluster: Cluster, server: int, rank: int, shard: Shard, of: Announced,
        packing: Packing,
    ) -> None:  # fmt: skip
        self._cluster, self._server, self._rank, self._of = cluster, server, rank, of
        self._shard = shard
        self._packer = Packer(packing, shard, of.grads.dtype, of.worker, BUFFERS)
        self._requests: list[list[Request]] = [[] for _ in range(BUFFERS)]
        self._headers: list[np.ndarray] = [np.zeros(0, "i8")] * BUFFERS
        self._before: set[int] = set()
        self._unsent: list[list[Request]] = []  # to those, who may never take it
        self.bytes_sent = 0

    @property
    def rank(self) -> int:
        """Of who serves the shard."""
        return self._rank

    def follow(self, rank: int, got: int) -> None:
        """Send to another rank, if it is one that has taken the shard over; what is open, again.

        Args:
            rank: That has said so.
            got: How many pushes are applied.
        """
        if rank == self._rank or rank in self._before:
            return
        self._before.add(self._rank)
        self._rank = rank
        self._unsent += self._requests
        self._requests = [[] for _ in range(BUFFERS)]
        for seq in range(got + 1, observe(self._of.words, PUSHED) + 1):
            self.send(seq)

    def send(self, seq: int) -> None:
        """Send push `seq`, which is announced. Blocks: no; its buffer is to stay as it is."""
        slot, arrays = seq % BUFFERS, self._cluster.arrays
        self._headers[slot] = header = self._of.header(seq, self._server)
        body = self._packer.pack(self._of.grads[slot, self._shard.range], seq, slot)
        begin, tag = self._cluster.failures.begin_send, tag_of(self._server, BODIES)
        sent = [begin(arrays.begin_send, header, self._rank, tag_of(self._server, HEADERS))]
        sent += [begin(arrays.begin_send, piece, self._rank, tag) for piece in body]
        self._requests[slot] += [request for request in sent if request is not None]
        self.bytes_sent += header.nbytes + sum(piece.nbytes for piece in body)

    def done(self, slot: int) -> bool:
        """Whether what was sent from a buffer has left, or nobody waits for it. Blocks: no."""
        return self._cluster.failures.done(self._requests[slot])

    def all_done(self) -> bool:
        """Whether that holds for all buffers. Blocks: no; every one gets on."""
        left = [self.done(slot) for slot in range(BUFFERS)]
        return all(left)


class AcknowledgedPushSender(PushSender):
    """A worker's pushes; see `mpips.transport.push_sender.PushSender`. Collective: no.

    Args:
        cluster: The job's ranks.
        remote: Server number, rank and shard of each remote server with a shard.
        me: This worker.
        packing: How bodies are packed.
    """

    def __init__(
        self,
        cluster: Cluster,
        remote: Sequence[tuple[int, int, Shard]],
        me: Announced,
        packing: Packing,
    ) -> None:
        self._cluster = cluster
        self._shards: dict[int, Sending] = {}
        for server, rank, shard in remote:
            self._shards[server] = Sending(cluster, server, rank, shard, me, packing)
        self._told = dict.fromkeys(self._shards, 0)

    @property
    def bytes_sent(self) -> int:
        """See `PushSender.bytes_sent`."""
        return sum(sending.bytes_sent for sending in self._shards.values())

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        self._hear()
        if any(told < seq - BUFFERS for told in self._told.values()):
            return False
        left = [sending.done(seq % BUFFERS) for sending in self._shards.values()]
        return all(left)

    def send(self, seq: int) -> None:
        """See `PushSender.send`."""
        for sending in self._shards.values():
            sending.send(seq)

    def empty(self) -> bool:
        """See `PushSender.empty`."""
        self._hear()
        left = [sending.all_done() for sending in self._shards.values()]
        return all(left)

    def serving(self, server: int) -> int:
        """Return the rank that serves a remote shard, as far as this rank has heard."""
        self._hear()
        return self._shards[server].rank

    def _hear(self) -> None:
        """Note what remote servers say that they have applied."""
        for source, rows in self._cluster.arrays.rows(TAG_APPLIED, APPLIED_WORDS):
            for server, count in rows.tolist():
                self._told[server] = max(self._told[server], count)
                self._shards[server].follow(source, count)


@dataclass(eq=False)
class _Coming:
    """A body that is being received, or is here.

    Attributes:
        source: Rank that sends it.
        header: Of its push, shape (HEADER_WORDS,), dtype int64.
        place: Where it comes to.
        requests: What has to complete.
        failed: Whether its sender has died before.
    """

    source: int
    header: np.ndarray
    place: np.ndarray
    requests: list[Request]
    failed: bool = False


class AcknowledgedPushReceiver:
    """A server's remote pushes; see `mpips.transport.push_receiver.PushReceiver`. Collective: no.

    Bodies are received when a probe finds them, so that nothing listens to all ranks. In a cut, it
    may hold more of them than there are places for: two of each worker at most.

    Args:
        cluster: The job's ranks.
        server: Number of the server.
        size: Elements of the shard.
        dtype: Of the gradients.
        applied: The shard's ledger, shape (workers,); read here, written by the store.
        arrival: How pushes come.
    """

    def __init__(
        self,
        cluster: Cluster,
        server: int,
        size: int,
        dtype: str,
        applied: np.ndarray,
        arrival: Arrival,
    ) -> None:
        self._cluster, self._server, self._applied = cluster, server, applied
        self._unpacker = Unpacker(arrival.codec, size, dtype)
        self._free = [self._unpacker.place() for _ in range(arrival.places if size else 0)]
        self._places = len(self._free)
        self._announced: dict[int, deque[np.ndarray]] = {}  # and not begun to receive, by sender
        self._coming: list[_Coming] = []
        self._lent: _Coming | None = None
        self._telling: list[tuple[list[Request], np.ndarray]] = []

    @property
    def bodies(self) -> int:
        """Number of bodies that are here, or of which a part is, and are not yet taken."""
        return len(self._coming)

    def attend(self, limit: np.ndarray | None, fetch: bool) -> None:
        """Get on; see `mpips.transport.push_receiver.PushReceiver.attend`. Blocks: no."""
        for source, rows in self._cluster.arrays.rows(tag_of(self._server, HEADERS), HEADER_WORDS):
            if source not in self._cluster.failures.lost:
                self._announced.setdefault(source, deque()).extend(rows)
        for source in list(self._announced) if fetch else ():
            self._receive_from(source, limit)

    def _receive_from(self, source: int, limit: np.ndarray | None) -> None:
        """Begin to receive what a rank has announced, as far as there is room, or it is due."""
        headers = self._announced.pop(source)
        while headers and (self._free or limit is not None):
            if limit is not None and not any(seq <= limit[w] for w, seq, *_ in headers):
                break
            tag = tag_of(self._server, BODIES)
            found = self._cluster.arrays.find(source, tag)
            if found is None:
                break
            place = self._free.pop() if self._free else self._unpacker.place()
            first, *rest = transfer_pieces(place)
            requests = [begin_receive_found(found, first)]
            requests += [self._cluster.arrays.begin_receive(p, source, tag) for p in rest]
            self._coming.append(_Coming(source, headers.popleft(), place, requests))
        if headers:
            self._announced[source] = headers  # behind the others: each has its turn

    def take(self, limit: np.ndarray | None = None) -> Push | None:
        """Return the next push of a worker that is here; it is lent until `give_back`.

        Args:
            limit: Return only those up to ``seq <= limit[worker]``, shape (workers,).
        """
        for body in list(self._coming):
            worker, seq = body.header[:2].tolist()
            following = observe(self._applied, worker) + 1
            if seq > following or (limit is not None and following > limit[worker]):
                continue
            if not self._is_here(body):
                continue
            self._coming.remove(body)
            if seq < following:  # it has come twice
                self._free_place(body)
                continue
            self._lent = body
            return Push.unpack(body.header, self._unpacker.unpack(body.place))
        return None

    def give_back(self) -> None:
        """Free the place of the push taken last, which is applied, and tell its worker."""
        body, self._lent = self._lent, None
        if body is None:
            return
        self._free_place(body)
        worker = int(body.header[0])
        if self._cluster.roles.workers[worker] == body.source:
            self._tell(worker, int(body.header[1]))

    def tell_all(self) -> None:
        """Tell the workers of other nodes what is applied, and so who serves the shard."""
        for worker, rank in enumerate(self._cluster.roles.workers):
            if self._places and not self._cluster.is_local(rank):
                self._tell(worker, observe(self._applied, worker))

    def _tell(self, worker: int, count: int) -> None:
        rank, word = self._cluster.roles.workers[worker], np.array([self._server, count])
        begin = self._cluster.arrays.begin_send
        sent = self._cluster.failures.begin_send(begin, word, rank, TAG_APPLIED)
        self._telling = [told for told in self._telling if not self._done(told)]
        if sent is not None:
            self._telling.append(([sent], word))

    def lose(self, rank: int) -> None:
        """Drop what has come in part of a rank that has died."""
        self._announced.pop(rank, None)
        whole = True
        for body in [body for body in self._coming if body.source == rank]:
            whole = whole and self._is_here(body)
            if not whole:  # nothing behind it may be applied before it comes again
                self._coming.remove(body)
                body.place = self._unpacker.place()  # MPI may still write to the other
                self._free_place(body)

    def received(self, worker: int) -> int:
        """Return how many pushes of a worker are applied, or here."""
        count = observe(self._applied, worker)
        here = [b.header[1] for b in self._coming if b.header[0] == worker and self._is_here(b)]
        while count + 1 in here:
            count += 1
        return count

    def close(self) -> None:
        """Wait until nothing is under way. Blocks: until then."""
        self._cluster.wait(lambda: all(map(self._done, self._telling)))

    def _done(self, told: tuple[list[Request], np.ndarray]) -> bool:
        return self._cluster.failures.done(told[0])

    def _is_here(self, body: _Coming) -> bool:
        """Whether a body is complete; one of a rank that has died meanwhile never is."""
        while body.requests and not body.failed:
            tested = self._cluster.failures.attempt(body.requests[0].Test)
            body.failed = tested is None
            if not tested:
                return False
            body.requests.pop(0)
        return not body.failed

    def _free_place(self, body: _Coming) -> None:
        if len(self._free) < self._places:
            self._free.append(body.place)
