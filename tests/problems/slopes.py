"""Models whose gradient is right, or wrong in one way, or that cannot be checked."""

from collections.abc import Callable

import numpy as np

from mpips.datasets import Batch
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP


def times(factor: Callable[[Batch], float], name: str, base: type[MLP] = MLP) -> type[MLP]:
    """Return a model whose gradient is multiplied in one array."""

    class Changed(base):  # type: ignore[valid-type, misc]
        def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
            loss: float = super().loss_and_grad(params, batch, out)
            out[name][...] *= factor(batch)
            return loss

    return Changed


class DecayInTheLossAlone(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        return super().loss_and_grad(params, batch, out) + 0.01 * float((params["w1"] ** 2).sum())


class SinglePrecision(MLP):
    """Right, as far as one can see."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        single = {name: array.astype("f4") for name, array in params.items()}
        grads = {name: np.empty(array.shape, "f4") for name, array in out.items()}
        inputs = Batch(batch.x.astype("f4"), batch.y, batch.ids)
        loss = super().loss_and_grad(single, inputs, grads)
        for name, grad in grads.items():
            out[name][...] = grad
        return loss


class Absolute(MLP):
    """A loss that is nothing but kinks, over one sample."""

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        for name, array in params.items():
            np.copyto(out[name], np.sign(array))
        return float(sum(np.abs(array).sum() for array in params.values()))


class Dropout(MLP):
    calls = 0

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        self.calls += 1
        return super().loss_and_grad(params, batch, out) + self.calls


class OneElement(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["b2"][3] *= 1.01
        return loss


Negative = times(lambda batch: -1, "w2")
SumOfTheBatch = times(len, "b1")
Forgotten = times(lambda batch: 0, "b2")
NegativeInSingle = times(lambda batch: -1, "w1", SinglePrecision)
LeftOut = times(lambda batch: np.nan, "b1")
