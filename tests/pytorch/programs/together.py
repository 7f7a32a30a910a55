"""Tensors of all workers together, what is saved of a model, and metrics over the workers."""

from pathlib import Path

import torch
from mpi4py import MPI
from nets import Net, digits
from torch.nn import functional as F

import mpips
import mpips.torch as mt

WORLD = MPI.COMM_WORLD
EPOCHS = 2
TRAIN, TEST = digits()
X, Y = TEST.tensors


def check_tensors(worker: mt.Worker) -> None:
    """Reduce tensors of several types."""
    n = worker.workers
    found = worker.all_reduce(torch.full((2, 3), worker.id, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.full((2, 3), (n - 1) / 2).bfloat16())
    assert worker.all_reduce(torch.tensor(worker.id), "max").item() == n - 1
    assert worker.all_reduce(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    means = worker.all_reduce({"loss": torch.tensor(2.0), "n": 3}, "sum")
    assert means == {"loss": 2 * n, "n": 3 * n}, means
    row = worker.model.out.weight[worker.id]  # a view of the replica
    assert [each.tolist() for each, _ in worker.gather((row, "x"))][worker.id] == row.tolist()


def accuracy_by_torchmetrics(worker: mt.Worker) -> float:
    """Return the accuracy over all test images, of which each worker has a part."""
    try:
        from torchmetrics.classification import MulticlassAccuracy
    except ImportError:
        return float("nan")
    metric = MulticlassAccuracy(
        10, average="micro", dist_sync_fn=lambda value, group: worker.gather(value),
        distributed_available_fn=lambda: True,
    )  # fmt: skip
    with torch.no_grad():
        metric.update(worker.model(X[worker.id :: worker.workers]), Y[worker.id :: worker.workers])
    return float(metric.compute())


def train(worker: mt.Worker) -> None:
    """Train, test and save."""
    loader = worker.loader(TRAIN, batch_size=32)
    check_tensors(worker)
    for epoch in worker.epochs(EPOCHS):
        for x, y in loader:
            worker.optimizer.zero_grad()
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()
        check_tensors(worker)
        worker.save(worker.model.state_dict(), f"epoch-{epoch}.pt")
    with torch.no_grad():
        right = (worker.model(X).argmax(1) == Y)[worker.id :: worker.workers].sum()
    accuracy = worker.all_reduce(right, op="sum").item() / len(Y)
    by_metric = accuracy_by_torchmetrics(worker)
    assert by_metric != by_metric or abs(by_metric - accuracy) < 1e-6, (by_metric, accuracy)
    worker.print(f"accuracy {accuracy:.2f} of all workers, torchmetrics {by_metric == by_metric}")


def main(folder: Path) -> None:
    """Train in modes with servers and without."""
    for mode in ("async", "sync"):
        out = folder / mode
        result = mt.run(train, Net, mpips.Adam(3e-3), mode=mode, out=out, quiet=True, eval_every=0)
        saved = torch.load(out / f"epoch-{EPOCHS - 1}.pt", weights_only=True)
        assert all(torch.equal(saved[name], value) for name, value in result.state_dict.items())
        assert saved["out.weight"].untyped_storage().nbytes() == 4 * saved["out.weight"].numel()
    print(f"rank {WORLD.rank}: together", flush=True)
