"""Models whose gradient is right, or wrong in one way, or that cannot be checked."""

import numpy as np

from mpips.datasets import Batch
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP


class Negative(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["w2"][...] *= -1
        return loss


class SumOfTheBatch(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["b1"][...] *= len(batch)
        return loss


class Forgotten(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["b2"][...] = 0
        return loss


class DecayInTheLossAlone(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        return super().loss_and_grad(params, batch, out) + 0.01 * float((params["w1"] ** 2).sum())


class OneElement(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["b2"][3] *= 1.01
        return loss


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


class NegativeInSingle(SinglePrecision):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["w1"][...] *= -1
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


class LeftOut(MLP):
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["b1"][...] = np.nan
        return loss
