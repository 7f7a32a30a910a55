"""`worker.evaluate` in the loop and after it, in every mode."""

from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips

N, HELD_OUT, STEPS = 120, 1000, 10
MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "remote": {"mode": "async", "node_size": 1},
    "ssp": {"mode": "ssp", "staleness_bound": 1},
    "sync": {"mode": "sync"},
    "nodes": {"mode": "sync", "node_size": 1},
    "few": {"mode": "sync", "steps": STEPS + 1},
    "local": {"mode": "local_sgd", "local_steps": 3},
    "easgd": {"mode": "easgd", "tau": 2},
    "backup": {"mode": "sync", "servers": 1, "backup_workers": 1},
}
TOGETHER = ("sync", "nodes", "few")


def main(out: Path) -> None:
    """Evaluate with a batch in work, between two, and after the last."""
    for name, options in MODES.items():
        seen: list[int] = []

        def metrics(params: Any, batch: Any, seen: list[int] = seen) -> dict[str, float]:
            seen.append(len(batch))
            return {"loss": float((params["w"].sum() + batch.ids).mean())}

        def value(params: Any) -> float:
            return float(params["w"].sum()) + (HELD_OUT - 1) / 2

        def train(worker: mpips.Worker, name: str = name, seen: list[int] = seen) -> None:
            n = N + (name == "few")  # its last batch is one worker's alone
            for k, batch in enumerate(worker.batches(n, batch_size=4)):
                shared = name in TOGETHER and k < STEPS
                part = HELD_OUT // worker.workers if shared else HELD_OUT
                if name in TOGETHER or (worker.id, k) == (0, 3):
                    params = worker.pull()
                    before = value(params)
                    found = worker.evaluate(metrics, HELD_OUT)
                    assert abs(found["loss"] - before) < 1e-3, (name, found, before)
                    assert abs(sum(seen) - part) <= 1, (name, seen)
                    seen.clear()
                worker.grads["w"][:] = 0.01 * (1 + worker.id) * len(batch)
                worker.push(1.0)
                if name in TOGETHER or worker.id == 1:
                    found = worker.evaluate(metrics, HELD_OUT)
                    assert abs(sum(seen) - part) <= 1, (name, seen)
                    seen.clear()
                    if name in TOGETHER:
                        assert found["loss"] < before, (name, found, before)
            last = worker.evaluate(metrics, HELD_OUT)
            assert abs(last["loss"] - value(worker.pull())) < 1e-3, name
            assert abs(sum(seen) - HELD_OUT // worker.workers) <= 1, (name, seen)

        given = {"mode": "async", "steps": STEPS, **options}
        mpips.run(train, {"w": np.zeros(5)}, mpips.SGD(0.1), out=out / name, quiet=True, **given)
    print(f"rank {MPI.COMM_WORLD.rank}: {len(MODES)} modes", flush=True)
