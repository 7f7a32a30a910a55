"""A parameter that counts updates, and a loss that is lowest after `BEST` of them."""

from typing import ClassVar

import numpy as np
from storage import ALWAYS, Fails

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

BEST = 30


class Peaked(Problem):
    """With ``sgd`` at rate 1, in rounds."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (100,)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.layout.views(np.zeros(self.layout.size))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        out["w"][:] = -1
        return 1.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        return {"loss": abs(float(params["w"][0]) - BEST)}


class NeverPeaked(Fails, Peaked):
    """The same, and nothing but the first checkpoint can be written."""

    calls: ClassVar = {"write_shard": ALWAYS}
