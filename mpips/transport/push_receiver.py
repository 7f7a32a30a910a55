"""Pushes from workers of other nodes: the server's half.

A pool of fixed size holds their bodies. Each place in it is a receive posted to whoever sends
first: the MPI library matches it and lets the body come as soon as it is announced, without
waiting for the server's loop. Small bodies are received when a probe has found them, and all are
where one was announced, is there, and was not matched. A packed body is unpacked when it is taken,
into one vector a server, and its place is free again at once, unless what the gradient was
computed from lies there too.

A receive that is posted stays posted until the end, when nothing is on its way: MPICH takes one
that has been matched, but not filled, back, and the body is then written where none is expected.
So a server that is to go on to certain pushes (see `mpips.ps.server`) holds what comes beside them,
and has one place more for them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from mpips.codecs import Codec
from mpips.kernels.atomics import observe
from mpips.mpi.messages import ANY_SOURCE, ANY_TAG, begin_receive_found
from mpips.mpi.start import Request, Status
from mpips.mpi.tags import BODY_TAGS, TAG_HEADER, TAG_REST
from mpips.mpi.window import transfer_pieces
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable
from mpips.transport.packed_rows import RowsUnpacker, pieces_in_turn
from mpips.transport.push import HEADER_WORDS, ROWS_BYTES, Push
from mpips.transport.wire import Unpacker

# MPICH 5.0 never matches some eager messages of other nodes with a receive that is already posted
# to any source (seen below 64 kB, over UCX on TCP); a probe finds all of them.
PROBED_MAX_BYTES = 1 << 16
IN_TURN = 6  # pieces that come at a time from each sender
PATIENCE_S = 0.25  # after which a body that was announced is looked for by a probe,
CROWD_PATIENCE = 20  # or so many times that where more are announced than there are receives


Place = tuple[np.ndarray, ...]
Key = tuple[int, int]  # rank of the sender, and tag of the body


@dataclass(eq=False)
class _Body:
    """A place in the pool that is being filled, or is full.

    Attributes:
        place: Room for the message: shape (shard.size,) of the gradients' dtype, or a packed
            message's bytes; and, where servers need it, for what the gradient was computed from,
            or for the push's rows.
        requests: What has to complete; the first piece, of whoever sends it, at first.
        status: Of the first piece.
        key: Rank that sent it and tag, once the first piece is here.
        probed: Whether a probe had found it: it is here, or coming.
        rest: The pieces that are not asked for yet; None until the header says which they are.
    """

    place: Place
    requests: list[Request]
    status: Status
    key: Key | None = None
    probed: bool = False
    rest: list[np.ndarray] | None = None


def _pieces(place: Place) -> list[np.ndarray]:
    """Return what a body comes to, transfer by transfer; the first may be of nothing."""
    first, *more = place
    behind = [piece for vector in more for piece in transfer_pieces(vector)]
    return (transfer_pieces(first) or [first]) + behind


class _Pool:
    """Places for bodies.

    Args:
        make: Makes one.
        places: How many are made at once, and kept.

    Attributes:
        free: Those that nothing lies in, or comes to.
        kept: How many are kept.
        made: How many there are.
    """

    def __init__(self, make: Callable[[], Place], places: int) -> None:
        self._make = make
        self.free = [make() for _ in range(places)]
        self.kept = self.made = places

    def take(self) -> Place:
        """Return a free place, or one more."""
        if not self.free:
            self.made += 1
            return self._make()
        return self.free.pop()

    def give_back(self, place: Place) -> None:
        """Have a place free again; one that is too many is dropped."""
        if self.made > self.kept:
            self.made -= 1
        else:
            self.free.append(place)

    def may_grow(self) -> bool:
        """Whether there may be one more."""
        return self.made <= self.kept + 1


@dataclass(frozen=True)
class Arrival:
    """How pushes come to a server.

    Attributes:
        places: Remote bodies held at a time; with 2, one is received while the other is applied.
            There may be one more at a cut, and one for bodies that no receive matches.
        aggregate: Whether the gradients of a node come in one message from other nodes.
        codec: What large remote bodies are packed by, or None.
        origins: Whether the replicas that they were computed from come as well.
        tables: Those whose rows come as well.
        kept: Whether their senders keep them, as ranks may die (`mpips.transport.acknowledged`).
    """

    places: int
    aggregate: bool = False
    codec: Codec | None = None
    origins: bool = False
    tables: Sequence[JobTable] = ()
    kept: bool = False


class _Announced:
    """What senders have announced and is not taken yet.

    Attributes:
        headers: Of each message, by rank and tag of the body.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.headers: dict[Key, np.ndarray] = {}
        self._noted = dict.fromkeys(ranks, 0)  # messages
        self._taken = dict.fromkeys(ranks, 0)
        self._awaited_since: dict[int, tuple[int, float]] = {}  # message and time, by rank

    def note(self, rank: int, rows: np.ndarray) -> None:
        """Note the header of a rank's next message."""
        self._noted[rank] += 1
        self.headers[rank, self._noted[rank] % BODY_TAGS] = rows

    def take(self, key: Key) -> np.ndarray:
        """Return the header of a message that is taken now, the next of its rank."""
        self._taken[key[0]] += 1
        return self.headers.pop(key)

    def next_tag(self, rank: int) -> int:
        """Return the tag of the body that is to be taken next of a rank."""
        return (self._taken[rank] + 1) % BODY_TAGS

    def overdue(self, here: Set[Key | None], patience_s: float) -> Iterator[int]:
        """Yield ranks whose next body was announced so long ago, and anew from now on.

        Args:
            here: The bodies that are here.
            patience_s: How long ago; of time that was looked at.
        """
        now = time.perf_counter()
        for rank, taken in self._taken.items():
            key = rank, self.next_tag(rank)
            if key not in self.headers or key in here:
                continue
            number, since_s = self._awaited_since.get(rank, (0, now))
            if number != taken + 1:
                self._awaited_since[rank] = taken + 1, now
            elif now - since_s > patience_s:
                self._awaited_since[rank] = taken + 1, now
                yield rank


class PushReceiver:
    """A server's remote pushes. Collective: no.

    Args:
        sources: The workers whose pushes each rank sends, by rank.
        size: Elements of the shard.
        dtype: Of the gradients.
        applied: The server's ledger, shape (workers,); read here, written by the store.
        arrival: How pushes come.
        rows: Unpacks their rows, where there are tables.
    """

    def __init__(
        self,
        cluster: Cluster,
        sources: Mapping[int, Sequence[int]],
        size: int,
        dtype: str,
        applied: np.ndarray,
        arrival: Arrival,
        rows: RowsUnpacker | None = None,
    ) -> None:
        self._cluster, self._sources, self._applied = cluster, sources, applied
        self._arrays, self._incoming = cluster.arrays, cluster.bodies
        places = arrival.places if sources and (size or rows is not None) else 0
        self._unpacker, self._rows = Unpacker(arrival.codec, size if places else 0, dtype), rows
        shape = int(arrival.origins), size
        more = (lambda: np.zeros(shape, dtype)) if rows is None else (lambda: [rows.place()])
        self._pool = _Pool(lambda: (self._unpacker.place(), *more()), places)
        free = self._pool.free
        self._probing = bool(free) and free[0][0].nbytes <= PROBED_MAX_BYTES
        self._next_look_s = 0.0
        self._announced = _Announced(sources)
        self._posted: list[_Body] = []
        self._bodies: list[_Body] = []
        self._lent: Place | None = None

    @property
    def bodies(self) -> int:
        """Number of bodies that are here, or of which a part is, and are not yet taken."""
        return len(self._bodies)

    def attend(self, limit: np.ndarray | None, fetch: bool) -> None:
        """Get on: headers, bodies that have come, room for more. Blocks: no.

        Args:
            limit: Make room only for senders of pushes ``seq <= limit[worker]``, shape (workers,).
            fetch: Whether to make room at all.
        """
        if not self._sources:
            return
        for rank, rows in self._arrays.rows(TAG_HEADER, HEADER_WORDS):
            self._announced.note(rank, rows)
        self._settle()
        if limit is not None or not fetch:
            self._fill_gaps()
        if fetch:
            self._make_room(limit)

    def _make_room(self, limit: np.ndarray | None) -> None:
        if limit is not None:
            self._make_room_up_to(limit)
        elif self._probing:
            while self._pool.free and self._probe(ANY_SOURCE):
                continue
        else:
            while self._pool.free:
                self._post(ANY_SOURCE)
            self._look_for_missing()

    def _post(self, source: int) -> None:
        place, status = self._pool.take(), Status()
        first = _pieces(place)[0]
        request = self._incoming.begin_receive(first, source, ANY_TAG)
        self._posted.append(_Body(place, [request], status))

    def _probe(self, source: int) -> bool:
        """Receive a body that is here, if there is one; returns whether there was."""
        found = self._incoming.find(source, ANY_TAG)
        if found is None:
            return False
        place = self._pool.take()
        request = begin_receive_found(found, _pieces(place)[0])
        self._posted.append(_Body(place, [request], Status(), probed=True))
        return True

    def _look_for_missing(self) -> None:
        """Look for bodies that were announced, are here, and no receive has matched.

        Where there are fewer receives than bodies, one may only wait for room, and gets it in the
        end; elsewhere the library has failed to match it, and all are probed for from now on.
        """
        missing = len(self._announced.headers) - len(self._bodies)
        if missing <= 0:
            return
        now = time.perf_counter()
        if now < self._next_look_s:
            return
        self._next_look_s = now + PATIENCE_S / 4
        crowded = missing > len(self._posted)
        here = {body.key for body in self._bodies}
        for rank in self._announced.overdue(here, PATIENCE_S * (CROWD_PATIENCE if crowded else 1)):
            if self._pool.may_grow() and self._probe(rank) and not crowded:
                self._probing = True
                self._pool.kept += 1  # for those that wait for what they do not match

    def _fill_gaps(self) -> None:
        """Receive what comes before a body that is here, where no receive has matched it."""
        for body in list(self._bodies):
            assert body.key is not None, "a body of nobody"
            rank, tag = body.key
            if tag != self._announced.next_tag(rank) and not any(b.probed for b in self._posted):
                self._probe(rank)

    def _make_room_up_to(self, limit: np.ndarray) -> None:
        """Make room for a push up to `limit`, one at a time, whatever fills the pool.

        What is posted comes first: the push is matched by it, or it is filled by another.
        """
        if self._posted and not self._probing:
            self._look_for_missing()
            return
        if any(body.probed for body in self._posted):
            return
        here = {body.key for body in self._bodies}
        for rank in self._sources:
            if self._owes(rank, limit):
                if (rank, self._announced.next_tag(rank)) in here:
                    return  # it is the next to be taken
                if self._probing:
                    self._probe(rank)
                else:
                    self._post(rank)
                return

    def _owes(self, rank: int, limit: np.ndarray | None) -> bool:
        """Whether pushes up to `limit` of the workers that a rank sends for are still to come."""
        if limit is None:
            return True
        return any(observe(self._applied, w) < limit[w] for w in self._sources[rank])

    def _settle(self) -> bool:
        """Sort out the posted receives that are complete; returns whether any is left."""
        waiting = []
        for body in self._posted:
            if not body.requests[0].Test(body.status):
                waiting.append(body)
            elif not body.status.Is_cancelled():
                body.key, body.requests = (body.status.source, body.status.tag), []
                self._bodies.append(body)
        self._posted = waiting
        return bool(waiting)

    def _ask_on(self) -> None:
        """Have more pieces of bodies come, of each sender a few at a time, and one body's first.

        If its two bodies shared the link, both would be over at once, and nothing on its way then.
        """
        coming = dict[int, int]()  # by sender
        for body in self._bodies:
            assert body.key is not None, "a body of nobody"
            rank, tag = body.key
            if body.rest is None and body.key in self._announced.headers:
                nbytes = self._announced.headers[body.key][0, ROWS_BYTES]
                rows = [] if self._rows is None else pieces_in_turn(body.place[1][:nbytes])
                body.rest = rows or _pieces(body.place)[1:]
            body.requests = [request for request in body.requests if not request.Test()]
            before = coming.get(rank, 0)
            while body.rest and before + len(body.requests) < IN_TURN:
                piece = body.rest.pop(0)
                body.requests.append(self._arrays.begin_receive(piece, rank, tag + TAG_REST))
            coming[rank] = before + len(body.requests)

    def take(self, limit: np.ndarray | None = None) -> Push | None:
        """Return a push that is here, of each sender in its order; it is lent until `give_back`.

        Args:
            limit: Return only those of ranks that have not sent all ``seq <= limit[worker]``,
                shape (workers,).
        """
        self._ask_on()
        for body in self._bodies:
            assert body.key is not None, "a body of nobody"
            rank, tag = body.key
            if not self._owes(rank, limit) or tag != self._announced.next_tag(rank):
                continue  # an earlier body of this rank may be coming
            if body.rest is None or body.rest or body.requests:
                continue
            self._bodies.remove(body)
            header = self._announced.take(body.key)
            message, *more = body.place
            grad = self._unpacker.unpack(message)
            if grad is message or more:
                self._lent = body.place
            else:
                self._pool.give_back(body.place)
            if self._rows is None:
                return Push.unpack_all(header, grad, *more)
            push = Push.unpack(header[0], grad)
            push.rows = self._rows.unpack(push.worker, *more)
            return push
        return None

    def give_back(self) -> None:
        """Free the place of the push taken last, which is applied."""
        if self._lent is not None:
            self._pool.give_back(self._lent)
            self._lent = None

    def close(self) -> None:
        """Take back the receives that are posted. Blocks: until MPI has let them go.

        Every push that was announced must have been taken.
        """
        for body in self._posted:
            if not body.probed:
                body.requests[0].Cancel()
        self._cluster.wait(lambda: not self._settle())
