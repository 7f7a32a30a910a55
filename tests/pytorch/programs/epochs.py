"""Loops over epochs: each pass has the samples of its epoch once, over stops and resumes too."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt

WORLD = MPI.COMM_WORLD
COUNT, EPOCHS, SIZE = 103, 4, 8
points = torch.randn(COUNT, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(torch.arange(COUNT), points, (points.sum(1) > 0).long())


def net() -> torch.nn.Module:
    """Return a model in 64 bits."""
    return torch.nn.Linear(5, 2).double()


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer with its own decay for the matrix."""
    weight, bias = params
    groups = [{"params": [weight], "weight_decay": 0.3}, {"params": [bias], "lr": 0.03}]
    return torch.optim.AdamW(groups, 0.01)


class Train:
    """A loop over epochs, or over all batches at once, and what this rank has seen of it."""

    def __init__(
        self,
        by_epoch: bool = True,
        stop_in: int | None = None,
        leaves: bool = False,
        stops_behind: bool = False,
    ) -> None:
        self.by_epoch, self.stop_in, self.leaves = by_epoch, stop_in, leaves
        self.stops_behind = stops_behind
        self.passes: list[int] = []
        self.seen = Counter[tuple[int, int]]()  # by epoch and sample
        self.lengths: list[tuple[int, int]] = []  # batches of each pass, and the loader's length
        self.behind: list[tuple[float, ...]] = []  # the bias behind each pass

    def __call__(self, worker: mt.Worker) -> None:
        """Train."""
        loader = worker.loader(DATA, batch_size=SIZE, epochs=EPOCHS)
        if not self.by_epoch:
            for batch in loader:
                self.step(worker, *batch)
            return
        for epoch in worker.epochs():  # as the loader says
            self.passes.append(epoch)
            batches = 0
            for batch in loader:
                if self.leaves and worker.id == 0:  # with this batch in work
                    worker.stop()
                    break
                batches += self.step(worker, *batch)
            assert worker.epoch == epoch
            self.lengths.append((batches, len(loader)))
            self.behind.append(tuple(worker.model.bias.tolist()))
            if self.stops_behind:
                worker.stop()

    def step(self, worker: mt.Worker, ids: Any, x: Any, y: Any) -> bool:
        """Make a step."""
        self.seen.update((worker.epoch, int(k)) for k in ids)
        worker.optimizer.zero_grad()
        F.cross_entropy(worker.model(x), y).backward()
        worker.optimizer.step()
        if worker.epoch == self.stop_in:  # any: the first worker may have no batch of the epoch
            worker.stop()
        return True


def run(train: Any, mode: str, out: Path, **more: Any) -> mt.Result:
    """Run it on all ranks."""
    return mt.run(
        train, model=net, optimizer=adamw, mode=mode, out=str(out), quiet=True,
        eval_every=0, checkpoint_every=0, **more,
    )  # fmt: skip


def gathered(*trains: Train) -> tuple[Counter[tuple[int, int]], set[tuple[int, ...]]]:
    """Return what all ranks have seen, and the passes that workers have made."""
    seen = sum((train.seen for train in trains), Counter[tuple[int, int]]())
    found = WORLD.allgather((seen, [tuple(train.passes) for train in trains]))
    all_seen = sum((each for each, _ in found), Counter[tuple[int, int]]())
    return all_seen, {passes for _, several in found for passes in several if passes}


def once_each() -> Counter[tuple[int, int]]:
    """Return each sample once an epoch."""
    return Counter((epoch, k) for epoch in range(EPOCHS) for k in range(COUNT))


def means(model: torch.nn.Module, batch: Any) -> dict[str, float]:
    """Return the loss of a batch."""
    return {"loss": float(F.cross_entropy(model(batch[1]), batch[2]))}


class Told(mpips.Callback):
    """Has the epochs that it was told of."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_epoch(self, worker: Any, epoch: int) -> None:
        """Note it."""
        self.epochs.append(epoch)


def check_what_follows_a_pass(mode: str, out: Path) -> None:
    """One worker evaluates there, or all do in sync; it has been told of the epoch before."""
    told, train = Told(), Train()

    def loop(worker: mt.Worker) -> None:
        loader = worker.loader(DATA, batch_size=SIZE)
        for epoch in worker.epochs(EPOCHS):
            took = sum(train.step(worker, *batch) for batch in loader)
            assert not took or told.epochs[-1] == epoch, (told.epochs, epoch)
            if mode == "sync" or worker.once():
                assert worker.evaluate(means, DATA)["loss"] > 0

    assert run(loop, mode, out, callbacks=[told]).reason == "epochs"
    assert gathered(train)[0] == once_each(), mode


def check_a_loop_that_is_left(out: Path) -> None:
    """A worker stops the run with a batch in work; a resumed run has that batch."""
    first, second = Train(leaves=True), Train()
    result = run(first, "async", out)
    assert result.reason == "stopped", result.reason
    assert run(second, "async", out, resume="yes").reason == "epochs"
    assert gathered(first, second)[0] == once_each()


def check_a_stop_behind_a_pass(mode: str, out: Path) -> None:
    """The request travels with the round of the next push; a resumed run has all that is left."""
    first, second = Train(stops_behind=True), Train()
    result = run(first, mode, out)
    assert (result.reason, len(first.behind)) == ("stopped", 2), (result.reason, mode)
    assert first.behind[-1] == tuple(result.state_dict["bias"].tolist()), mode
    assert run(second, mode, out, resume="yes").reason == "epochs"
    assert gathered(first, second)[0] == once_each(), mode


def check_arrays(out: Path) -> None:
    """A loop of NumPy goes by epochs too, in ssp, and has the next batch's parameters."""
    seen = Counter[tuple[int, int]]()

    def loop(worker: mpips.Worker) -> None:
        batches = worker.batches(COUNT, batch_size=SIZE)
        for epoch in worker.epochs(EPOCHS):
            for batch in batches:
                seen.update((epoch, int(k)) for k in batch.ids)
                worker.grads["w"][...] = worker.pull()["w"]
                worker.push(1.0)
            assert worker.pull()["w"].shape == (3,)

    mpips.run(
        loop, {"w": np.ones(3)}, mpips.SGD(0.1), mode="ssp", staleness_bound=2, out=str(out),
        quiet=True, eval_every=0, checkpoint_every=0,
    )  # fmt: skip
    assert sum(WORLD.allgather(seen), Counter[tuple[int, int]]()) == once_each()


def main(folder: Path) -> None:
    """Run all."""
    for mode in ("sync", "async"):
        check_what_follows_a_pass(mode, folder / f"{mode}-evaluated")
    check_a_loop_that_is_left(folder / "left")
    check_arrays(folder / "arrays")
    for mode in ("sync", "local_sgd"):
        check_a_stop_behind_a_pass(mode, folder / f"{mode}-behind")
    for mode in ("sync", "async", "local_sgd"):
        train = Train()
        result = run(train, mode, folder / mode)
        seen, passes = gathered(train)
        assert seen == once_each(), (mode, seen - once_each(), once_each() - seen)
        assert passes == {tuple(range(EPOCHS))}, (mode, passes)
        if train.behind:
            assert train.behind[-1] == tuple(result.state_dict["bias"].tolist()), mode
        if mode == "sync":
            assert all(batches == length for batches, length in train.lengths), train.lengths
            assert len({tuple(each) for each in WORLD.allgather(train.behind)}) == 1
            at_once = run(Train(by_epoch=False), mode, folder / "at-once")
            for name, array in at_once.params.items():
                assert np.array_equal(array, result.params[name]), name
        first, second = Train(stop_in=1), Train()
        assert run(first, mode, folder / f"{mode}-stopped").reason == "stopped"
        assert run(second, mode, folder / f"{mode}-stopped", resume="yes").reason == "epochs"
        seen, passes = gathered(first, second)
        assert seen == once_each(), (mode, seen - once_each(), once_each() - seen)
        assert {epoch for each in passes for epoch in each} == {*range(EPOCHS)}, passes
        assert {each[-1] for each in gathered(second)[1]} == {EPOCHS - 1}, passes
    print(f"rank {WORLD.rank}: epochs are whole")
