"""An MLP on handwritten digits by JAX; in sync it is that of plain JAX over the same batches."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpips
import mpips.jax as mj
from mpips.config import Config
from mpips.datasets import open_dataset

WORLD = MPI.COMM_WORLD
EPOCHS, BATCH = 12, 32
with open_dataset(Config()) as digits:
    assert digits.test is not None
    loaded = [part.load(0, part.n, np.dtype("f4")) for part in (digits.train, digits.test)]
DATA, HELD_OUT = ((x.reshape(-1, 64), y) for x, y in loaded)
X, Y = DATA
SHAPES = (64, 64), (64, 32), (32, 10)
TRACED: list[tuple[int, ...]] = []


def predict(params: Any, x: jax.Array) -> jax.Array:
    """Return logits; the last layer has no activation."""
    for layer in params["layers"][:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params["layers"][-1]["w"] + params["layers"][-1]["b"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    TRACED.append(x.shape)
    logits = jax.nn.log_softmax(predict(params, x))
    return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()


def means(params: Any, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Return loss and accuracy."""
    right = (predict(params, x).argmax(1) == y).mean()
    return {"loss": loss(params, x, y), "accuracy": right}


def start() -> dict[str, list[dict[str, jax.Array]]]:
    """Return the initial parameters."""
    keys = zip(jax.random.split(jax.random.key(0), len(SHAPES)), SHAPES, strict=True)
    weights = [jax.nn.initializers.he_normal()(key, shape) for key, shape in keys]
    return {"layers": [{"w": w, "b": jnp.zeros(w.shape[1])} for w in weights]}


def options(mode: str, out: Path) -> dict[str, object]:
    """Return what all runs have in common."""
    return {"mode": mode, "batch_size": BATCH, "epochs": EPOCHS, "out": out, "quiet": True}


def learns(mode: str, out: Path) -> None:
    """Reach what an MLP reaches on the digits."""
    TRACED.clear()
    how = options(mode, out / mode) | {"schedule": "cosine"}
    result = mj.run(loss, start(), DATA, mpips.Adam(4e-3), evaluate=means, held_out=HELD_OUT, **how)
    accuracy = result.summary["accuracy"]
    assert accuracy > 0.88, (mode, accuracy)
    assert result.summary["samples"] == EPOCHS * len(X)
    assert jax.tree.structure(result.params) == jax.tree.structure(start())
    assert abs(float(means(result.params, *HELD_OUT)["accuracy"]) - accuracy) < 1e-6
    assert len(TRACED) <= 2 + 3 + 1, f"once for each size of batch, not each batch: {TRACED}"


def equals_plain_jax(out: Path) -> None:
    """Compare sync, in a loop of one's own, with one process of JAX over the same batches."""
    gradient, steps = mj.value_and_grad(loss, start()), list[np.ndarray]()

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(DATA):
            steps.append(batch.ids)
            value = gradient(worker.pull(), batch, worker.grads)
            worker.push(value)

    rate = 0.1
    arrays = mj.arrays(start())
    assert set(arrays) == {f"layers/{k}/{name}" for k in range(3) for name in "wb"}
    result = mpips.run(train, arrays, mpips.SGD(rate), **options("sync", out / "plain"))
    params = start()
    step = jax.jit(jax.grad(loss))
    parts = [part for part in WORLD.allgather(steps) if part]
    longest = max(map(len, parts))
    for k in range(longest):
        ids = np.concatenate([part[k] for part in parts if k < len(part)])
        grads = step(params, X[ids], Y[ids])
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    assert longest == result.summary["global_step"]
    expected, found = mj.arrays(params), mj.arrays(mj.tree(result.params, start()))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, rtol=1e-5, err_msg=name)


def threads() -> int:
    """Return how many threads XLA computes in."""
    names = [Path(f"/proc/self/task/{k}/comm") for k in os.listdir("/proc/self/task")]
    return sum("XLAEigen" in name.read_text() for name in names)


def main(folder: Path) -> None:
    """Run all."""
    jnp.zeros(1).block_until_ready()  # XLA starts its threads
    share = max(1, len(os.sched_getaffinity(0)) // WORLD.size)
    assert threads() == share, threads()
    for mode in ("async", "sync"):
        learns(mode, folder)
    equals_plain_jax(folder)
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
