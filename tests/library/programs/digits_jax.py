"""An MLP on handwritten digits by JAX, beside the built-in one: the same start and the same data.

In sync the parameters are compared with those of plain JAX over the same batches.
"""

import os
import sys
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpips
import mpips.jax as mj
from mpips.config import Config
from mpips.datasets import DataInfo
from mpips.datasets.digits import PATH
from mpips.problems import load_problem

MODES = ("async", "ssp", "sync", "local_sgd")
WORLD = MPI.COMM_WORLD
TRAIN, EPOCHS, BATCH = 1437, 12, 32
ADAM = mpips.Adam(4e-3)
COSINE = {"schedule": "cosine"}  # at a constant rate the last of stale updates may go far astray
with h5py.File(PATH) as file:
    ORDER = np.random.default_rng(0).permutation(len(file["x"]))  # writers are mixed
    X = file["x"][()].reshape(-1, 64)[ORDER].astype("f4") / 16
    Y = file["y"][()][ORDER].astype("i4")
DATA, HELD_OUT = (X[:TRAIN], Y[:TRAIN]), (X[TRAIN:], Y[TRAIN:])
INFO = DataInfo("digits", TRAIN, len(X) - TRAIN, (64,), (), 10, "digits")
BUILT_IN = load_problem("mlp", INFO, Config(hidden=(64, 32)))
START = BUILT_IN.init(np.random.default_rng(0))
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


def start() -> dict[str, list[dict[str, np.ndarray]]]:
    """Return the built-in model's start as a pytree."""
    weights = list(START.values())
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return {"layers": [{"w": jnp.asarray(w), "b": jnp.asarray(b)} for w, b in pairs]}


def built_in(mode: str, out: Path) -> mpips.Result:
    """Train NumPy's."""

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(DATA):
            worker.step(BUILT_IN.loss_and_grad, batch)

    how = options(mode, out) | COSINE
    return mpips.run(train, START, ADAM, **how, evaluate=BUILT_IN.evaluate, held_out=HELD_OUT)


def options(mode: str, out: Path) -> dict[str, object]:
    """Return what all runs have in common."""
    return {"mode": mode, "batch_size": BATCH, "epochs": EPOCHS, "out": out, "quiet": True}


def learns(mode: str, out: Path) -> None:
    """Reach in each mode what the built-in model reaches with as many samples."""
    TRACED.clear()
    how = options(mode, out / f"jax-{mode}") | COSINE
    result = mj.run(loss, start(), DATA, ADAM, **how, evaluate=means, held_out=HELD_OUT)
    beside = built_in(mode, out / f"numpy-{mode}")
    ours, theirs = result.summary["accuracy"], beside.summary["accuracy"]
    if WORLD.rank == 0:
        print(f"{mode}: jax {ours:.4f}, built in {theirs:.4f}", flush=True)
    assert theirs > 0.9, theirs
    assert ours > theirs - 0.04, (mode, ours, theirs)
    assert result.summary["samples"] == beside.summary["samples"] == EPOCHS * TRAIN
    assert jax.tree.structure(result.params) == jax.tree.structure(start())
    found = means(result.params, *HELD_OUT)["accuracy"]
    assert abs(float(found) - ours) < 1e-6
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
    for mode in MODES:
        learns(mode, folder)
    equals_plain_jax(folder)
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
