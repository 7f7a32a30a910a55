"""A model whose gradient sleeps, and so takes its time without a core."""

import time

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

GRADIENT_S = 0.01


class SleepingModel(Problem):
    """A vector of parameters whose gradient is zero, and takes `GRADIENT_S`."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (1000,)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return ones."""
        return {"w": np.ones(1000, self.config.dtype)}

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return 1, after a while."""
        time.sleep(GRADIENT_S)
        out["w"][:] = 0
        return 1.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return a loss of 1."""
        return {"loss": 1.0}
