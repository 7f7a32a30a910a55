"""Streams of samples, of torch and of a function: how many count, and whose they are."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.utils.data import IterableDataset

import mpips
import mpips.torch as mt

WORLD = MPI.COMM_WORLD
LENGTH, SAMPLES, SIZE, EPOCHS = 50, 64, 4, 3


class Numbers(IterableDataset[Any]):
    """Numbers with their halves, LENGTH of them."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((k, torch.full((2,), k / 2)) for k in range(LENGTH))


def part(worker: int, workers: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Return a worker's share of them, in runs of five."""
    return (sample for sample in Numbers() if sample[0] // 5 % workers == worker)


class Train:
    """A loop over epochs of a stream, and what this rank has seen of it."""

    def __init__(self, stream: mt.Streamed, stop_in: int = -1) -> None:
        self.stream, self.stop_in = stream, stop_in
        self.seen, self.id, self.counted = Counter[int](), -1, Counter[int]()

    def __call__(self, worker: mt.Worker) -> None:
        """Train."""
        self.id = worker.id
        loader = worker.loader(self.stream, batch_size=SIZE)
        for epoch in worker.epochs(EPOCHS):
            for ids, x in loader:
                assert x.shape == (len(ids), 2), x.shape
                self.seen.update(ids.tolist())
                self.counted[epoch] += len(ids)
                worker.optimizer.zero_grad()
                (worker.model(x.float()) ** 2).mean().backward()
                worker.optimizer.step()
            if epoch == self.stop_in and worker.once():  # in rounds one more push has to carry it
                worker.stop()


def run(train: Train, mode: str, out: Path) -> tuple[str, Counter[int]]:
    """Run it on all ranks; returns why it has ended, and how many samples each epoch had."""
    result = mt.run(
        train, lambda: torch.nn.Linear(2, 1), mpips.SGD(1e-6), mode=mode, out=str(out), quiet=True,
        eval_every=0, resume="auto",
    )  # fmt: skip
    return result.reason, sum(WORLD.allgather(train.counted), Counter[int]())


def main(folder: Path) -> None:
    """Run all."""
    for mode in ("sync", "async"):
        out = folder / mode
        first, second = (Train(mt.Streamed(Numbers(), SAMPLES), stop) for stop in (0, -1))
        reason, before = run(first, mode, out)
        assert reason == "stopped", reason
        reason, after = run(second, mode, out)
        assert reason == "epochs", reason
        assert before + after == Counter(dict.fromkeys(range(EPOCHS), SAMPLES)), (before, after)
        workers = 3 if mode == "sync" else 2
        for train in (first, second):
            assert all(k % workers == train.id for k in train.seen), (mode, train.id, train.seen)
    train = Train(mt.Streamed(part, SAMPLES))
    reason, counts = run(train, "async", folder / "parts")
    assert (reason, counts) == ("epochs", Counter(dict.fromkeys(range(EPOCHS), SAMPLES)))
    assert all(k // 5 % 2 == train.id for k in train.seen), train.seen
    print(f"rank {WORLD.rank}: streams count", flush=True)
