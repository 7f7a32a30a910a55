"""The built-in softmax regression as functions, for tests."""

import math

import numpy as np

from mpips.datasets import Batch, DataInfo
from mpips.problems.base import Arrays
from mpips.problems.mlp import accuracy, cross_entropy


def init(rng: np.random.Generator, data: DataInfo) -> dict[str, np.ndarray]:
    """Return zeros."""
    assert data.classes is not None
    return {"w": np.zeros((math.prod(data.x_shape), data.classes)), "b": np.zeros(data.classes)}


def logits(params: Arrays, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = x.reshape(len(x), -1) @ params["w"] + params["b"]
    return found


def loss(params: Arrays, batch: Batch, out: Arrays) -> float:
    """Return the mean cross entropy, and write its gradient."""
    delta = logits(params, batch.x)
    found = cross_entropy(delta, batch.y)
    np.matmul(batch.x.reshape(len(batch), -1).T, delta, out=out["w"])
    np.sum(delta, axis=0, out=out["b"])
    return found


def evaluate(params: Arrays, batch: Batch) -> dict[str, float]:
    z = logits(params, batch.x)
    right = accuracy(z, batch.y)  # before the logits are overwritten
    return {"loss": cross_entropy(z, batch.y), "accuracy": right}
