"""Runs of programs with ranks that evaluate: the result is whole there too."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.checkpoint import open_checkpoint
from mpips.checkpoint.files import step_folder
from mpips.tools import trace

WORLD = MPI.COMM_WORLD
HELD_OUT, EVERY = 30, {"eval_every": 0.5, "keep": 1000, "keep_best": True, "quiet": True}
STALE: dict[str, Any] = {"patience": 2, "epochs": 10**6}


def means(params: Any, batch: Any) -> dict[str, float]:
    """Return the loss of a batch of numbers: their mean distance to the parameter."""
    return {"loss": float(np.abs(batch.x - params["w"][0]).mean())}


def make_train(out: Path, enough: float = np.inf) -> Callable[[mpips.Worker], None]:
    """Return a loop that stops once `enough` evaluations are known, however long they take."""

    def train(worker: mpips.Worker) -> None:
        """Draw the parameter towards 2, which no held-out number is beyond."""
        for _ in worker.batches(40, batch_size=4):
            time.sleep(0.01)
            worker.grads["w"][:] = worker.pull()["w"] - 2
            worker.push(loss=1.0)
            if len(evaluations(out)) >= enough:
                worker.stop()

    return train


def evaluations(out: Path) -> list[dict[str, Any]]:
    """Return the evaluations that a run has noted in whole lines; it may be running."""
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    noted = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in noted if line["kind"] == "eval"]


def alike(result: mpips.Result, evaluators: int) -> list[dict[str, Any]]:
    """Check that all ranks have one result; returns the lines of its evaluations."""
    told = result.params["w"].tolist(), dict(result.summary), result.reason, str(result.out)
    for other in WORLD.allgather(told):
        assert other == told, (other, told)
    assert result.summary["evaluators"] == evaluators
    return evaluations(result.out)


def numbers(out: Path, mode: str, evaluators: int) -> None:
    """Compare a curve with the checkpoints, and have a run end by patience."""
    x = np.linspace(-1, 1.5, HELD_OUT)
    how: dict[str, Any] = {**EVERY, "mode": mode, "evaluators": evaluators, "out": out}
    how["trace"] = True
    held: dict[str, Any] = {"evaluate": means, "held_out": lambda: x}
    sgd = mpips.SGD(0.03)
    start = {"w": np.zeros(1)}
    result = mpips.run(make_train(out, enough=2), start, sgd, epochs=10**6, **held, **how)
    curve = alike(result, evaluators)
    assert len(curve) > 1, (result.reason, curve)
    for line in curve:
        w = open_checkpoint(step_folder(out / "checkpoints", line["step"])).read_params()
        assert abs(line["loss"] - np.abs(x - w).mean()) < 1e-6, line
    best = min(curve, key=lambda line: line["loss"])
    assert open_checkpoint(out / "best").step == best["step"]
    result = mpips.run(make_train(out), start, sgd, **held, **how, **STALE, resume=True)
    assert result.reason == "patience", result.reason
    assert len(alike(result, evaluators)) > len(curve)
    WORLD.barrier()
    if WORLD.rank == 0:
        lanes = trace.make([str(out)]).splitlines()[:3]
        found = [lane for lane in lanes if re.search("evaluator .*reading a checkpoint", lane)]
        print(f"{len(found)} evaluators read checkpoints", flush=True)


def main(folder: Path) -> None:
    """Run all; then what cannot be."""
    numbers(folder / "async", "async", 1)
    numbers(folder / "sync", "sync", 2)
    refused = {
        "expected samples to evaluate": {},
        r"held-out samples \d+ on rank": {"evaluate": means, "held_out": 9 + WORLD.rank // 2},
    }
    for k, (text, more) in enumerate(refused.items()):
        options = {"evaluators": 1, "out": folder / f"refused-{k}", **more}
        with pytest.raises(mpips.UserError, match=text):
            mpips.run(make_train(folder), {"w": np.zeros(1)}, **options)
    print("evaluators are done", flush=True)
