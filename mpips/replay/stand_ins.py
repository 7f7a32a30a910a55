"""What stands in for the ranks and the memory of a job where one process does the work of all."""

from typing import Any

import numpy as np

from mpips.cluster.window import Field, Window
from mpips.cluster.world import Cluster
from mpips.layout import aligned_zeros
from mpips.layout.roles import Roles
from mpips.replay.record import Part


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

    def progress(self) -> None:
        """Nothing is to get on."""

    def send(self, dest: int, kind: str, payload: Any = None) -> None:
        """Nobody is told anything."""


class Memory(Window):
    """The fields of all ranks that this process needs.

    Args:
        fields: By rank.
    """

    def __init__(self, fields: dict[int, tuple[Field, ...]]) -> None:
        self._arrays = {
            (rank, field.name): _zeros(field) for rank, each in fields.items() for field in each
        }

    def view(self, rank: int, name: str) -> np.ndarray:
        """Return a field, as it lies in a segment."""
        return self._arrays[rank, name]


def _zeros(field: Field) -> np.ndarray:
    count = int(np.prod(field.shape, dtype=np.int64))
    return aligned_zeros(count, np.dtype(field.dtype)).reshape(field.shape)
