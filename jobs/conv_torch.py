"""A convolutional net in PyTorch learns the handwritten digits.

    mpirun -n 4 python jobs/conv_torch.py --mode ssp
    python jobs/conv_torch.py --alone

Also --mode async, sync and local_sgd. --alone is plain PyTorch in one process, with as many
samples and the same measure; it needs no mpirun. Expect 97 to 99 % held-out accuracy of each.
"""

import argparse
import sys

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpips
import mpips.torch as mt
from mpips.datasets.built_in import PATH

RATE, BATCH, TRAIN = 3e-3, 16, 1437


class Net(nn.Module):
    """Two convolutions, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.last = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (n, 10), of images of shape (n, 1, 8, 8)."""
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.last(F.relu(self.hidden(x.flatten(1))))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return samples to train on, and held-out ones; writers are mixed."""
    rows = torch.from_numpy(np.load(PATH))
    x, y = rows[:, :-1].float().reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:TRAIN], order[TRAIN:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


def metrics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return means over a batch."""
    x, y = batch
    found = model(x)
    right = (found.argmax(1) == y).float().mean()
    return {"loss": float(F.cross_entropy(found, y)), "accuracy": float(right)}


def alone(args: argparse.Namespace) -> float:
    """Train in one process of plain PyTorch; returns the held-out accuracy."""
    torch.manual_seed(0)
    model, (train, held_out) = Net(), digits()
    opt, loader = torch.optim.Adam(model.parameters(), RATE), DataLoader(train, BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))
    for _ in range(args.epochs):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return metrics(model, held_out.tensors)["accuracy"]


def together(args: argparse.Namespace) -> tuple[float, int]:
    """Train with mpips on all ranks; returns the held-out accuracy, and the exit code."""
    data, held_out = digits()

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        for x, y in worker.loader(data):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()

    result = mt.run(
        train, Net, mpips.Adam(RATE), mode=args.mode, batch_size=BATCH, epochs=args.epochs,
        schedule="cosine", out=args.out, evaluate=metrics, held_out=held_out,
    )  # fmt: skip
    return result.summary["accuracy"], result.code


def main(argv: list[str] | None = None) -> int:
    """Train, and print the held-out accuracy; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async", choices=("async", "ssp", "sync", "local_sgd"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="", metavar="DIR", help="by default a new one in runs")
    parser.add_argument("--alone", action="store_true", help="plain PyTorch in one process")
    args = parser.parse_args(argv)
    accuracy, code = (alone(args), 0) if args.alone else together(args)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{'alone' if args.alone else args.mode}: accuracy {accuracy:.4f}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
