"""Stand-ins for the ranks and the memory of a job."""

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpips.layout.roles import Roles
from mpips.mpi.messages import Arrays
from mpips.mpi.pages import MAP_NORESERVE
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.tools.replay.record import Part


class Ranks(Cluster):
    """The ranks of a recorded job, as one of them sees them. Nobody else is there.

    Args:
        part: The job.
        rank: Which one.
    """

    def __init__(self, part: Part, rank: int) -> None:
        world, about = part.about["world"], part.about
        self.rank, self.world = rank, int(world["ranks"])
        self.node_of = [int(node) for node in world["node_of"]]
        self.hosts = [f"node{node}" for node in self.node_of]
        self.roles = Roles(tuple(world["servers"]), tuple(about["workers"]), int(about["spares"]))
        self.threads, self.cores_a_rank = int(world["threads"]), 1.0
        self.arrays = _NoMessages()

    def progress(self) -> None:
        """Nothing is to get on."""

    def send(self, dest: int, kind: str, payload: Any = None) -> None:
        """Nobody is told anything."""


class OneNode(Ranks):
    """Ranks that can all read each other's memory, as those of a replay do."""

    def is_local(self, rank: int) -> bool:
        """See `Cluster.local`."""
        return True


class _NoMessages(Arrays):
    """Messages of arrays, where nobody sends any."""

    def __init__(self) -> None:
        """There is no communicator."""

    def begin_receives(self, tag: int) -> Iterator[Any]:
        """Yield none."""
        return iter(())


class Memory(Window):
    """The fields of ranks, shared with processes that are copies of this one.

    Args:
        fields: By rank.
    """

    def __init__(self, fields: Mapping[int, tuple[Field, ...]]) -> None:
        self._arrays = {
            (rank, field.name): _zeros(field) for rank, each in fields.items() for field in each
        }

    def view(self, rank: int, name: str) -> np.ndarray:
        """Return a field, as it lies in a segment."""
        return self._arrays[rank, name]


def _zeros(field: Field) -> np.ndarray:
    """Return an array in memory that costs what is written of it."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(1, field.nbytes), flags=flags)
    return np.frombuffer(
        memory, field.dtype, field.nbytes // np.dtype(field.dtype).itemsize
    ).reshape(field.shape)
