"""A multi-layer perceptron in JAX learns the handwritten digits.

    mpirun -n 4 python jobs/mlp_jax.py --mode ssp
    python jobs/mlp_jax.py --alone

Also --mode async, sync and local_sgd. --alone is plain JAX in one process, with as many samples
and the same measure; it needs no mpirun. Expect 97 to 99 % held-out accuracy of each.
"""

import argparse
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpips
import mpips.jax as mj
from mpips.datasets.built_in import PATH

RATE, BATCH, TRAIN, LAYERS = 3e-3, 16, 1437, (64, 64, 32, 10)


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return samples to train on, and held-out ones; writers are mixed."""
    rows = np.load(PATH)
    x, y = rows[:, :-1].astype("f4") / 16, rows[:, -1].astype("i4")
    order = np.random.default_rng(0).permutation(len(x))
    train, held_out = order[:TRAIN], order[TRAIN:]
    return (x[train], y[train]), (x[held_out], y[held_out])


def start() -> list[dict[str, jax.Array]]:
    """Return the initial parameters."""
    keys = jax.random.split(jax.random.key(0), len(LAYERS))
    return [
        {"w": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for key, n, m in zip(keys, LAYERS, LAYERS[1:], strict=False)
    ]


def predict(params: Any, x: jax.Array) -> jax.Array:
    """Return logits."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    logits = jax.nn.log_softmax(predict(params, x))
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()


def means(params: Any, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Return means over a batch."""
    right = (predict(params, x).argmax(1) == y).mean()
    return {"loss": loss(params, x, y), "accuracy": right}


@jax.jit
def adam(params: Any, slots: Any, k: int, rate: float, x: Any, y: Any) -> tuple[Any, Any]:
    """Return parameters and slots after update k, from 1 on (Kingma and Ba, ICLR 2015)."""
    grads = jax.grad(loss)(params, x, y)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, slots[0], grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, slots[1], grads)
    rate = rate * jnp.sqrt(1 - 0.999**k) / (1 - 0.9**k)
    return jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v), (m, v)


def alone(args: argparse.Namespace) -> float:
    """Train in one process of plain JAX; returns the held-out accuracy."""
    (x, y), held_out = digits()
    params, rng, k = start(), np.random.default_rng(1), 0
    slots = jax.tree.map(jnp.zeros_like, (params, params))
    steps = args.epochs * math.ceil(len(x) / BATCH)
    for _ in range(args.epochs):
        order = rng.permutation(len(x))
        for begin in range(0, len(x), BATCH):
            rate = RATE * (0.5 + 0.5 * math.cos(math.pi * k / steps))
            k, ids = k + 1, order[begin : begin + BATCH]
            params, slots = adam(params, slots, k, rate, x[ids], y[ids])
    return float(means(params, *held_out)["accuracy"])


def together(args: argparse.Namespace) -> tuple[float, int]:
    """Train with mpips on all ranks; returns the held-out accuracy, and the exit code."""
    data, held_out = digits()
    result = mj.run(
        loss, start(), data, mpips.Adam(RATE), mode=args.mode, batch_size=BATCH,
        epochs=args.epochs, schedule="cosine", out=args.out, evaluate=means, held_out=held_out,
    )  # fmt: skip
    return result.summary["accuracy"], result.code


def main(argv: list[str] | None = None) -> int:
    """Train, and print the held-out accuracy; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async", choices=("async", "ssp", "sync", "local_sgd"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="", metavar="DIR", help="by default a new one in runs")
    parser.add_argument("--alone", action="store_true", help="plain JAX in one process")
    args = parser.parse_args(argv)
    accuracy, code = (alone(args), 0) if args.alone else together(args)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{'alone' if args.alone else args.mode}: accuracy {accuracy:.4f}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
