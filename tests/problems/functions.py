"""The built-in softmax regression as functions, for tests."""

import math

import numpy as np

from mpips.datasets import Batch, DataInfo
from mpips.problems.base import Arrays, affine, affine_grad, flat_inputs
from mpips.problems.losses import accuracy, cross_entropy


def init(rng: np.random.Generator, data: DataInfo) -> dict[str, np.ndarray]:
    """Return zeros."""
    assert data.classes is not None
    return {"w": np.zeros((math.prod(data.x_shape), data.classes)), "b": np.zeros(data.classes)}


def logits(params: Arrays, x: np.ndarray) -> np.ndarray:
    return affine(x, params["w"], params["b"], np.empty((len(x), params["b"].size), x.dtype))


def loss(params: Arrays, batch: Batch, out: Arrays) -> float:
    """Return the mean cross entropy, and write its gradient."""
    x = flat_inputs(batch.x)
    delta = logits(params, x)
    found = cross_entropy(delta, batch.y)
    affine_grad(x, delta, out["w"], out["b"])
    return found


def evaluate(params: Arrays, batch: Batch) -> dict[str, float]:
    z = logits(params, flat_inputs(batch.x))
    right = accuracy(z, batch.y)  # before the logits are overwritten
    return {"loss": cross_entropy(z, batch.y), "accuracy": right}
