"""Collective operations of a communicator, and the comparison of the hosts' clocks.

What begins with ``begin_`` returns a request at once: the caller waits for it in its own way, so
that signals are noticed and other messages get on. The others block inside MPI, until every rank
that they need has come; they belong where nothing else is under way.
"""

import platform
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpips.mpi.messages import Arrays
from mpips.mpi.start import MPI, Comm, Request
from mpips.mpi.tags import TAG_CLOCK

if TYPE_CHECKING:
    from mpips.mpi.world import Cluster

PIECE = 32 << 20  # elements that one broadcast brings
CLOCK_TRIES = 10  # messages there and back

T = TypeVar("T")


def cluster_subset(cluster: "Cluster", ranks: Sequence[int]) -> Comm:
    """Return a communicator of `ranks`; COMM_NULL on the others. Collective: yes."""
    color = 0 if cluster.rank in ranks else MPI.UNDEFINED
    comm: Comm = cluster.comm.Split(color, key=cluster.rank)  # type: ignore[assignment]
    return comm


def host_subset(cluster: "Cluster") -> Comm:
    """Return a communicator of the ranks of this host. Collective: yes."""
    comm: Comm = cluster.comm.Split_type(MPI.COMM_TYPE_SHARED, key=cluster.rank)  # type: ignore[assignment]
    return comm


def world_ranks(comm: Comm) -> list[int]:
    """Return the ranks of `comm` in the world: this one, then the others."""
    ranks = [comm.rank, *(set(range(comm.size)) - {comm.rank})]
    mine, everyone = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = mine.Translate_ranks(ranks, everyone)
    mine.Free()
    everyone.Free()
    return found


def free(comm: Comm) -> None:
    """Free a communicator that this rank may be outside of. Collective: over its ranks."""
    if comm != MPI.COMM_NULL:
        comm.Free()


def begin_sum(comm: Comm, values: np.ndarray) -> Request:
    """Begin to add up `values` over `comm`, in place. Collective: yes. Blocks: no."""
    return comm.Iallreduce(MPI.IN_PLACE, values)


def begin_maximum(comm: Comm, values: np.ndarray, out: np.ndarray) -> Request:
    """Begin to find the elementwise maximum over `comm`. Collective: yes. Blocks: no."""
    return comm.Iallreduce(values, out, MPI.MAX)


def begin_broadcast(comm: Comm, values: np.ndarray, root: int) -> Request:
    """Begin to bring `values` of rank `root` to all, in place. Collective: yes. Blocks: no."""
    return comm.Ibcast(values, root)


def broadcast_polled(
    comm: Comm, values: np.ndarray, root: int, wait: Callable[[Request], object]
) -> None:
    """Bring the vector `values` of rank `root` to all, in place, piece by piece.

    Collective: yes. Blocks: until it is here, but never inside MPI.
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
        value: This rank's.
        wait: How this rank waits.

    Collective: yes. Blocks: until all have come, but never inside MPI.
    """
    steps = gathering(comm, value)
    while True:
        try:
            wait(next(steps))
        except StopIteration as end:
            found: list[Any] = end.value
            return found


def gathering(comm: Comm, value: object) -> Generator[Request, None, list[Any]]:
    """Yield requests, each to be complete before the next; returns every rank's value, by rank.

    Collective: yes. Blocks: no.
    """
    mine = np.frombuffer(MPI.pickle.dumps(value), "u1")
    sizes = np.zeros(comm.size, "i4")
    yield comm.Iallgather(np.array([mine.size], "i4"), sizes)
    found = np.empty(sizes.sum(), "u1")
    yield comm.Iallgatherv(mine, (found, sizes))
    ends = np.cumsum(sizes)
    parts = zip(ends - sizes, ends, strict=True)
    return [MPI.pickle.loads(found[begin:end].tobytes()) for begin, end in parts]


# Inside MPI ----------------------------------------------------------------------------------


def barrier(comm: Comm) -> None:
    """Wait for every rank of `comm`. Collective: yes. Blocks: inside MPI."""
    comm.Barrier()


def broadcast(comm: Comm, value: T | None, root: int = 0) -> T:
    """Return the value of rank `root` on every rank. Collective: yes. Blocks: inside MPI."""
    shared: T = comm.bcast(value, root)
    return shared


def gather_all(comm: Comm, value: T) -> list[T]:
    """Return every rank's value, by rank. Collective: yes. Blocks: inside MPI."""
    return comm.allgather(value)


def gather_to_first(comm: Comm, value: T) -> list[T] | None:
    """Return every rank's value on rank 0, None elsewhere. Collective: yes. Blocks: inside MPI."""
    return comm.gather(value)


def sum_in_place(comm: Comm, values: np.ndarray) -> None:
    """Add up `values` over `comm`, in place. Collective: yes. Blocks: inside MPI."""
    comm.Allreduce(MPI.IN_PLACE, values)


def count_survivors(comm: Comm, wait: Callable[[Callable[[], bool]], object]) -> int:
    """Revoke a copy of `comm` and return to how many ranks it shrinks.

    Args:
        comm: The ranks; stays as it is.
        wait: Waits until what it is given is true.

    Collective: yes, where User Level Failure Mitigation is switched on.
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


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each host, from the host of each rank."""
    return [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]


def clock_skews(
    cluster: "Cluster", everyone: Comm | None = None, clock: Callable[[], float] = time.time
) -> dict[str, float]:
    """Return on rank 0 the seconds by which each other host's clock is ahead of its own.

    Args:
        cluster: This rank's, which says how it waits.
        everyone: Those whose hosts are compared; by default the ranks of `cluster`.
        clock: Tells the time of this rank's host.

    Collective: yes, over `everyone`. Blocks: for ten messages there and back a host, one host after
    the other.

    Reference: Cristian, Distributed Computing 3 (1989).
    """
    comm = everyone or cluster.comm
    hosts = gather_polled(comm, platform.node(), cluster.wait_request)
    arrays, found = Arrays(comm), {}
    for rank in first_ranks(hosts)[1:]:
        if comm.rank == 0:
            found[hosts[rank]] = _ask(cluster, arrays, rank, clock)
        elif comm.rank == rank:
            _answer(cluster, arrays, clock)
    return found


def _ask(cluster: "Cluster", arrays: Arrays, rank: int, clock: Callable[[], float]) -> float:
    """Return the seconds by which another rank's clock is ahead."""
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
