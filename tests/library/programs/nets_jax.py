"""A run of a net of JAX on three ranks."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import mpips.jax as mj
from tests.problems import losses

WORLD = MPI.COMM_WORLD
EPOCHS = 8
X = np.random.default_rng(0).normal(size=(250, 8)).astype("f4")
Y = X[:, :3].argmax(1)
FALLING = optax.cosine_decay_schedule(0.03, EPOCHS * 16)  # it counts the updates of all workers
RULE = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(FALLING))
START = losses.init(np.random.default_rng(0), SimpleNamespace(x_shape=(8,), classes=3))
TRACED: list[tuple[int, ...]] = []


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    TRACED.append(x.shape)
    return losses.loss(params, x, y)


def main(folder: Path) -> None:
    jnp.zeros(1).block_until_ready()  # XLA starts its threads
    names = [Path(f"/proc/self/task/{k}/comm") for k in os.listdir("/proc/self/task")]
    threads = sum("XLAEigen" in name.read_text() for name in names)
    assert threads == max(1, len(os.sched_getaffinity(0)) // WORLD.size), threads
    result = mj.run(
        loss, START, (X, Y), RULE, evaluate=losses.evaluate, held_out=(X, Y), mode="async",
        out=folder / "run", batch_size=16, epochs=EPOCHS, quiet=True,
    )  # fmt: skip
    accuracy = result.summary["accuracy"]
    assert accuracy > 0.85, accuracy
    assert result.summary["samples"] == EPOCHS * len(X)
    assert jax.tree.structure(result.params) == jax.tree.structure(START)
    assert abs(float(losses.evaluate(result.params, X, Y)["accuracy"]) - accuracy) < 1e-6
    assert len(TRACED) <= 2, f"once for each size of batch, not each batch: {TRACED}"
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
