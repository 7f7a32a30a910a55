"""A model whose gradient sleeps, and so needs time but no core."""

import time

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem


class SleepingModel(Problem):
    """A vector of `size` parameters whose gradient is zero, and sleeps for `gradient_s`."""

    size, gradient_s = 1000, 0.01

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (self.size,)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return ones."""
        return {"w": np.ones(self.layout.size, self.config.dtype)}

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return 1 after `gradient_s`."""
        time.sleep(self.gradient_s)
        out["w"][:] = 0
        return 1.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return a loss of 1."""
        return {"loss": 1.0}


class Million(SleepingModel):
    """A million parameters and 60 ms, about the time to move them at 1 Gbit/s."""

    size, gradient_s = 1_000_000, 0.06
