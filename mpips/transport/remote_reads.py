"""Reads of shards across nodes; both halves.

There are two ways to read. By **Get** the worker reads the committed version, the shard, and the
begun version, one after the other; the owner only has to enter MPI. By **reply** the worker sends a
request, and the owner sends the same three by message. It sends the live shard, each chunk as it is
when it is passed to MPI; if reads are consistent, it sends a copy. In both, a read is torn, and
counted, if an update that was not committed at its start had begun by its end. Each element of a
reply is whole, as some update left it. Elements of a Get may not be: the standard leaves open how
MPI reads memory that is being written.

A link carries both directions at once only if no request waits behind bulk data of the other
direction. So a read sends its requests in two steps, `begin` before a push and `fetch` after it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpips.codecs import Codec, MessageId
from mpips.health import status_board
from mpips.kernels.atomics import observe
from mpips.layout import Shard
from mpips.mpi.start import REPLIES, Request, tag_of
from mpips.mpi.waiting import all_done
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.transport.push_sender import Owner
from mpips.transport.wire import Chunks, Packing

BEGUN, COMMITTED, CLOCK, STATE = range(4)  # words of a server's header
WINDOW = 16  # chunks of one reply passed to MPI at a time: it may keep a copy of each
LOOKS = 4  # tests of an arriving chunk: each lets MPI take more of it, 64 KB at most under MPICH


class RemoteReads:
    """A worker's reads of all remote shards, one at a time; this base class reads none.

    Collective: no.

    Args:
        owners: Server number, rank and shard of each remote server with a shard.
        servers: Number of servers.

    Attributes:
        some: Whether there is any such server.
        joined: Number of reads that joined a neighbour's fetch.
    """

    joined = 0

    def __init__(self, cluster: Cluster, owners: Sequence[Owner], servers: int) -> None:
        self._cluster, self._owners, self.some = cluster, owners, bool(owners)
        self._first = np.zeros((servers, 8), "i8")  # headers before the shards ...
        self._last = np.zeros((servers, 8), "i8")  # ... and after them
        self._out = np.zeros(0)
        self._fetched = True  # since `begin`
        self._received = 0

    @property
    def bytes_received(self) -> int:
        """Bytes of requested shards, as packed."""
        return self._received

    def begin(self, out: np.ndarray) -> None:
        """Prepare `fetch`. Blocks: for a round trip at most.

        Args:
            out: Gets the shards, shape (n_params,); do not use it until `advance` is true.
        """

    def fetch(self) -> None:
        """Request the shards. Blocks: no."""

    def advance(self) -> bool:
        """Make progress; returns whether all shards of `fetch` are here. Blocks: no.

        It is false between `begin` and `fetch`.
        """
        return True

    def cancel_wait(self) -> None:
        """Have the owners answer open requests even if they do not meet the requirement."""

    def stamped(self) -> bool:
        """Return whether the owners have sent the versions of their answers. Blocks: no."""
        return True

    def result(self, versions: np.ndarray) -> int:
        """Write the versions read, shape (servers,); returns the number of torn reads."""
        torn = 0
        for server, _, _ in self._owners:
            versions[server] = self._first[server, COMMITTED]
            torn += bool(self._last[server, BEGUN] > versions[server])
        return torn

    def clocks(self) -> list[int]:
        """Return each server's clock at the beginning of the read; not for a joined read."""
        return [int(self._first[server, CLOCK]) for server, _, _ in self._owners]


class GetReads(RemoteReads):
    """Reads by one-sided Get (MPI-4.1, 12.3), from memory that its owner may write meanwhile."""

    def __init__(
        self, cluster: Cluster, owners: Sequence[Owner], servers: int, window: Window
    ) -> None:
        super().__init__(cluster, owners, servers)
        self._window = window
        self._coming: list[Request] = []
        self._checks: list[Request] | None = []

    def _headers(self, out: np.ndarray) -> list[Request]:
        found = [self._window.get(rank, "header", out[server]) for server, rank, _ in self._owners]
        return [request for requests in found for request in requests]

    def begin(self, out: np.ndarray) -> None:
        """Read the versions, which must be known before the shards are read."""
        self._out, self._fetched = out, False
        requests = self._headers(self._first)
        self._cluster.wait(lambda: all_done(requests), status_board.SHARD)

    def fetch(self) -> None:
        """See `RemoteReads.fetch`."""
        self._checks, out = None, self._out
        found = [self._window.get(r, "params", out[shard.range]) for _, r, shard in self._owners]
        self._received += sum(out[shard.range].nbytes for *_, shard in self._owners)
        self._coming = [request for requests in found for request in requests]
        self._fetched = True

    def advance(self) -> bool:
        """See `RemoteReads.advance`."""
        if not self._fetched:
            return False
        if self._checks is None and all_done(self._coming):
            self._checks = self._headers(self._last)
        return self._checks is not None and all_done(self._checks)


@dataclass
class _ShardRequest:
    """A requested shard.

    Attributes:
        rank: Rank that serves the shard.
        requests: Receives under way: header, chunks, and the header again.
        coming: Request, message and destination of each chunk that is not unpacked yet.
        chunks: Unpacks the chunks.
        here: Whether the shard is complete.
    """

    rank: int
    requests: list[Request]
    coming: deque[tuple[Request, np.ndarray, np.ndarray]]
    chunks: Chunks
    here: bool = False


class ReplyReads(RemoteReads):
    """Reads by message, each of one version if `consistent`.

    If ranks may die, the worker requests a dead owner's shard again, from its new server.

    Args:
        codec: Codec of the replies, or None.
        needs: Returns the updates that the owners must have applied before they answer, as a tuple
            of `mpips.ps.consistency.ReadRequirement`.
        serving: Returns the rank that serves the shard of a server, given its number; by default
            the owner.
    """

    def __init__(
        self,
        cluster: Cluster,
        owners: Sequence[Owner],
        servers: int,
        consistent: bool,
        codec: Codec | None = None,
        needs: Callable[[], tuple[int, ...]] = tuple,
        serving: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(cluster, owners, servers)
        self._consistent, self._codec, self._needs = consistent, codec, needs
        self._serving = serving or {server: rank for server, rank, _ in owners}.__getitem__
        self._servers_change, self._cancelled = serving is not None, False
        self._requests: dict[int, _ShardRequest] = {}  # by server

    def begin(self, out: np.ndarray) -> None:
        """See `RemoteReads.begin`: sends no request yet."""
        self._out, self._fetched, self._requests = out, False, {}

    def fetch(self) -> None:
        """See `RemoteReads.fetch`."""
        self._cancelled, self._fetched = False, True
        status_board.fetched()
        self._requests = {server: self._ask(server, shard) for server, _, shard in self._owners}

    def _ask(self, server: int, shard: Shard) -> _ShardRequest:
        """Request a shard, and post the receives while the request is on its way."""
        out, rank, tag = self._out[shard.range], self._serving(server), tag_of(server, REPLIES)
        chunks = Chunks.of_shard(self._codec, shard.size, out.dtype)
        parts = chunks.cut(out)
        self._cluster.send(rank, "read", (server, self._consistent, *self._needs()))
        messages = [chunks.message(part) for part in parts]
        self._received += sum(message.nbytes for message in messages)
        begin, attempt = self._cluster.arrays.begin_receive, self._cluster.failures.attempt
        ends = self._first[server], self._last[server]
        comes = [attempt(begin, part, rank, tag) for part in (ends[0], *messages, ends[1])]
        requests = [request for request in comes if request is not None]  # else the server is dead
        coming = zip(requests[1:-1], messages, parts, strict=False)
        if self._cancelled:
            self._cluster.send(rank, "cancel wait")
        return _ShardRequest(rank, requests, deque(coming), chunks)

    def advance(self) -> bool:
        """See `RemoteReads.advance`."""
        for server, _, shard in self._owners if self._requests else ():
            request = self._requests[server]
            if request.here or not self._is_complete(request):
                continue
            request.here = request.rank not in self._cluster.failures.lost
            if not request.here and self._serving(server) != request.rank:
                self._requests[server] = self._ask(server, shard)
        return self._fetched and all(request.here for request in self._requests.values())

    def _is_complete(self, request: _ShardRequest) -> bool:
        """Unpack arrived chunks; returns whether all have arrived, or their owner is dead."""
        failures, looks = self._cluster.failures, LOOKS
        while request.coming and looks:
            looks -= 1
            if failures.attempt(request.coming[0][0].Test) is True:
                _, message, chunk = request.coming.popleft()
                request.chunks.unpack(message, chunk)
                looks = LOOKS
        if request.coming and request.rank not in failures.lost:
            return False
        return failures.done([*request.requests])  # a copy: `stamped` needs the whole list

    def stamped(self) -> bool:
        """See `RemoteReads.stamped`; false if servers may change, and with them versions."""
        if self._servers_change or not self._requests:
            return False
        return all_done([request.requests[0] for request in self._requests.values()])

    def cancel_wait(self) -> None:
        """See `RemoteReads.cancel_wait`."""
        self._cancelled = True
        for request in self._requests.values():
            self._cluster.send(request.rank, "cancel wait")


class _Reply:
    """A reply under way: header, shard, and the header at the time when the shard has left."""

    def __init__(
        self, of: "Replies", ranks: Sequence[int], params: np.ndarray, message_id: MessageId
    ) -> None:
        self._of, self._ranks, self._message_id = of, ranks, message_id
        self._chunks, self._live = of.chunks.cut(params), params is of.params
        self._next = 0  # first chunk that is not sent yet
        self._sending: deque[tuple[list[Request], np.ndarray]] = deque()
        self._closing = False
        self._send(of.words())

    def _send(self, part: np.ndarray) -> None:
        cluster = self._of.cluster
        begin, send = cluster.arrays.begin_send, cluster.failures.begin_send
        sent = [send(begin, part, rank, self._of.tag) for rank in self._ranks]
        requests = [request for request in sent if request is not None]  # else the worker is dead
        self._sending.append((requests, part))  # keeps the memory until it is sent

    def done(self, versions: np.ndarray | None = None) -> bool:
        """Make progress; returns whether all has left. `versions` are sent last. Blocks: no."""
        packing = self._of.chunks
        while self._room() and self._next < len(self._chunks):
            begin = self._message_id.begin + self._next * packing.step
            message_id = replace(self._message_id, begin=begin)
            self._send(packing.pack(self._chunks[self._next], message_id, self._live))
            self._next += 1
        if self._next < len(self._chunks) or self._room() < WINDOW:
            return False
        if not self._closing:  # the shard has left
            self._closing = True
            self._send(self._of.words() if versions is None else versions)
        return self._room() == WINDOW

    def _room(self) -> int:
        """Return the number of chunks that may be passed to MPI now."""
        while self._sending and self._of.cluster.failures.done(self._sending[0][0]):
            self._sending.popleft()
        return WINDOW - len(self._sending)


class Replies:
    """A server's half: answers requests. Collective: no.

    Args:
        header: Header of this server, shape (8,), dtype int64.
        params: Its shard, shape (shard.size,).
        shard: Range of the shard.
        server: Number of the server.
        packing: Packing of replies.

    Attributes:
        cluster: The job's ranks.
        chunks: Chunks of the shard.
        params: As given.
        tag: Tag of the messages.
    """

    def __init__(
        self,
        cluster: Cluster,
        header: np.ndarray,
        params: np.ndarray,
        shard: Shard,
        server: int,
        packing: Packing,
    ) -> None:
        self.cluster, self._header, self.params = cluster, header, params
        self.chunks = Chunks.of_shard(packing.codec, shard.size, params.dtype)
        self._begin, self._packing, self._server, self._count = shard.begin, packing, server, 0
        self._relaxed: list[_Reply] = []
        self._copied: _Reply | None = None
        self._copied_header = np.zeros(8, "i8")
        self._waiting: list[int] = []
        self.tag = tag_of(server, REPLIES)

    def words(self) -> np.ndarray:
        """Return a copy of the header."""
        found = np.zeros(8, "i8")
        for word in (BEGUN, COMMITTED, CLOCK):
            found[word] = observe(self._header, word)
        return found

    def ask(self, rank: int, consistent: bool) -> None:
        """Note a remote worker's request. Blocks: no; call it between two updates.

        Args:
            rank: Rank of the worker.
            consistent: Whether the reply must be of one version.
        """
        if consistent:
            self._waiting.append(rank)
        else:
            self._relaxed.append(self._reply([rank], self.params))
            self.serve()

    def _reply(self, ranks: Sequence[int], params: np.ndarray) -> _Reply:
        self._count += 1
        p = self._packing
        # Source numbers of workers begin at 0, so no push has the same random numbers as a reply.
        message_id = MessageId(p.seed, -1 - self._server, p.before + self._count, self._begin)
        return _Reply(self, ranks, params, message_id)

    def serve(self, between: bool = True) -> None:
        """Progress the replies; one copy at a time, to all workers that wait. Blocks: no.

        Args:
            between: Whether this is between two updates: only then is a copy of one version.
        """
        if self._relaxed:
            self._relaxed = [reply for reply in self._relaxed if not reply.done()]
        if self._copied is not None and self._copied.done(self._copied_header):
            self._copied = None
        if between and self._waiting and self._copied is None:
            self._copied_header = self.words()
            self._copied = self._reply(self._waiting, self.params.copy())
            self._waiting = []
