"""A problem that learns nothing: each rank notes which samples it was given, and its memory."""

import os
import resource
from pathlib import Path

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem


class Recording(Problem):
    """Appends the numbers of each batch's samples to ``<out>.<pid>.ids``, kB to ``.memory``."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (4,)})
        self._name = f"{config.out}.{os.getpid()}"

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"w": np.zeros(4)}

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        out["w"][:] = 0
        if self.config.out:
            with Path(f"{self._name}.ids").open("ab") as file:
                file.write(batch.ids.tobytes())
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            Path(f"{self._name}.memory").write_text(str(memory))
        return 0.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}
