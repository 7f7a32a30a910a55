"""Problems whose end is known exactly: what was applied can be read off the parameters.

In `Counting` a batch's gradient is minus the number of times that each training sample is in
it, and ``sgd`` with rate 1 adds it: ``counts[i]`` is the number of times that sample i was
applied. ``updates`` is -1 everywhere, so each of its elements counts the updates of its shard;
``--hidden N`` makes it N long. All numbers are integers, exact in float64.
"""

import numpy as np
from countdown import Slow, Stopping

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem


class Counting(Problem):
    """The counts of samples applied; exact in mode async."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"counts": (data.n_train,), "updates": (config.hidden[0],)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.layout.views(np.zeros(self.layout.size))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        out["counts"][:] = -np.bincount(batch.ids, minlength=self.data.n_train)
        out["updates"][:] = -1
        return float(len(batch))

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}


class SlowCounting(Slow, Counting):
    """The same, slow enough to be stopped in the middle of it."""


class StoppingCounting(Stopping, Counting):
    """The same; where ``--epochs`` is endless, each worker asks to stop at a random step."""


class SlowStoppingCounting(Slow, StoppingCounting):
    """Both."""


class MeanCounting(Slow, Counting):
    """The mean over the batch of the samples' one-hot vectors, as mode sync weights it.

    With a rate of n, the samples of all workers in a round, a round adds 1 for each of them;
    exact where n and each worker's share of it are powers of two.
    """

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["counts"] /= len(batch)
        return loss
