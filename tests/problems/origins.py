"""A problem that knows what delay compensation has to do, and checks every read.

One worker takes note of what each of its gradients was computed from, and does the updates of all
servers itself: sgd with rate 1 after the paper. Each element that it reads must be one of those
that the element has been since the start, whichever shard it is in and however torn the read.
"""

import time

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

PAUSE_S = 1e-3
DECAY, EPS = 0.95, 1e-7


class Origins(Problem):
    """Raises where a parameter is none that delay compensation could have made."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (config.hidden[0],)})
        self._factor, self._adaptive = config.delay_compensation, config.delay_adaptive
        self._been = [self._first()]
        self._square = np.zeros(self.layout.size)

    def _first(self) -> np.ndarray:
        return np.linspace(-1, 1, self.layout.size)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"w": self._first()}

    def _check(self, w: np.ndarray) -> None:
        remote = np.min([np.abs(w - been) for been in self._been], axis=0)
        if remote.max() > 1e-12:
            raise ValueError(f"w is {remote.max()} off after {len(self._been) - 1} pushes")

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        self._check(params["w"])
        time.sleep(PAUSE_S * (len(self._been) % 3 == 0))
        g = 0.1 * np.cos(np.arange(self.layout.size) + len(self._been))
        out["w"][:] = g
        factor: float | np.ndarray = self._factor
        if self._adaptive:
            self._square = DECAY * self._square + (1 - DECAY) * g**2
            factor = factor / np.sqrt(self._square + EPS)
        late = self._been[-1] - params["w"]
        self._been.append(self._been[-1] - (g + factor * g * g * late))
        return 1.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        if np.abs(params["w"] - self._been[-1]).max() > 1e-12:
            raise ValueError("the final parameters are not those after all pushes")
        return {"loss": 0.0}
