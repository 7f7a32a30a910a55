"""Runs of a net of JAX on three ranks; in sync one is that of plain JAX over the same batches."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import mpips
import mpips.jax as mj

WORLD = MPI.COMM_WORLD
HOW: dict[str, Any] = {"batch_size": 16, "epochs": 8, "quiet": True}
X = np.random.default_rng(0).normal(size=(250, 8)).astype("f4")
Y = X[:, :3].argmax(1)
FALLING = optax.cosine_decay_schedule(0.03, 8 * 16)  # it counts the updates of all workers
RULE = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(FALLING))
TRACED: list[tuple[int, ...]] = []


def predict(params: Any, x: jax.Array) -> jax.Array:
    first, last = params["layers"]
    return jnp.tanh(x @ first["w"] + first["b"]) @ last["w"] + last["b"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    TRACED.append(x.shape)
    logits = jax.nn.log_softmax(predict(params, x))
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()


def means(params: Any, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    right = (predict(params, x).argmax(1) == y).mean()
    return {"loss": loss(params, x, y), "accuracy": right}


def start() -> dict[str, list[dict[str, jax.Array]]]:
    keys = zip(jax.random.split(jax.random.key(0)), ((8, 16), (16, 3)), strict=True)
    weights = [jax.nn.initializers.he_normal()(key, shape) for key, shape in keys]
    return {"layers": [{"w": w, "b": jnp.zeros(w.shape[1])} for w in weights]}


def learns(out: Path) -> None:
    given = {"evaluate": means, "held_out": (X, Y), "mode": "async", "out": out, **HOW}
    result = mj.run(loss, start(), (X, Y), RULE, **given)
    accuracy = result.summary["accuracy"]
    assert accuracy > 0.85, accuracy
    assert result.summary["samples"] == HOW["epochs"] * len(X)
    assert jax.tree.structure(result.params) == jax.tree.structure(start())
    assert abs(float(means(result.params, X, Y)["accuracy"]) - accuracy) < 1e-6
    assert len(TRACED) <= 2 + 3 + 1, f"once for each size of batch, not each batch: {TRACED}"


def equals_plain_jax(out: Path) -> None:
    """Compare sync, in a loop of one's own, with one process of JAX over the same batches."""
    gradient, steps = mj.value_and_grad(loss, start()), list[np.ndarray]()

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches((X, Y)):
            steps.append(batch.ids)
            worker.push(gradient(worker.pull(), batch, worker.grads))

    given = {"mode": "sync", "out": out, **HOW}
    result = mpips.run(train, mj.arrays(start()), mpips.SGD(0.1), **given)
    params, step = start(), jax.jit(jax.grad(loss))
    parts = [part for part in WORLD.allgather(steps) if part]
    longest = max(map(len, parts))
    for k in range(longest):
        ids = np.concatenate([part[k] for part in parts if k < len(part)])
        grads = step(params, X[ids], Y[ids])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert longest == result.summary["global_step"]
    expected, found = mj.arrays(params), mj.arrays(mj.tree(result.params, start()))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, rtol=1e-5, err_msg=name)


def main(folder: Path) -> None:
    jnp.zeros(1).block_until_ready()  # XLA starts its threads
    names = [Path(f"/proc/self/task/{k}/comm") for k in os.listdir("/proc/self/task")]
    threads = sum("XLAEigen" in name.read_text() for name in names)
    assert threads == max(1, len(os.sched_getaffinity(0)) // WORLD.size), threads
    learns(folder / "async")
    equals_plain_jax(folder / "plain")
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
