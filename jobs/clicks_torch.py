"""A factorization machine in PyTorch learns clicks, from embeddings that are tables of servers.

    mpirun -n 4 python jobs/clicks_torch.py --mode async
    python jobs/clicks_torch.py --alone
    python jobs/clicks_torch.py --alone --linear

Also --mode ssp. Clicks are generated: each has eight properties, and whether it comes depends on
pairs of them, of which logistic regression (--linear) sees little. --alone is plain PyTorch in one
process, with as many samples and the same measure; it needs no mpirun. Expect 82 to 85 % held-out
accuracy of each, and 55 % of --linear, where 51 % are clicks.
"""

import argparse
import sys
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpips
import mpips.torch as mt

FIELDS, VALUES, DIM, HELD_OUT = 8, 50, 8, 10_000
ROWS, RATE, BATCH, EPOCHS = FIELDS * VALUES, 0.3, 100, 4


class Net(nn.Module):
    """A weight a value, and of each two values how well their vectors agree.

    Args:
        own: Whether the rows are tables of mpips; else they are sparse weights of torch.
        linear: Whether it has the weights alone.

    References: Rendle, ICDM 2010.
    """

    def __init__(self, own: bool, linear: bool) -> None:
        super().__init__()
        self.bias, self.linear = nn.Parameter(torch.zeros(1)), linear
        self.weights: Any
        self.vectors: Any = None
        if own:
            rule = mpips.Adagrad(RATE)
            small = {"init": mpips.Normal(0.1), "optimizer": rule}
            self.weights = mt.EmbeddingBag(ROWS, 1, mode="sum", **small)
            self.vectors = None if linear else mt.Embedding(ROWS, DIM, **small)
            return
        self.weights = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)
        self.vectors = None if linear else nn.Embedding(ROWS, DIM, sparse=True)
        for module in (self.weights, self.vectors) if not linear else (self.weights,):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (n,), of ids of shape (n, FIELDS)."""
        found = self.weights(ids)[:, 0] + self.bias
        if self.linear:
            return found
        vectors = self.vectors(ids)
        pairs = vectors.sum(1).square() - vectors.square().sum(1)  # each pair twice
        return found + pairs.sum(1) / 2


def clicks(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return clicks to train on, and held-out ones: ids of shape (n, FIELDS), and 0 or 1."""
    made = torch.Generator().manual_seed(0)
    values = torch.randint(VALUES, (samples + HELD_OUT, FIELDS), generator=made)
    hidden = torch.randn(FIELDS, VALUES, 2, generator=made)
    of_field = torch.stack([hidden[k, values[:, k]] for k in range(FIELDS)])
    logits = 2 * (of_field[0::2] * of_field[1::2]).sum((0, 2))  # of fields 0 and 1, 2 and 3, ...
    y = (torch.rand(len(logits), generator=made) < torch.sigmoid(logits)).float()
    ids = values + VALUES * torch.arange(FIELDS)
    train, held_out = (slice(0, samples), slice(samples, None))
    return TensorDataset(ids[train], y[train]), TensorDataset(ids[held_out], y[held_out])


def metrics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return means over a batch."""
    ids, y = batch
    found = model(ids)
    loss = F.binary_cross_entropy_with_logits(found, y)
    return {"loss": float(loss), "accuracy": float(((found > 0) == (y > 0)).float().mean())}


def alone(args: argparse.Namespace) -> float:
    """Train in one process of plain PyTorch; returns the held-out accuracy."""
    torch.manual_seed(0)
    model, (train, held_out) = Net(False, args.linear), clicks(args.samples)
    opt = torch.optim.Adagrad(model.parameters(), RATE)
    loader = DataLoader(train, BATCH, shuffle=True)
    for _ in range(args.epochs):
        for ids, y in loader:
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(ids), y).backward()
            opt.step()
    with torch.no_grad():
        return metrics(model, held_out.tensors)["accuracy"]


def together(args: argparse.Namespace) -> tuple[float, int]:
    """Train with mpips on all ranks; returns the held-out accuracy, and the exit code."""
    data, held_out = clicks(args.samples)

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        for ids, y in worker.loader(data):
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(ids), y).backward()
            opt.step()

    result = mt.run(
        train, lambda: Net(True, args.linear), mpips.Adagrad(RATE), mode=args.mode,
        batch_size=BATCH, epochs=args.epochs, out=args.out, evaluate=metrics, held_out=held_out,
    )  # fmt: skip
    return result.summary["accuracy"], result.code


def main(argv: list[str] | None = None) -> int:
    """Train, and print the held-out accuracy; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async", choices=("async", "ssp"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--samples", type=int, default=30_000, metavar="N")
    parser.add_argument("--linear", action="store_true", help="logistic regression")
    parser.add_argument("--out", default="", metavar="DIR", help="by default a new one in runs")
    parser.add_argument("--alone", action="store_true", help="plain PyTorch in one process")
    args = parser.parse_args(argv)
    accuracy, code = (alone(args), 0) if args.alone else together(args)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{'alone' if args.alone else args.mode}: accuracy {accuracy:.4f}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
