"""What workers do together, in every mode, and what becomes of it when the run is stopped.

All runs are in one program, one after the other, and leave nothing over.
"""

import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.errors import Exit, UserError
from mpips.mpi import abort

WORLD = MPI.COMM_WORLD
N, SIZE, EPOCHS, HELD_OUT = 120, 4, 3, 1000
MODES: dict[str, dict[str, Any]] = {
    "async": {"servers": 1},
    "remote": {"mode": "async", "servers": 1, "node_size": 1},
    "sync": {"evaluators": 1},
    "nodes": {"mode": "sync", "node_size": 1},
    "local_sgd": {"local_steps": 3},
    "easgd": {"servers": 1, "tau": 2},
    "ssp": {"servers": 1, "staleness_bound": 1},
    "backup": {"mode": "sync", "servers": 1, "backup_workers": 1},
}
IN_STEP, BEHIND = ("sync", "nodes"), ("async", "remote", "sync", "nodes", "local_sgd", "easgd")
MADE: Counter[str] = Counter()  # communicators and windows
FREED: Counter[str] = Counter()
PUSHED: Counter[str] = Counter()  # batches of this worker, by mode


def counted(kind: str, base: Any, *names: str) -> Any:
    """Return a class of communicators or windows whose methods count what they make and free."""

    class Counted(base):  # type: ignore[misc]
        def Free(self) -> None:
            super().Free()
            FREED[kind] += 1

    def counting(make: Any) -> Any:
        def method(*args: Any, **options: Any) -> Any:
            found = make(*args, **options)
            MADE[kind] += found != MPI.COMM_NULL
            return Counted(found)

        return method

    for name in names:
        setattr(Counted, name, counting(getattr(base, name)))
    return Counted


SPLITS = ("Dup", "Split", "Split_type", "Create", "Create_group")


def left() -> tuple[int, int]:
    """Return how many files of this process are open and mapped from memory after a run."""
    assert MADE == FREED, (MADE, FREED)
    gc.collect()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    with open("/proc/self/maps") as file:
        mapped = {line.split()[-1] for line in file if "/dev/shm" in line}
    return len(os.listdir("/proc/self/fd")), len(mapped)


class Heard(mpips.Callback):
    def __init__(self) -> None:
        self.losses, self.evaluations = list[float](), list[float]()
        self.epochs, self.checkpoints = list[int](), list[int]()

    def on_step(self, worker: mpips.Worker, loss: float) -> None:
        self.losses.append(loss)

    def on_epoch(self, worker: mpips.Worker, epoch: int) -> None:
        self.epochs.append(epoch)

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        assert step > 0
        self.evaluations.append(metrics["loss"])

    def on_checkpoint(self, step: int) -> None:
        self.checkpoints.append(step)


def check_heard(heard: Heard, pushed: int, result: mpips.Result) -> None:
    """Check what callbacks have heard on this rank, and that all ranks have the same result."""
    assert heard.losses == [1.0] * pushed
    assert heard.epochs == ([*range(EPOCHS)] if pushed else []), heard.epochs
    coordinator = WORLD.rank == 0  # the first server, where there is one
    assert bool(heard.evaluations) == coordinator, heard.evaluations
    assert not coordinator or heard.checkpoints[-1] == result.summary["global_step"]
    mine = result.params["w"].tolist(), dict(result.summary), result.reason, str(result.out)
    assert all(mine == other for other in WORLD.allgather(mine)), "evaluators' too"


def check_log(result: mpips.Result) -> None:
    """Check on rank 0 that every line is there that a worker has logged, in its order."""
    rows = [row for row in map(json.loads, log_of(result).splitlines()) if row["kind"] == "log"]
    workers = result.summary["workers"]
    for worker in range(workers):
        mine = [row for row in rows if row["worker"] == worker]
        assert [row["when"] for row in mine] == ["before", "in", "between", "after"]
        assert mine[0].keys() == {"kind", "time_s", "step", "worker", "when"}
        steps = [row["step"] for row in mine]
        assert steps[0] is None
        assert 0 <= steps[1] <= steps[2] <= steps[3] <= result.summary["global_step"]
        assert (mine[1]["self"], mine[2]["loss"]) == (0.5, "inf")
    assert len(rows) == 4 * workers


def check_values(worker: mpips.Worker) -> None:
    """Bring numbers, arrays and mappings together, and what does not go together."""
    ids = [*range(worker.workers)]
    assert worker.gather((worker.id, "x")) == [(k, "x") for k in ids]
    assert worker.all_reduce(2**70 + worker.id, op="sum") == len(ids) * 2**70 + sum(ids)
    assert np.isnan(worker.all_reduce(1 if worker.id else np.nan, op="max"))
    found = worker.all_reduce(np.full(3, worker.id, "f4"))
    assert found.dtype == np.float32, found
    assert found.tolist() == [np.mean(ids)] * 3
    means = worker.all_reduce({"loss": float(worker.id), "n": np.ones(2)}, op="max")
    assert means["loss"] == ids[-1]
    assert means["n"].tolist() == [1, 1]
    assert type(worker.all_reduce(True, op="min")) in (bool, int)
    names = ["a", "b"] if worker.id % 2 else ["b", "a"]
    assert worker.all_reduce(dict.fromkeys(names, 1.0)) == {"a": 1, "b": 1}
    for value, told in (
        ("x", "all_reduce.. of str, expected a number"), ([1], "of list"), ({"a": {"b": 1}}, "dict")
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            worker.all_reduce(value)
    with pytest.raises(UserError, match=r"unknown op of all_reduce\(\) 'avg', expected one"):
        worker.all_reduce(1, op="avg")
    if worker.workers > 1:
        with pytest.raises(UserError, match=r"by sum .* and on worker . all_reduce\(\) of shape"):
            worker.all_reduce(np.ones(2 + worker.id), op="sum")
    worker.barrier()


def check_evaluation(worker: mpips.Worker, shared: bool) -> float:
    """Evaluate, each worker its part of the samples or this one all; returns the loss."""
    seen = list[int]()

    def metrics(params: Any, batch: Any) -> dict[str, float]:
        seen.append(len(batch))
        return {"loss": float((params["w"].sum() + batch.ids).mean())}

    found = worker.evaluate(metrics, HELD_OUT)["loss"]
    part = HELD_OUT // worker.workers if shared else HELD_OUT
    assert abs(sum(seen) - part) <= 1, (shared, seen)
    return found


def check_own(worker: mpips.Worker, shared: bool) -> float:
    found = check_evaluation(worker, shared)
    assert abs(found - float(worker.pull()["w"].sum()) - (HELD_OUT - 1) / 2) < 1e-3, found
    return found


def train(worker: mpips.Worker, name: str) -> None:
    """Do things together wherever that is possible, and save something; tell of it."""
    worker.log(when="before")
    check_values(worker)
    with pytest.raises(UserError, match=r"save\(\) before the loop"):
        worker.save(np.ones(3), "early.npy")
    batches = worker.batches(N, batch_size=SIZE)
    for epoch in worker.epochs(EPOCHS):
        for k, batch in enumerate(batches):
            worker.grads["w"][:] = len(batch)
            if (epoch, k) == (1, 0):
                worker.log(when="in", self=np.float32(0.5))
            if name in IN_STEP or (worker.id, epoch, k) == (0, 0, 3):
                before = check_own(worker, name in IN_STEP)
            if name in IN_STEP:
                assert len({*worker.gather((epoch, k))}) == 1
                assert worker.all_reduce(len(batch), "sum") == SIZE * worker.workers
            else:
                with pytest.raises(UserError, match=r"gather\(\) (between|in the loop)"):
                    worker.gather(epoch)
            worker.push(1.0)
            PUSHED[name] += 1
            if (epoch, k) == (1, 0):
                worker.log(when="between", loss=np.inf)
            if name in IN_STEP:
                assert check_evaluation(worker, True) < before
            elif (worker.id, epoch) == (1, 0):
                check_evaluation(worker, False)
        if name in BEHIND:
            assert {*worker.gather(epoch)} == {epoch}
            check_values(worker)
        else:
            with pytest.raises(UserError, match="wait for the push of the batch"):
                worker.barrier()
    check_values(worker)
    check_own(worker, True)
    path = worker.save({"w": worker.pull()["w"], "file": 3, "allow_pickle": 4}, "last.npz")
    worker.barrier()
    with np.load(path) as saved:
        assert np.array_equal(saved["w"], worker.pull()["w"])
        assert (saved["file"], saved["allow_pickle"]) == (3, 4)
    for bad in ("summary.json", "../x", "", "checkpoints", "metrics.jsonl.tmp"):
        with pytest.raises(UserError, match="none of the run's own files"):
            worker.save(np.ones(1), bad)
    if worker.once():
        with pytest.raises(UserError, match="of object, expected an array"):
            worker.save(object(), "object.npy")
    worker.print(name, "is", "printed\nonce")
    worker.log(when="after")


def stopped(worker: mpips.Worker, how: str) -> None:
    """Be stopped in an epoch, by one worker or a signal, and come together behind each of them."""
    batches = worker.batches(N, batch_size=SIZE)
    for epoch in worker.epochs(10):
        for k, batch in enumerate(batches):
            worker.grads["w"][:] = len(batch)
            if (epoch, k, worker.id) == (1, 2, worker.workers - 1):
                if how == "signal":
                    os.kill(os.getpid(), signal.SIGUSR1)
                else:
                    worker.stop("one has had enough")
                if how == "left":
                    break
            worker.push(1.0)
        assert {*worker.gather(epoch)} <= {0, 1, 2}
        if (how, epoch, worker.id) == ("behind", 0, 0):
            worker.stop()
        assert worker.all_reduce(1, "sum") <= worker.workers
    found = worker.evaluate(lambda params, batch: {"loss": params["w"][0]}, N)
    assert len({*worker.gather(found["loss"])}) == 1


def uneven(worker: mpips.Worker) -> None:
    """Evaluate in each step; the last batch is one worker's alone."""
    for k, batch in enumerate(worker.batches(N + 1, batch_size=SIZE, epochs=1)):
        shared = k < N // SIZE // worker.workers
        check_own(worker, shared)
        worker.grads["w"][:] = 0.1 * len(batch)
        worker.push(1.0)
        check_evaluation(worker, shared)


def unequal(worker: mpips.Worker) -> None:
    """Go through a round that has two batches for one worker and one for each other."""
    for _ in worker.batches(worker.workers * SIZE + 1, batch_size=SIZE, epochs=1):
        with pytest.raises(UserError, match="in a round with more batches for some of them"):
            worker.barrier()
        assert worker.evaluate(lambda params, batch: {"loss": 2.0}, N) == {"loss": 2.0}
        worker.grads["w"][:] = 1
        worker.push(1.0)


def few(worker: mpips.Worker) -> None:
    """Be refused where all batches that are left may be another worker's."""
    batches = worker.batches(3 * SIZE, batch_size=SIZE)
    for _ in worker.epochs(2):
        for _ in batches:
            worker.grads["w"][:] = 0
            worker.push(1.0)
        if worker.ended is None and worker.workers > 1:
            with pytest.raises(UserError, match="of 3 steps in mode async, expected more than"):
                worker.gather(1)


def means(params: dict[str, np.ndarray], batch: Any) -> dict[str, float]:
    return {"loss": float(params["w"].sum() + batch.ids.mean())}


def plain(worker: mpips.Worker) -> None:
    for _ in worker.batches(N, batch_size=SIZE, epochs=1):
        worker.grads["w"][:] = 1
        worker.push(1.0)


def run(function: Any, out: Path, **options: Any) -> mpips.Result:
    return mpips.run(function, {"w": np.zeros(5)}, mpips.SGD(0.1), out=out, quiet=True, **options)


def log_of(result: mpips.Result) -> str:
    return (result.out / "metrics.jsonl").read_text()


def main(out: Path) -> None:
    """Run all; handlers of signals are behind a run as before it."""
    handler = signal.getsignal(signal.SIGUSR1)
    MPI.COMM_WORLD = counted("communicators", MPI.Intracomm, *SPLITS)(WORLD)
    MPI.Win = counted("windows", MPI.Win, "Create", "Allocate_shared")
    evaluates = {"evaluate": means, "held_out": HELD_OUT, "eval_every": 1}
    for name, options in MODES.items():
        how, heard = {"mode": name, **options, **evaluates}, Heard()
        each = lambda worker, name=name: train(worker, name)  # noqa: E731
        result = run(each, out / name, **how, callbacks=[heard])
        assert result.reason == "epochs", result
        assert sorted(path.name for path in (out / name).glob("last*")) == ["last.npz"]
        check_heard(heard, PUSHED[name], result)
        if WORLD.rank == 0:
            check_log(result)
    found = list[tuple[int, int]]()
    for k in range(2):
        for name, options in MODES.items():
            run(plain, out / f"{name}-{k}", **{"mode": name, **options, **evaluates})
            WORLD.Barrier()
            found.append(left())
    before, after = found[: len(MODES)], found[len(MODES) :]
    for first, later in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True):
        assert max(later) <= max(first), found
    assert MADE["communicators"] >= 4 * len(found), MADE
    assert MADE["windows"] >= len(found), MADE
    for mode in ("async", "sync"):
        for how in ("signal", "stop", "left", "behind"):
            if mode == "sync" and how == "left":  # rounds need every worker's batch
                continue
            result = run(lambda w, how=how: stopped(w, how), out / f"{mode}-{how}", mode=mode)
            expected = ("SIGUSR1", Exit.SAVED) if how == "signal" else ("stopped", 0)
            assert (result.reason, result.code) == expected, (mode, how, result)
            assert how != "stop" or WORLD.rank or "one has had enough" in log_of(result)
            if mode == "async":  # each batch once, also those that were taken as it stopped
                assert np.allclose(result.params["w"], -0.1 * result.summary["samples"])
            assert signal.getsignal(signal.SIGUSR1) is handler
    run(few, out / "few", mode="async")
    run(uneven, out / "uneven", mode="sync")
    run(unequal, out / "unequal", mode="sync", accumulate=2)
    print(f"rank {WORLD.rank} is done: together", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException as error:  # the other ranks would wait for this one
        abort.abort(abort.raised(error), 1)
