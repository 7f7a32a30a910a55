"""Problems whose end is known exactly: what was applied can be read off the parameters.

In `Counting` a batch's gradient is minus the number of times that each training sample is in
it, and ``sgd`` with rate 1 adds it: ``counts[i]`` is the number of times that sample i was
applied. ``updates`` is -1 everywhere, so each of its elements counts the updates of its shard;
``--hidden N`` makes it N long. All numbers are integers, exact in float64.

A file by itself: ranks load it as they load a user's.
"""

import time
from pathlib import Path

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

HELD_S = 0.05


class Counting(Problem):
    """The counts of samples applied; exact where servers apply each gradient by itself."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"counts": (data.n_train,), "updates": (config.hidden[0],)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """See `Problem.init`: all zero."""
        return self.layout.views(np.zeros(self.layout.size))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """See `Problem.loss_and_grad`; the loss is the batch's size."""
        out["counts"][:] = -np.bincount(batch.ids, minlength=self.data.n_train)
        out["updates"][:] = -1
        return float(len(batch))

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """See `Problem.evaluate`."""
        return {"loss": 0.0}


class MeanCounting(Counting):
    """The mean over the batch of the samples' one-hot vectors, as a round of mode sync weights it.

    With a rate of n, the samples of all workers in a round, a round adds 1 for each of them;
    exact where n and each worker's share of it are powers of two, else to rounding.
    """

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """See `Counting.loss_and_grad`."""
        loss = super().loss_and_grad(params, batch, out)
        out["counts"] /= len(batch)
        return loss


def held_by(out: str | Path) -> Path:
    """Return the file that holds the run in a folder: while it is there, steps take `HELD_S`."""
    return Path(f"{out}.hold")


class HeldCounting(Counting):
    """The same, slow while it is held."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """See `Counting.loss_and_grad`."""
        _wait_while_held(self.config)
        return super().loss_and_grad(params, batch, out)


class HeldMeanCounting(MeanCounting):
    """The same, slow while it is held."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """See `MeanCounting.loss_and_grad`."""
        _wait_while_held(self.config)
        return super().loss_and_grad(params, batch, out)


def _wait_while_held(config: Config) -> None:
    if held_by(config.out).exists():
        time.sleep(HELD_S)
