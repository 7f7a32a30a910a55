"""Softmax regressions that go wrong at the fifth step of one rank, or of all, or later."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from countdown import Slow

from mpips.datasets import Batch
from mpips.mpi import segments
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP, Softmax

FAULTY_STEP = 5
LEAVE_S = 0.02  # after it: that batches are left for the one which goes wrong, if it is late


def is_last() -> bool:
    """Return whether this is the last rank."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1


class Faulty(Softmax):
    """Does `fail` instead of a step."""

    everywhere = False
    at = FAULTY_STEP
    calls = 0

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        self.calls += 1
        loss = super().loss_and_grad(params, batch, out)
        if self.calls == self.at and (self.everywhere or is_last()):
            return self.fail(loss, out)
        if self.calls > self.at:
            time.sleep(LEAVE_S)
        return loss

    def fail(self, loss: float, out: Arrays) -> float:
        raise NotImplementedError


class NanLoss(Faulty):
    def fail(self, loss: float, out: Arrays) -> float:
        return float("nan")


class NanLossLate(Slow, NanLoss):
    """In the midst of three local steps, when the run has got on."""

    at = 3 * 40 + 2


class NanGradient(Faulty):
    """The loss is finite; the parameters are not, from then on."""

    def fail(self, loss: float, out: Arrays) -> float:
        out["w"][0] = np.nan
        return loss


class NanGradientOfMlp(MLP):
    """The same in a model that is large enough to be packed, at every worker."""

    calls = 0

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        self.calls += 1
        loss = super().loss_and_grad(params, batch, out)
        if self.calls == FAULTY_STEP:
            out["w1"][1, 2] = np.nan
        return loss


def note() -> None:
    """Note when this rank raises, where that is asked for."""
    if path := os.environ.get("RAISED_AT"):
        Path(path).write_text(f"{time.monotonic()}")


class Raises(Faulty):
    def fail(self, loss: float, out: Arrays) -> float:
        note()
        raise KeyError("a mistake of mine")


class RaisesEverywhere(Raises):
    everywhere = True


class RaisesWithAFileOfMine(Raises):
    """Has mapped a file of the user's, and tells which segments of the MPI it has mapped."""

    def fail(self, loss: float, out: Arrays) -> float:
        others = "".join(f"{segment.path}\n" for segment in segments.mapped())
        mine = np.load(os.environ["FILE_OF_MINE"], mmap_mode="r+")
        Path("segments.txt").write_text(others)
        return super().fail(mine[0], out)


class WritesParameters(Softmax):
    """As if they were its own."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        params["w"][...] -= out["w"]
        return loss


class Leaves(Faulty):
    def fail(self, loss: float, out: Arrays) -> float:
        note()
        sys.exit(0)


class RaisesInEvaluate(Softmax):
    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        if is_last():
            note()
            raise KeyError("a mistake of mine")
        return super().evaluate(params, batch)


class RaisesWhenMade(Softmax):
    """On the last rank only."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if is_last():
            raise KeyError("a mistake of mine")


class LeavesWhenMade(Softmax):
    def __init__(self, *args: Any) -> None:
        sys.exit(3)
