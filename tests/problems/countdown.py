"""What tests of stopping add to a problem: slowness, and a request to stop from within."""

import os
import random
import signal
import time

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.problems.base import Arrays, Problem

ENDLESS = 1000  # epochs; what tests call endless is far more
LONGEST = 12
PAUSE_S = 2e-3


class Slow(Problem):
    """Slow enough to be stopped in the middle of it; goes before the problem that is slowed."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        time.sleep(PAUSE_S)
        return super().loss_and_grad(params, batch, out)  # type: ignore[safe-super]


class Stopping(Problem):
    """Sends this process SIGUSR1 at a random step, 1 to `LONGEST`, where epochs are endless."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self._left = random.randint(1, LONGEST) if config.epochs > ENDLESS else 0

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().loss_and_grad(params, batch, out)  # type: ignore[safe-super]
