"""Losses for JAX of any classes, for tests; and what is none."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def init(rng: np.random.Generator, data: Any) -> Any:
    """Return two layers."""
    sizes = ((math.prod(data.x_shape), 16), (16, data.classes))
    return [{"w": rng.normal(0, 0.2, size), "b": np.zeros(size[1])} for size in sizes]


def predict(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x.reshape(len(x), -1) @ params[0]["w"] + params[0]["b"])
    return hidden @ params[1]["w"] + params[1]["b"]


@jax.jit
def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    logits = jax.nn.log_softmax(predict(params, x))
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()


def evaluate(params: Any, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    right = predict(params, x).argmax(1) == y
    return {"loss": loss(params, x, y), "accuracy": right.mean()}


def each(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return predict(params, x).sum(1)


def traced(params: Any, x: jax.Array, y: jax.Array) -> float:
    return float(predict(params, x).sum())


def two(params: Any, x: jax.Array) -> jax.Array:
    return predict(params, x).sum()
