"""A problem whose parameters show which pushes a read holds, and which checks it.

Every line of ``clocks`` has a counter a rank, and sgd with rate 1 adds 1 to a worker's counter in
every line with each of its pushes, so that each shard counts the pushes of each worker. ``--hidden
R,W,SLOW`` gives R lines in a world of W ranks, and makes rank SLOW slow, if it is one; workers are
the last ranks, and make as many steps each.
"""

import time

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

PAUSE_S = 0.02


class Clocks(Problem):
    """Raises where a read holds less than the staleness bound says."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        lines, self._world, self._slow = config.hidden
        self._servers, self._bound = config.servers or 1, config.bound
        self._clock = 0
        self.layout = Layout.of({"clocks": (lines, self._world)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.layout.views(np.zeros(self.layout.size))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        from mpi4py import MPI

        rank, counts = MPI.COMM_WORLD.rank, params["clocks"]
        for other, least in list(enumerate(counts.min(0)))[self._servers :]:
            if least < self._clock - self._bound:
                raise ValueError(f"at clock {self._clock} rank {other} is at {least}")
        if (counts[:, rank] != self._clock).any():
            raise ValueError(f"at clock {self._clock} own pushes are missing")
        if rank == self._slow:
            time.sleep(PAUSE_S)
        self._clock += 1
        out["clocks"].fill(0)
        out["clocks"][:, rank] = -1
        return 1.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}
