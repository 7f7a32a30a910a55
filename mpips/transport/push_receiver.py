"""Pushes from workers of other nodes: the server's half.

A pool of fixed size holds the bodies of pushes. A header announces each body. When a place is free,
a probe finds the sender's next body as soon as MPI has heard of it, and the server receives it. A
packed body is unpacked when the server takes it, into one vector a server. Its place is then free
at once, unless it also holds the parameters of the gradient.

At a snapshot a server continues up to certain pushes (see `mpips.ps.server`). Bodies that must wait
may be ahead of them, so the pool has one more place then.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.atomics import observe
from mpips.mpi.collectives import begin_receive_found
from mpips.mpi.start import BODIES, HEADERS, Request, tag_of
from mpips.mpi.window import transfer_pieces
from mpips.mpi.world import Cluster
from mpips.transport.push import HEADER_WORDS, ROWS_BYTES, Push
from mpips.transport.push_sender import PushOptions, aggregators
from mpips.transport.wire import Unpacker

if TYPE_CHECKING:
    from mpips.transport.rows import RowsUnpacker

LOOKS = 8  # tests of an arriving body: each lets MPI take more of it
IN_TURN = 6  # pieces of a body requested at a time
Place = tuple[np.ndarray, ...]


@dataclass(eq=False)
class Body:
    """A body that is being received, or is complete.

    Attributes:
        source: Rank of the sender.
        headers: Headers of the pushes in it, shape (workers, HEADER_WORDS), dtype int64.
        place: Memory for the message: shape (shard.size,) of the gradients' dtype, or the bytes of
            a packed message. A second array holds the parameters of the gradient or the push's
            rows, if servers need them.
        requests: Requests under way.
        rest: Pieces that are not requested yet.
        failed: Whether its sender died before the body was complete.
    """

    source: int
    headers: np.ndarray
    place: Place
    requests: list[Request]
    rest: list[np.ndarray]
    failed: bool = False


def _rows_unpacker(
    options: PushOptions, servers: int, server: int, dtype: str
) -> "RowsUnpacker | None":
    if not options.tables:
        return None
    from mpips.transport.rows import RowsUnpacker

    return RowsUnpacker(options.tables, servers, server, dtype, options.packing.codec)


class PushReceiver:
    """A server's remote pushes. Collective: no.

    Args:
        cluster: The job's ranks.
        server: Number of the server.
        size: Elements of the shard.
        dtype: dtype of the gradients.
        applied: The shard's ledger, shape (workers,); the store writes it.
        options: Options of pushes.
    """

    def __init__(
        self, cluster: Cluster, server: int, size: int, dtype: str, applied: np.ndarray,
        options: PushOptions,
    ) -> None:  # fmt: skip
        self._cluster, self._server, self._applied = cluster, server, applied
        self._unpacker = Unpacker(options.packing.codec, size, dtype)
        self._rows = _rows_unpacker(options, len(cluster.roles.servers), server, dtype)
        self._workers: dict[int, list[int]] = {}  # workers for which each rank sends
        sender = aggregators(cluster, options.aggregate)
        for worker, rank in enumerate(cluster.roles.workers):
            if not cluster.is_local(rank):
                self._workers.setdefault(sender[rank], []).append(worker)
        self._origins = np.zeros((int(options.origins), size), dtype)
        self._places = options.inbox if self._workers and (size or options.tables) else 0
        self._more_places = 1  # additional places at a snapshot
        self._free = [self._make_place() for _ in range(self._places)]
        self._announced: dict[int, deque[np.ndarray]] = {}  # not yet begun, by sender
        self._bodies: list[Body] = []
        self._in_use: Place | None = None

    def _make_place(self) -> Place:
        place = [self._unpacker.place(), *np.zeros_like(self._origins)]
        return tuple(place if self._rows is None else [*place, self._rows.place()])

    @property
    def bodies(self) -> int:
        """Number of bodies that are here or arriving, and not yet taken."""
        return len(self._bodies)

    def attend(self, limit: np.ndarray | None, fetch: bool) -> None:
        """Progress: receive headers and arriving bodies, and begin further ones. Blocks: no.

        Args:
            limit: Begin bodies only of senders with pushes ``seq <= limit[worker]``, shape
                (workers,).
            fetch: Whether to begin bodies at all.
        """
        tag = tag_of(self._server, HEADERS)
        for source, headers in self._cluster.arrays.rows(tag, HEADER_WORDS):
            if source not in self._cluster.failures.lost:
                self._announced.setdefault(source, deque()).append(headers)
        for body in self._bodies:
            for _ in range(LOOKS):
                if self._is_here(body):
                    break
        for source in list(self._announced) if fetch else ():
            if not self._has_room(limit):
                break
            self._receive_from(source, limit)

    def _receive_from(self, source: int, limit: np.ndarray | None) -> None:
        """Begin to receive the announced bodies of a rank that are due, while places are free."""
        headers = self._announced.pop(source)
        while headers and self._has_room(limit):
            if not self._is_due(source, headers, limit) or not self._begin(source, headers[0]):
                break
            headers.popleft()
        if headers:
            self._announced[source] = headers  # after the others: each sender has its turn

    def _has_room(self, limit: np.ndarray | None) -> bool:
        """Return whether a further body may be received now; see `attend`."""
        places = self._places + (0 if limit is None else self._more_places)
        return len(self._bodies) + (self._in_use is not None) < places

    def _begin(self, source: int, headers: np.ndarray) -> bool:
        """Begin to receive a body if it is arriving and all of the last one is; returns whether.

        If two bodies shared the link, both would end at the same time, and the link would be idle
        then.
        """
        if any(body.rest for body in self._bodies if body.source == source):
            return False
        found = self._cluster.arrays.find(source, tag_of(self._server, BODIES))
        if found is None:
            return False
        place = self._free.pop() if self._free else self._make_place()
        first, *rest = transfer_pieces(place[0]) or [place[0]]
        if self._rows is not None:
            rest += self._rows.pieces(place[1][: headers[0, ROWS_BYTES]])
        elif len(place) > 1:
            rest += transfer_pieces(place[1])
        body = Body(source, headers, place, [begin_receive_found(found, first)], rest)
        self._bodies.append(body)
        self._is_here(body)
        return True

    def _is_due(self, source: int, headers: Sequence[np.ndarray], limit: np.ndarray | None) -> bool:
        """Return whether a rank has pushes up to `limit` to send, perhaps after others.

        Args:
            source: The rank.
            headers: Headers that it has announced.
            limit: See `attend`.
        """
        if limit is None:
            return True
        return any(observe(self._applied, w) < limit[w] for w in self._workers[source])

    def _is_here(self, body: Body) -> bool:
        """Request more of a body; returns whether it is complete. A dead rank's never is."""
        attempt = self._cluster.failures.attempt
        begin, tag = self._cluster.arrays.begin_receive, tag_of(self._server, BODIES)
        while not body.failed:
            while body.rest and len(body.requests) < IN_TURN and not body.failed:
                request = attempt(begin, body.rest.pop(0), body.source, tag)
                body.failed = request is None
                body.requests += [] if request is None else [request]
            if not body.requests:
                break
            tested = attempt(body.requests[0].Test)
            body.failed |= tested is None
            if not tested:
                return False
            body.requests.pop(0)
        return not body.failed

    def take(self, limit: np.ndarray | None = None) -> Push | None:
        """Return a complete push, in the order of each sender. It is valid until `give_back`.

        Args:
            limit: Return only pushes of ranks that have not sent all ``seq <= limit[worker]``,
                shape (workers,).
        """
        for body in list(self._bodies):
            if not self._is_next(body, limit):
                continue
            self._bodies.remove(body)
            worker, seq = body.headers[0, :2].tolist()
            if seq <= observe(self._applied, worker):  # it has arrived twice
                self._free_place(body.place)
                continue
            return self._unpacked(body)
        return None

    def _unpacked(self, body: Body) -> Push:
        """Return the push of a body that is taken now."""
        message, *more = body.place
        grad = self._unpacker.unpack(message)
        if grad is message or more:
            self._in_use = body.place
        else:
            self._free_place(body.place)
        if self._rows is None:
            return Push.unpack_all(body.headers, grad, *more)
        push = Push.unpack(body.headers[0], grad)
        push.rows = self._rows.unpack(push.worker, *more)
        return push

    def _is_next(self, body: Body, limit: np.ndarray | None) -> bool:
        """Return whether a body is complete and may be taken."""
        first = next(other for other in self._bodies if other.source == body.source)
        return first is body and self._is_due(body.source, (), limit) and self._is_here(body)

    def give_back(self) -> None:
        """Free the place of the last taken push, which is applied."""
        if self._in_use is not None:
            self._free_place(self._in_use)
            self._in_use = None

    def _free_place(self, place: Place) -> None:
        if len(self._free) < self._places:
            self._free.append(place)

    def close(self) -> None:
        """Wait until no message is under way. Blocks: until then."""
