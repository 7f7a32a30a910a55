"""What only several ranks can refuse: the same error on every rank, before anything has begun."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips
from mpips.library.start import limit_of

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
INIT = {"w": np.zeros(4)}
ITEM = mpips.Table(rows=5, dim=2)
HUGE = mpips.Table(1 << 36, 64, capacity="full")


def train(worker: mpips.Worker) -> None:
    for batch in worker.batches(100):
        worker.grads["w"][:] = 0
        worker.push(float(len(batch)))


def run(out: Path, params: Any = INIT, train: Any = train, **options: Any) -> mpips.Result:
    return mpips.run(train, params, mpips.SGD(), out=out, **options)


def loop(*args: Any, **options: Any) -> Callable[[mpips.Worker], object]:
    """Return a training function that begins with those arguments of `batches`."""
    return lambda worker: next(iter(worker.batches(*args, **options)))


def changing(by: float) -> tuple[dict[str, np.ndarray], Callable[[mpips.Worker], object]]:
    """Return parameters, and a training function that adds to them before its loop."""
    params = {"w": np.zeros(4)}

    def add_and_train(worker: mpips.Worker) -> None:
        params["w"] += by
        train(worker)

    return params, add_and_train


CHANGED = dict(zip(("params", "train"), changing(RANK), strict=True))
# What is said, and the options of the run that it is said of.
CASES: dict[str, dict[str, Any]] = {
    "lr -1.0, expected a number > 0": {"lr": -1.0 if RANK == 1 else 0.1},
    "clip 2.0 on rank 1, expected 1.0, as on rank 0": {"clip": 1.0 + RANK},
    "keep 5 on rank 2, expected not given, as on rank 0": {"keep": 5} if RANK == 2 else {},
    "batch_size 10 on rank 2, expected 9, as on rank 1": {"train": loop(100, batch_size=8 + RANK)},
    r"params\['w'\] of dtype <U4": {"params": {"w": "zero" if RANK == 1 else np.zeros(4)}},
    r"\{'w': \(2,\)\} on rank 1": {"params": {"w": np.zeros(1 + RANK)}},
    r"'w' that rank . has changed before the loop, expected the same on every worker, as": CHANGED,
    "mode 'hybrid' without tables, expected a problem with rows": {"mode": "hybrid"},
    "init_from without 'w', expected an array for each parameter": {"init_from": {"b": 1.0}},
    r"init_from with 'w' of shape \(3,\), expected \(4,\)": {"init_from": {"w": np.zeros(3)}},
    "servers=3 leaves no worker": {"servers": WORLD.size},
    "expected samples to evaluate": {"evaluators": 1},
    r"held-out samples \d+ on rank": {
        "evaluate": lambda params, batch: {"loss": 0.0}, "held_out": 9 + RANK // 2, "evaluators": 1
    },
    "samples 102 on rank 2, expected 101, as on rank 1; give": {"train": loop(100 + RANK)},
    r"tables .*rows=6.* on rank 1, expected .*rows=5.*, as on rank 0": {
        "tables": {"item": mpips.Table(rows=5 + RANK, dim=2)}
    },
    "table 'item' of 68,719,476,736 rows takes .* at most .* nodes": {"tables": {"item": HUGE}},
    "lazy table 'item' of 68,719,476,736 rows on 2 servers.*17 servers": {
        "servers": 2, "tables": {"item": mpips.Table(1 << 36, 64)}
    },
}  # fmt: skip
HYBRID = {"mode": "hybrid", "record": True, "read": "consistent", "codec": "int8", "node_size": 1}
WITH_TABLES: dict[str, dict[str, Any]] = {
    "node_aggregation with tables, on 3 nodes": {"node_size": 1, "node_aggregation": True},
    "init_from with tables": {"init_from": "w.npz"},
    "delay_compensation=0.1 with tables": {"delay_compensation": 0.1},
    "clip 1 in mode 'hybrid', expected clip 0; rows are": {"mode": "hybrid", "clip": 1.0},
    "record with codec 'int8' in mode 'hybrid' on several nodes, expected codec 'none'": HYBRID,
    "tables in mode 'easgd', expected mode async or": {"mode": "easgd", "servers": 1},
    "reduce 'allreduce' with tables": {"mode": "sync", "reduce": "allreduce"},
    "codec 'powersgd' with tables": {"mode": "sync", "codec": "powersgd", "node_size": 1},
    "backup_workers=1 with tables": {"mode": "sync", "backup_workers": 1, "servers": 1},
}


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except mpips.UserError as error:
        return str(error) if type(error) is mpips.UserError else repr(error)
    return "nothing"


def main(folder: Path) -> None:
    """Try all; every rank has the same errors, and the last run goes well."""
    if RANK == 0:
        np.savez("w.npz", w=np.zeros(4))
    assert [limit_of({"timeout": given}) for given in (-1, 2, "2")] == [0, 2, 300], "not checked"
    cases = CASES | {text: {"tables": {"item": ITEM}, **how} for text, how in WITH_TABLES.items()}
    for k, (pattern, options) in enumerate(cases.items()):
        found = set(WORLD.allgather(told(lambda k=k, o=options: run(folder / str(k), **o))))
        assert len(found) == 1, found
        assert re.search(pattern, *found), (pattern, found)
    refusal = told(lambda: mpips.Store(WORLD, INIT, servers=WORLD.size))
    assert "servers=3 leaves no worker" in refusal, refusal
    assert not list(folder.iterdir()), "no folder is left"
    assert run(folder, epochs=1, quiet=True).reason == "epochs"
    for mode in ("async", "sync"):
        params, function = changing(1.5)
        given: dict[str, Any] = {"mode": mode, "epochs": 1, "quiet": True}
        found = run(folder / mode, params, function, **given)
        assert found.params["w"].tolist() == [1.5] * 4, (mode, found.params)
        found = run(folder / f"{mode} given", init_from={"w": np.arange(4)}, **given)
        assert found.params["w"].tolist() == [0, 1, 2, 3], (mode, found.params)
    print("is done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    mpips.run(train, {"w": "zero"})  # what nobody catches
