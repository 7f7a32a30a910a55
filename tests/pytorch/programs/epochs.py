"""Loops over epochs: each has its samples once, a stream as many, over stops and resumes too.

``epochs.py OUT numbered``, ``streamed``, or ``read``: by processes.
"""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import mpips.torch as mt

WORLD = MPI.COMM_WORLD
COUNT, EPOCHS, SIZE = 103, 4, 8
STREAMED, SAMPLES = 50, 64  # samples in the stream, and in an epoch of it
points = torch.randn(COUNT, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(torch.arange(COUNT), points, (points.sum(1) > 0).long())
Seen = Counter[tuple[int, int]]  # by epoch and sample
ONCE = Seen((epoch, k) for epoch in range(EPOCHS) for k in range(COUNT))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (DATA[k] for k in range(STREAMED))


def part(worker: int, workers: int) -> Iterator[Any]:
    """Return a worker's share of them, in runs of five."""
    return (DATA[k] for k in range(STREAMED) if k // 5 % workers == worker)


class Slow(Dataset[Any]):
    """Samples that take 2 ms each, and are random; their classes are the processes that read."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, k: int) -> tuple[int, torch.Tensor, int]:
        time.sleep(0.002)
        info = get_worker_info()
        assert info is not None, "in a process of its own"
        drawn = random.random(), np.random.rand(), float(torch.rand(())), 0.0, 0.0
        return k, torch.tensor(drawn, dtype=torch.float64), info.id


def signal_all() -> None:
    """Send what ends a run to this rank, and to all that it has started, as a launcher may."""
    started = [child.pid for child in multiprocessing.active_children()]
    started += [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]
    assert len(started) == 4
    for pid in (*started, os.getpid()):
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)


def adamw(params: Any) -> torch.optim.Optimizer:
    weight, bias = params
    groups = [{"params": [weight], "weight_decay": 0.3}, {"params": [bias], "lr": 0.03}]
    return torch.optim.AdamW(groups, 0.01)


def means(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": F.cross_entropy(model(batch[1]), batch[2])}


class Train:
    """A loop over epochs, and what this rank has seen of it.

    Args:
        stop: Where a worker stops the run: "in" a pass, "with" a batch in work, "behind" a pass;
            or by a "signal".
        data: The samples.
    """

    def __init__(self, stop: str = "", data: Any = DATA) -> None:
        self.stop, self.data, self.id = stop, data, -1
        self.seen = Seen()
        self.drawn: dict[tuple[int, int], list[float]] = {}  # what was random, by epoch and sample
        self.readers = set[int]()
        self.passes: list[int] = []
        self.lengths: list[tuple[int, int]] = []  # batches of each pass, and the loader's length
        self.behind: list[list[float]] = []  # the bias behind each pass

    def __call__(self, worker: mt.Worker) -> None:
        self.id = worker.id
        processes = 2 if isinstance(self.data, Slow) else 0
        loader = worker.loader(self.data, batch_size=SIZE, epochs=EPOCHS, num_workers=processes)
        for epoch in worker.epochs():  # as the loader says
            self.passes.append(epoch)
            batches = 0
            for batches, batch in enumerate(loader, 1):
                if self.stop == "with" and worker.id == 0:
                    worker.stop()
                    break
                self.step(worker, *batch)
                if self.stop == "signal" and (worker.id, epoch, batches) == (0, 0, 4):
                    signal_all()
                if self.stop == "in" and epoch == 1:  # any: the first may have no batch of it
                    worker.stop()
            assert worker.epoch == epoch
            self.lengths.append((batches, len(loader)))
            self.behind.append(worker.model.bias.tolist())
            if self.stop == "behind":
                worker.stop()
            if not self.stop and (worker.workers == WORLD.size or worker.once()):  # all, or one
                assert type(worker.evaluate(means, DATA)["loss"]) is float, "a tensor is a number"

    def step(self, worker: mt.Worker, ids: Any, x: Any, y: Any) -> None:
        keys = [(worker.epoch, int(k)) for k in ids]
        self.seen.update(keys)
        self.drawn.update(zip(keys, x.tolist(), strict=True))
        self.readers.update(y.tolist())
        worker.optimizer.zero_grad()
        F.cross_entropy(worker.model(x), y).backward()
        worker.optimizer.step()


def run(train: Any, mode: str, out: Path, resume: str = "") -> mt.Result:
    return mt.run(
        train, model=lambda: torch.nn.Linear(5, 2).double(), optimizer=adamw, mode=mode, out=out,
        quiet=True, eval_every=0, checkpoint_every=0, resume=resume,
    )  # fmt: skip


def gathered(*trains: Train) -> tuple[Seen, set[tuple[int, ...]]]:
    """Return what all ranks have seen, and the passes that workers have made."""
    found = WORLD.allgather([(train.seen, tuple(train.passes)) for train in trains])
    both = [each for of_rank in found for each in of_rank]
    return sum((seen for seen, _ in both), Seen()), {passes for _, passes in both if passes}


def check_stop(stop: str, mode: str, out: Path) -> None:
    """A resumed run has all that is left; in rounds the request travels with the next push."""
    first, second = Train(stop), Train()
    stopped = run(first, mode, out)
    assert stopped.reason == "stopped", stopped.reason
    if stop == "behind":
        assert len(first.behind) == 2
        assert first.behind[-1] == stopped.state_dict["bias"].tolist(), mode
    assert run(second, mode, out, "yes").reason == "epochs"
    seen, passes = gathered(first, second)
    assert seen == ONCE, (mode, stop, seen - ONCE, ONCE - seen)
    assert {epoch for each in passes for epoch in each} == {*range(EPOCHS)}, passes
    assert {each[-1] for each in gathered(second)[1]} == {EPOCHS - 1}, passes


def numbered(out: Path) -> None:
    """Run whole epochs in each mode, and stop them in all ways."""
    for mode, stops in (("sync", "in behind"), ("async", "in with"), ("local_sgd", "in behind")):
        train = Train()
        result = run(train, mode, out / mode)
        assert gathered(train) == (ONCE, {tuple(range(EPOCHS))}), mode
        if train.behind:
            assert train.behind[-1] == result.state_dict["bias"].tolist(), mode
        if mode == "sync":
            assert all(batches == length for batches, length in train.lengths), train.lengths
            assert len({str(each) for each in WORLD.allgather(train.behind)}) == 1
            plain = Train()

            def at_once(worker: mt.Worker, plain: Train = plain) -> None:
                for batch in worker.loader(DATA, batch_size=SIZE, epochs=EPOCHS):
                    plain.step(worker, *batch)

            found = run(at_once, mode, out / "at-once").params
            assert all(np.array_equal(found[name], a) for name, a in result.params.items())
        for stop in stops.split():
            check_stop(stop, mode, out / f"{mode}-{stop}")


def streamed(out: Path) -> None:
    """Stop and resume streams: as many samples count as are told, of each worker's own."""
    for mode, data in (("sync", Stream()), ("async", Stream()), ("async", part)):
        trains = [Train(stop, mt.Streamed(data, SAMPLES)) for stop in ("behind", "")]
        for train, reason in zip(trains, ("stopped", "epochs"), strict=True):
            found = run(train, mode, out / f"{mode}-{type(data).__name__}", "auto")
            assert found.reason == reason, (mode, found.reason)
            numbers = {k // 5 if data is part else k for _, k in train.seen}
            assert all(k % (3 if mode == "sync" else 2) == train.id for k in numbers), numbers
        counts = Counter(epoch for epoch, _ in gathered(*trains)[0].elements())
        assert counts == Counter(dict.fromkeys(range(EPOCHS), SAMPLES)), (mode, counts)


def read(out: Path) -> None:
    """Read by processes: what is random in a sample is its own, over a stop and in each mode."""
    found = []
    for mode in ("async", "ssp", "sync"):
        trains = Train("signal", Slow()), Train("", Slow())
        for train, reason in zip(trains, ("SIGTERM", "epochs"), strict=True):
            assert run(train, mode, out / mode, "auto").reason == reason, mode
            assert not multiprocessing.active_children(), "they have ended"
            assert train.id or train.readers == {0, 1}, "both are at it"
        assert gathered(*trains)[0] == ONCE, mode
        drawn = WORLD.allgather(trains[0].drawn | trains[1].drawn)
        found.append({key: x for of_rank in drawn for key, x in of_rank.items()})
    assert found[0] == found[1] == found[2]
    assert len({tuple(x) for x in found[0].values()}) == COUNT * EPOCHS


def main(out: Path, which: str) -> None:
    {"numbered": numbered, "streamed": streamed, "read": read}[which](out)
