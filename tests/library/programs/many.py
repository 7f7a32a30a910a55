"""Runs of all modes in one program, one after the other, with nothing left over."""

import gc
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips
from mpips.mpi import abort

N = 230
MODES = ("async", "ssp", "sync", "local_sgd", "easgd")
ROUNDS = 3  # of all modes: fifteen runs
MADE: Counter[str] = Counter()  # communicators and windows
FREED: Counter[str] = Counter()


class Counted(MPI.Intracomm):
    """A communicator that counts what is made of it, and of that in turn."""

    def Free(self) -> None:
        super().Free()
        FREED["communicators"] += 1


class CountedWindow(MPI.Win):
    def Free(self) -> None:
        super().Free()
        FREED["windows"] += 1


def counting(kind: str, of: type, name: str, make: Any) -> None:
    """Have a method of communicators or windows count what it makes, as of that class."""

    def counted(*args: Any, **options: Any) -> Any:
        found = make(*args, **options)
        MADE[kind] += found != MPI.COMM_NULL
        return of(found)

    setattr(of, name, counted)


for name in ("Dup", "Split", "Split_type", "Create", "Create_group"):
    counting("communicators", Counted, name, getattr(MPI.Intracomm, name))
for name in ("Create", "Allocate_shared"):
    counting("windows", CountedWindow, name, getattr(MPI.Win, name))


def slope(params: dict[str, np.ndarray], batch: object, out: dict[str, np.ndarray]) -> float:
    """Write the gradient of a line through (x, 2 x + 1), whose parameters are known."""
    error = params["line"][0] * batch.x + params["line"][1] - batch.y
    out["line"][:] = (error * batch.x).mean(), error.mean()
    return float((error**2).mean() / 2)


def means(params: dict[str, np.ndarray], batch: object) -> dict[str, float]:
    error = params["line"][0] * batch.x + params["line"][1] - batch.y
    return {"loss": float((error**2).mean()), "samples": float(len(batch))}


class Told(mpips.Callback):
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


def learns(mode: str, out: Path) -> None:
    """Learn a line, and evaluate it in three ways; tell of it before, in, between and after."""
    x = np.linspace(-1, 1, N)
    data, heard = (x, 2 * x + 1), Told()
    found, told, losses = dict[str, float](), list[str](), list[float]()

    def train(worker: mpips.Worker) -> None:
        def tell(when: str, **values: object) -> None:
            told.append(when)
            worker.log(when=when, **values)

        tell("before")
        for k, batch in enumerate(worker.batches(data, batch_size=10)):
            loss = slope(worker.pull(), batch, worker.grads)
            if k % 20 == 0:
                tell("in", loss=np.float32(loss), self=k)
            worker.push(loss)
            losses.append(loss)
            if k % 20 == 1:
                tell("between", slope=np.inf)
        found.update(worker.evaluate(means, data))
        tell("after", **found)
        np.testing.assert_allclose(worker.pull()["line"], (2, 1), atol=0.05)

    rule = mpips.Momentum(0.1, momentum=0.5)
    how = {"mode": mode, "epochs": 30, "out": out, "quiet": True, "eval_every": 10}
    how |= {"evaluate": means, "held_out": data, "callbacks": [heard]}
    how |= {"evaluators": 1} if mode == "sync" else {}
    how |= {"node_size": 2} if mode == "ssp" else {}
    result = mpips.run(train, {"line": np.zeros(2)}, rule, **how)
    np.testing.assert_allclose(result.params["line"], (2, 1), atol=0.05)
    assert result.summary["eval_loss"] < 1e-2
    if found:
        assert abs(found["loss"] - result.summary["eval_loss"]) < 1e-9
        assert N / 3 < found["samples"] < N, "weighted by the samples of each batch"
    assert heard.losses == losses
    assert heard.epochs == sorted(set(heard.epochs)), "each once"
    assert bool(losses) == bool(heard.epochs)
    coordinator = MPI.COMM_WORLD.rank == 0  # the first server, where there is one
    assert bool(heard.evaluations) == coordinator, heard.evaluations
    assert not coordinator or heard.checkpoints[-1] == result.summary["global_step"]
    mine = result.params["line"].tolist(), dict(result.summary), result.reason, str(result.out)
    assert all(mine == other for other in MPI.COMM_WORLD.allgather(mine)), "evaluators' too"
    check_log(out, MPI.COMM_WORLD.gather(told), result.summary["global_step"])


def check_log(out: Path, told: list[list[str]] | None, last: int) -> None:
    """Check on rank 0 that every line is there that a worker has logged, in its order."""
    if told is None:
        return
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "log"]
    lines = [when for when in told if when]
    for worker, said in enumerate(lines):
        mine = [row for row in rows if row["worker"] == worker]
        assert [row["when"] for row in mine] == said
        steps = [row["step"] for row in mine[1:]]
        assert steps == sorted(steps)
        assert 0 < steps[-1] <= last
        assert mine[0].keys() == {"kind", "time_s", "step", "worker", "when"}
        assert mine[0]["step"] is None
        assert mine[1]["self"] == 0
        assert mine[2]["slope"] == "inf"
        assert mine[-1]["samples"] > N / 3
    assert len(rows) == sum(map(len, lines))


def left() -> tuple[tuple[str, ...], int, int]:
    """Return the threads of this process, and how many files are open and mapped from memory."""
    assert MADE == FREED, (MADE, FREED)
    gc.collect()
    threads = tuple(sorted(thread.name for thread in threading.enumerate()))
    with open("/proc/self/maps") as file:
        mapped = {line.split()[-1] for line in file if "/dev/shm" in line}
    return threads, len(os.listdir("/proc/self/fd")), len(mapped)


def main(folder: Path) -> None:
    MPI.COMM_WORLD, MPI.Win = Counted(MPI.COMM_WORLD), CountedWindow
    found = []
    for k in range(ROUNDS):
        for mode in MODES:
            learns(mode, folder / f"{mode}-{k}")
            MPI.COMM_WORLD.Barrier()
            found.append(left())
    threads, files, memory = zip(*found, strict=True)
    assert set(threads) == {("MainThread",)}, threads
    assert max(files[5:]) <= max(files[:5]), files
    assert max(memory[5:]) <= max(memory[:5]), memory
    assert MADE["communicators"] >= 4 * len(found), MADE
    assert MADE["windows"] >= len(found), MADE
    print(f"rank {MPI.COMM_WORLD.rank} is done: {len(found)} runs, {dict(MADE)}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException as error:  # the other ranks would wait for this one
        abort.abort(abort.raised(error), 1)
