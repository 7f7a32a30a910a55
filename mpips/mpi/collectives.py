"""What all ranks of a communicator do together, in the words of this project.

What begins with ``begin_`` returns a request at once: the caller waits for it in its own way, so
that signals are noticed and other messages get on. The others block inside MPI, until every rank
that they need has come; they belong where nothing else is under way.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpips.mpi.start import MPI, Comm, Request

if TYPE_CHECKING:
    from mpips.mpi.world import Cluster

PIECE = 32 << 20  # elements that one broadcast brings

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
