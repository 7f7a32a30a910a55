"""Multi-layer perceptrons with a twist, for tests of stopping and resuming."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
from countdown import Slow, Stopping

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP

HELD_S = 0.2


class SlowMLP(Slow, MLP):
    """Slow enough to be stopped in the middle of it."""


class HeldMLP(MLP):
    """Nearly stands still while the folder that it runs in has a file called ``hold``."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        if os.path.exists("hold"):
            time.sleep(HELD_S)
        return super().loss_and_grad(params, batch, out)


class UnrecordedMLP(MLP):
    """Keeps servers from making the folder of their record, as a full disk does."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        Path(config.out, "record").touch()


class RecordedAnewMLP(MLP):
    """Removes the record of the jobs before, as a user may do who resumes a run."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        if config.out:
            shutil.rmtree(Path(config.out, "record"), ignore_errors=True)


class StoppingMLP(Stopping, MLP):
    """Asks to stop at a random step of each worker, where ``--epochs`` is endless."""


class NoisyMLP(Stopping, MLP):
    """Draws from NumPy's legacy generator, as it has seeded it, and asks to stop as well."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        np.random.seed(config.seed)

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["b1"][...] += 1e-3 * np.random.standard_normal(out["b1"].shape)
        return loss
