"""Multi-layer perceptrons with a twist, for tests of stopping and resuming."""

import time

import numpy as np
from countdown import Countdown

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP

PAUSE_S = 2e-3


class SlowMLP(MLP):
    """Slow enough to be stopped in the middle of it."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        time.sleep(PAUSE_S)
        return super().loss_and_grad(params, batch, out)


class StoppingMLP(MLP):
    """Asks to stop at a random step of each worker, where ``--epochs`` is endless."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self._until_stop = Countdown(config)

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        self._until_stop.count()
        return super().loss_and_grad(params, batch, out)


class FrozenLater(MLP):
    """Learns where ``--epochs 1`` is given; otherwise its gradient is zero.

    Adagrad leaves parameters and slots alone at a gradient of zero, so that a run resumed with
    more epochs saves what it has read.
    """

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        if self.config.epochs > 1:
            for array in out.values():
                np.copyto(array, 0)
        return loss
