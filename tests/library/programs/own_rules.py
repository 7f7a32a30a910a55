"""Update rules of one's own in runs of each kind, beside the rules that come with mpips."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.checkpoint import need_whole
from mpips.checkpoint.exchange import export

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from jobs.lion_rule import Lion  # noqa: E402
from jobs.muon import Muon, serial  # noqa: E402

OUT = Path(sys.argv[1])
X = np.random.default_rng(0).normal(size=(60, 40)).astype("f4")
Y = X @ np.linspace(-1, 1, 40).astype("f4")
PARAMS = {"w": np.zeros(40, "f4"), "bias": np.zeros(3, "f4")}
NUMBERS = {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.01}


class Adagrad(mpips.UpdateRule):
    lr: float = 0.02
    eps: float = 1e-8

    @staticmethod
    def step(w: float, g: float, total: float, /, lr: float, eps: float) -> tuple[float, float]:
        total = total + g * g
        return w - lr * g / (math.sqrt(total) + eps), total


class Mean(mpips.UpdateRule):
    """Has a state of a name that jobs have."""

    lr: float = 0.1

    @staticmethod
    def step(w: float, g: float, ema: float, /, lr: float) -> tuple[float, float]:
        return w - lr * g, (ema + g) / 2


def gradient(params: Any, batch: Any, out: Any) -> float:
    error = batch.x @ params["w"] + params["bias"].sum() - batch.y
    out["w"][:] = batch.x.T @ error / len(batch)
    out["bias"][:] = error.mean()
    return float((error**2).mean() / 2)


def train(worker: mpips.Worker) -> None:
    for batch in worker.batches((X, Y), batch_size=5):
        worker.step(gradient, batch)


def run(optimizer: Any, out: str, epochs: int = 3, **options: Any) -> np.ndarray:
    groups = [mpips.Group("bias", lr=0.5, weight_decay=0)]
    result = mpips.run(
        train, PARAMS, optimizer, out=str(OUT / out), epochs=epochs, groups=groups, quiet=True,
        **options,
    )  # fmt: skip
    return np.concatenate(list(result.params.values()))


def same(name: str, **options: Any) -> None:
    """Check that both rules make the same run, bit for bit."""
    ours = run(mpips.Lion(1e-2, **NUMBERS), f"{name}-built-in", **options)
    own = run(Lion(1e-2, **NUMBERS), f"{name}-own", **options)
    assert np.array_equal(ours, own), name
    assert np.abs(own).max() > 0.05, "it has learnt"


def resumed() -> None:
    """Check a run that goes on with fewer servers."""
    own = Lion(1e-2, **NUMBERS)
    run(own, "parts", 1, mode="async", servers=2)
    run(own, "parts", mode="async", servers=1, resume=True)
    saved, _ = need_whole(OUT / "parts")
    assert saved.slot_names == ("m",)
    assert np.abs(saved.read_slot("m")).max() > 0


def rows(optimizer: Any, out: str) -> np.ndarray:
    table = mpips.Table(30, 4, init=mpips.Zeros(), optimizer=optimizer)

    def train(worker: mpips.Worker) -> None:
        ids = np.array([1, 5, 5, 29])
        for _ in worker.batches(20, batch_size=5):
            worker.pull_rows("t", ids)
            worker.push_rows("t", ids, np.outer(np.arange(4) - 1.5, [1.0, -2.0, 0.5, 3.0]))
            worker.grads["w"][:] = 0
            worker.push(0.0)

    options: dict[str, Any] = {"mode": "async", "servers": 2, "epochs": 4, "quiet": True}
    params = {"w": np.zeros(2, "f4")}
    options |= {"tables": {"t": table}, "out": str(OUT / out)}
    return mpips.run(train, params, mpips.SGD(), **options).rows("t", np.array([1, 5, 29, 7]))


def averaged() -> None:
    """Check averages against the parameters after each update, over a resume and other servers."""
    seen: list[np.ndarray] = []

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches((X, Y), batch_size=5):
            seen.append(np.concatenate([*worker.pull().values()]))
            worker.step(gradient, batch)

    options: dict[str, Any] = {"ema": 0.75, "quiet": True, "out": str(OUT / "averaged")}
    for epochs in (1, 3):
        resume = {"resume": True} if epochs > 1 else {}
        result = mpips.run(
            train, PARAMS, Lion(1e-2), mode="sync", epochs=epochs, **options, **resume
        )
    mean, *after = *seen, np.concatenate([*result.params.values()])
    for params in after:
        mean = np.float32(0.75) * mean + np.float32(0.25) * params
    found = np.concatenate([*result.average.values()])
    assert len(seen) == 12, len(seen)
    assert np.allclose(found, mean, rtol=1e-6, atol=1e-9), (found, mean)
    file = OUT / f"average-{MPI.COMM_WORLD.rank}.npz"
    export(need_whole(result.out)[0], file, average=True)
    arrays = np.load(file)
    assert set(arrays) == {"params/w", "params/bias"}
    assert np.array_equal(np.concatenate([arrays["params/w"], arrays["params/bias"]]), found)
    for servers in (1, 2):
        again = mpips.run(
            train, PARAMS, Lion(1e-2), mode="async", servers=servers, epochs=3, resume=True,
            **options,
        )  # fmt: skip
        assert np.array_equal(np.concatenate([*again.average.values()]), found)


def arrays(name: str, epochs: tuple[int, ...] = (3,), **options: Any) -> dict[str, np.ndarray]:
    """Return the arrays that Muon has made, in a run that each epoch but the last interrupts."""
    shapes = {"a": (6, 4), "b": (5,), "c": (3, 7), "d": (4, 4), "e": (40, 2)}
    rng = np.random.default_rng(5)
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = [{n: rng.normal(size=shape) for n, shape in shapes.items()} for _ in range(12)]

    left = iter(grads)

    def train(worker: mpips.Worker) -> None:
        for _ in worker.batches(20 * worker.workers, batch_size=5):
            grad = next(left)
            for name, out in worker.grads.items():
                out[...] = grad[name]
            worker.push(0.0)

    for k, until in enumerate(epochs):
        again = {"resume": True} if k else {}
        more = {"servers": 2 - k, "spares": k} if "mode" not in options else {}
        given = {"mode": "async", **more, **options, **again}
        result = mpips.run(
            train, params, Muon(0.05), epochs=until, quiet=True, out=str(OUT / name), **given
        )
    del shapes["b"]  # no matrix
    matrices, *of_matrices = ({n: each[n] for n in shapes} for each in (params, *grads))
    expected = serial(matrices, of_matrices, 0.05)
    for n, array in expected.items():
        np.testing.assert_allclose(result.params[n], array, rtol=1e-6, err_msg=f"{name}: {n}")
    return dict(result.params)


def whole_arrays() -> None:
    """Check a rule of whole arrays in each mode, over a resume and other servers."""
    found = [
        arrays("muon"),
        arrays("muon-resumed", (1, 3)),
        arrays("muon-sync", mode="sync"),
        arrays("muon-clipped", mode="sync", clip=1e9, ema=0.9),
        arrays("muon-nodes", mode="sync", node_size=1),
        arrays("muon-remote", mode="async", servers=2, node_size=1),
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other["b"], found[0]["b"], rtol=1e-12)


averaged()
whole_arrays()
same("sync", mode="sync")
same("allreduce", mode="sync", reduce="allreduce", clip=0.5)
same("ssp", mode="ssp", staleness_bound=0, servers=2)
same("local", mode="local_sgd")
resumed()
assert np.array_equal(rows(Adagrad(0.1), "own-rows"), rows(mpips.Adagrad(0.1), "rows"))
with pytest.raises(mpips.UserError, match=r"codec 'powersgd' with muon.py:Muon, which takes whole"):
    run(Muon(), "packed", mode="sync", codec="powersgd", node_size=1)
with pytest.raises(mpips.UserError, match=r"state 'ema' of own_rules.py:Mean, which the job has"):
    run(Mean(), "mean", mode="sync", ema=0.5)
print("all is well")
