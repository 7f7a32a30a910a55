"""Messages between two ranks, collective operations, and comparison of clocks.

Functions named ``begin_`` return a request at once. The caller waits for it in its own way, so that
signals are noticed and other messages progress. The other functions block inside MPI until all
ranks have come. Use them only when no other communication is under way.
"""

import platform
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpips.mpi.abort import Failures
from mpips.mpi.start import MPI, TAG_CLOCK, TAG_CONTROL, TAG_GATHER, Comm, Request, Status

if TYPE_CHECKING:
    from mpips.mpi.world import Cluster

PIECE = 32 << 20  # most elements of one broadcast
CLOCK_TRIES = 10  # round trips

ANY_SOURCE, ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
Handler = Callable[[int, Any], object]  # takes the sender of a control message, and its payload
Found = MPI.Message  # a message of a matched probe: only its holder can receive it
T = TypeVar("T")


class Arrays:
    """Messages of arrays on one communicator. Collective: no. Blocks: no.

    Args:
        comm: The communicator.
        failures: Dead ranks of the job; `find` returns None if a death prevents it.

    The attributes are MPI's own functions, so that they cost no further call.

    Attributes:
        begin_send: ``(array, dest, tag)`` to a request; do not write the array until it is
            complete.
        begin_synchronous_send: The same; complete only when the receiver has begun to receive.
        begin_receive: ``(array, source, tag)`` to a request; `ANY_SOURCE` and `ANY_TAG` match all.
        find: ``(source, tag)`` to a message that has come or is coming, for `begin_receive_found`;
            or None.
    """

    begin_send: Callable[[np.ndarray, int, int], Request]
    begin_synchronous_send: Callable[[np.ndarray, int, int], Request]
    begin_receive: Callable[[np.ndarray, int, int], Request]
    find: Callable[..., Found | None]

    def __init__(self, comm: Comm, failures: Failures | None = None) -> None:
        self.begin_send, self.begin_synchronous_send = comm.Isend, comm.Issend
        self.begin_receive = comm.Irecv
        self.find = comm.Improbe if failures is None else failures.guard(comm.Improbe)
        self._status = Status()

    def rows(self, tag: int, width: int) -> Iterator[tuple[int, np.ndarray]]:
        """Receive all messages of a tag that have come; each contains rows of `width` int64.

        Yields:
            Rank of the sender, and the rows, shape (rows, width), dtype int64.
        """
        status = self._status
        while (found := self.find(ANY_SOURCE, tag, status)) is not None:
            rows = np.empty((status.Get_count(MPI.INT64_T) // width, width), "i8")
            source = status.source
            found.Recv(rows)
            yield source, rows

    def begin_receives(self, tag: int) -> Iterator[tuple[int, Request, np.ndarray]]:
        """Begin to receive the messages that have come or are coming, of any length.

        Yields:
            Rank of the sender, the request, and the buffer of the message, dtype uint8, aligned to
            8 bytes.
        """
        status = self._status
        while (found := self.find(ANY_SOURCE, tag, status)) is not None:
            nbytes = status.Get_count(MPI.BYTE)
            out = np.empty(-(-nbytes // 8), "u8").view("u1")[:nbytes]
            yield status.source, found.Irecv(out), out


def begin_receive_found(found: Found, out: np.ndarray) -> Request:
    """Begin to receive a message that `Arrays.find` has found. Collective: no. Blocks: no."""
    return found.Irecv(out)


class Mailbox:
    """A rank's control messages, which are rare and small. Collective: no. Blocks: no.

    Args:
        comm: A communicator without other messages.
        failures: Dead ranks of the job; messages to them are dropped.
    """

    def __init__(self, comm: Comm, failures: Failures) -> None:
        self._rank, self._failures = comm.rank, failures
        self._isend, self._find = comm.Isend, failures.guard(comm.Improbe)
        self._status = Status()
        self._sending: list[tuple[Request, bytes]] = []
        self._later: list[tuple[int, str, Any]] = []

    def send(self, dest: int, kind: str, payload: Any) -> None:
        """Send a control message, which `poll` receives; `dest` may be this rank."""
        if dest == self._rank:
            self._later.append((dest, kind, payload))
        else:
            self._send(dest, TAG_CONTROL, (kind, payload))

    def bring(self, dest: int, value: object) -> None:
        """Send a value, which `dest` receives by `brought_by`."""
        self._send(dest, TAG_GATHER, value)

    def _send(self, dest: int, tag: int, value: object) -> None:
        self.empty()
        message = MPI.pickle.dumps(value)
        request = self._failures.begin_send(self._isend, message, dest, tag)
        if request is not None:
            self._sending.append((request, message))

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the control messages that have come, as (source, kind, payload).

        Messages of one source come in the order in which they were sent.
        """
        messages, self._later = self._later, []
        while (found := self._find(ANY_SOURCE, TAG_CONTROL, self._status)) is not None:
            source = self._status.source
            messages.append((source, *self._value(found)))
        return messages

    def brought_by(self, rank: int) -> list[Any]:
        """Return the next value that a rank has sent by `bring`, as a list; [] if none has come."""
        found = self._find(rank, TAG_GATHER, self._status)
        return [] if found is None else [self._value(found)]

    def _value(self, found: Found) -> Any:
        body = bytearray(self._status.Get_count(MPI.BYTE))
        found.Recv(body)  # the message has been sent, so this waits for no rank's step
        return MPI.pickle.loads(body)

    def empty(self) -> bool:
        """Return whether every message has been sent."""
        test = self._failures.attempt
        self._sending = [(r, m) for r, m in self._sending if test(r.Test) is False]
        return not self._sending


# Collective operations --------------------------------------------------------------------------


def cluster_subset(cluster: "Cluster", ranks: Sequence[int]) -> Comm:
    """Return a communicator of `ranks`; COMM_NULL on the others. Collective: yes."""
    color = 0 if cluster.rank in ranks else MPI.UNDEFINED
    return cluster.comm.Split(color, key=cluster.rank)  # type: ignore[return-value]


def host_subset(cluster: "Cluster") -> Comm:
    """Return a communicator of the ranks of this host. Collective: yes."""
    return cluster.comm.Split_type(MPI.COMM_TYPE_SHARED, key=cluster.rank)  # type: ignore[return-value]


def world_ranks(comm: Comm) -> list[int]:
    """Return the ranks of `comm` in the world: this one, then the others."""
    ranks = [comm.rank, *(set(range(comm.size)) - {comm.rank})]
    mine, everyone = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = mine.Translate_ranks(ranks, everyone)
    mine.Free()
    everyone.Free()
    return found


def free(comm: Comm) -> None:
    """Free a communicator; a rank outside of it has COMM_NULL. Collective: over its ranks."""
    if comm != MPI.COMM_NULL:
        comm.Free()


def begin_sum(comm: Comm, values: np.ndarray) -> Request:
    """Begin to sum `values` over `comm`, in place. Collective: yes. Blocks: no."""
    return comm.Iallreduce(MPI.IN_PLACE, values)


def begin_maximum(comm: Comm, values: np.ndarray, out: np.ndarray) -> Request:
    """Begin to compute the elementwise maximum over `comm`. Collective: yes. Blocks: no."""
    return comm.Iallreduce(values, out, MPI.MAX)


def begin_broadcast(comm: Comm, values: np.ndarray, root: int) -> Request:
    """Begin to broadcast `values` from rank `root`, in place. Collective: yes. Blocks: no."""
    return comm.Ibcast(values, root)


def broadcast_polled(
    comm: Comm, values: np.ndarray, root: int, wait: Callable[[Request], object]
) -> None:
    """Broadcast the vector `values` from rank `root`, in place, in pieces.

    Args:
        comm: The ranks.
        values: Vector of the same size and dtype on all ranks.
        root: Rank whose values the others get.
        wait: Waits for a request.

    Collective: yes. Blocks: until all values have come, but never inside MPI.
    """
    for begin in range(0, values.size, PIECE):
        wait(comm.Ibcast(values[begin : begin + PIECE], root))


def begin_barrier(comm: Comm) -> Request:
    """Begin to wait for every rank of `comm`. Collective: yes. Blocks: no."""
    return comm.Ibarrier()


def gather_polled(comm: Comm, value: object, wait: Callable[[Request], object]) -> list[Any]:
    """Return every rank's value, by rank.

    Args:
        comm: The ranks.
        value: This rank's value.
        wait: Waits for a request.

    Collective: yes. Blocks: until all values have come, but never inside MPI.
    """
    steps = gathering(comm, value)
    while True:
        try:
            wait(next(steps))
        except StopIteration as end:
            return end.value


def gathering(comm: Comm, value: object) -> Generator[Request, None, list[Any]]:
    """Yield requests, each to be complete before the next; return every rank's value, by rank.

    Collective: yes. Blocks: no.
    """
    mine = np.frombuffer(MPI.pickle.dumps(value), "u1")
    sizes = np.zeros(comm.size, "i4")
    yield comm.Iallgather(np.array([mine.size], "i4"), sizes)
    received = np.empty(sizes.sum(), "u1")
    yield comm.Iallgatherv(mine, (received, sizes))
    ends = np.cumsum(sizes)
    parts = zip(ends - sizes, ends, strict=True)
    return [MPI.pickle.loads(received[begin:end].tobytes()) for begin, end in parts]


# Inside MPI ----------------------------------------------------------------------------------


def barrier(comm: Comm) -> None:
    """Wait for every rank of `comm`. Collective: yes. Blocks: inside MPI."""
    comm.Barrier()


def broadcast(comm: Comm, value: T | None, root: int = 0) -> T:
    """Return the value of rank `root` on every rank. Collective: yes. Blocks: inside MPI."""
    return comm.bcast(value, root)


def gather_all(comm: Comm, value: T) -> list[T]:
    """Return every rank's value, by rank. Collective: yes. Blocks: inside MPI."""
    return comm.allgather(value)


def gather_to_first(comm: Comm, value: T) -> list[T] | None:
    """Return every rank's value on rank 0, None elsewhere. Collective: yes. Blocks: inside MPI."""
    return comm.gather(value)


def sum_in_place(comm: Comm, values: np.ndarray) -> None:
    """Sum `values` over `comm`, in place. Collective: yes. Blocks: inside MPI."""
    comm.Allreduce(MPI.IN_PLACE, values)


def count_survivors(comm: Comm, wait: Callable[[Callable[[], bool]], object]) -> int:
    """Revoke a copy of `comm`, shrink it, and return the number of ranks left.

    Args:
        comm: The ranks; does not change.
        wait: Waits until a function returns True.

    Collective: yes. Needs ULFM.
    """
    copy = comm.Dup()
    if copy.rank == 0:
        copy.Revoke()
    wait(copy.Is_revoked)
    shrunk = copy.Shrink()
    size = shrunk.size
    shrunk.Free()
    copy.Free()
    return size


# The hosts' clocks ---------------------------------------------------------------------------


def first_ranks(places: Sequence[Hashable]) -> list[int]:
    """Return the first rank of each host or node.

    Args:
        places: Host or node of each rank.
    """
    found: dict[Hashable, int] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, rank)
    return [*found.values()]


def clock_skews(
    cluster: "Cluster", everyone: Comm | None = None, clock: Callable[[], float] = time.time
) -> dict[str, float]:
    """Return on rank 0 the seconds by which each other host's clock is ahead of its own.

    Args:
        cluster: The job's ranks; says how this rank waits.
        everyone: Ranks whose hosts are compared; by default those of `cluster`.
        clock: Returns the time of this rank's host, in seconds.

    Collective: yes, over `everyone`. Blocks: for ten round trips with each host, one host after the
    other.

    Reference: Cristian, Distributed Computing 3 (1989).
    """
    comm = everyone or cluster.comm
    hosts = gather_polled(comm, platform.node(), cluster.wait_request)
    arrays, skews = Arrays(comm), {}
    for rank in first_ranks(hosts)[1:]:
        if comm.rank == 0:
            skews[hosts[rank]] = _ask(cluster, arrays, rank, clock)
        elif comm.rank == rank:
            _answer(cluster, arrays, clock)
    return skews


def _ask(cluster: "Cluster", arrays: Arrays, rank: int, clock: Callable[[], float]) -> float:
    """Return the seconds by which another rank's clock is ahead of this one's."""
    best, ahead = float("inf"), 0.0
    for _ in range(CLOCK_TRIES):
        question, answer = np.zeros(1), np.zeros(1)
        start, now = time.perf_counter(), clock()
        coming = arrays.begin_receive(answer, rank, TAG_CLOCK)
        cluster.wait_request(arrays.begin_send(question, rank, TAG_CLOCK))
        cluster.wait_request(coming)
        spent = time.perf_counter() - start
        if spent < best:
            best, ahead = spent, float(answer[0]) - now - spent / 2
    return ahead


def _answer(cluster: "Cluster", arrays: Arrays, clock: Callable[[], float]) -> None:
    for _ in range(CLOCK_TRIES):
        cluster.wait_request(arrays.begin_receive(np.zeros(1), 0, TAG_CLOCK))
        cluster.wait_request(arrays.begin_send(np.array([clock()]), 0, TAG_CLOCK))
