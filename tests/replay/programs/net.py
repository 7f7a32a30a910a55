"""Runs of PyTorch, with rows in mode hybrid: dropout, running means, an array that freezes."""

import functools
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import mpips
import mpips.torch as mt

N, ROWS, DIM, KINDS, EPOCHS = 300, 60, 8, 4, 5
ids = torch.arange(N)
samples = torch.utils.data.TensorDataset(ids, ids % KINDS)


def net(rows: type[torch.nn.Module], **options: int) -> torch.nn.Sequential:
    """Return an embedding and two layers."""
    inner = (torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2))
    layers = (torch.nn.Linear(DIM, 16), *inner, torch.nn.Linear(16, KINDS))
    return torch.nn.Sequential(rows(ROWS, DIM, **options), *layers)


def metrics(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return the mean loss."""
    return {"loss": float(F.cross_entropy(model(batch[0] % ROWS), batch[1]))}


def train(worker: mt.Worker) -> None:
    """Train, in the middle epochs by fewer rows, and from some batch on without a bias."""
    torch.manual_seed(worker.id)
    model, optimizer = worker.model, worker.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = worker.loader(samples, batch_size=15, epochs=EPOCHS)
    for epoch in worker.epochs(EPOCHS):
        for number, (given, kinds) in enumerate(loader):
            model[1].bias.requires_grad_(epoch < 2 or number < 2)
            optimizer.zero_grad()
            rows = given % (ROWS if epoch in (0, EPOCHS - 1) else ROWS // 3)
            F.cross_entropy(model(rows), kinds).backward()
            optimizer.step()
            schedule.step()


def main(out: str | Path, mode: str) -> int:
    """Run; returns the exit code."""
    if mode == "hybrid":
        model, rule = functools.partial(net, mt.Embedding, evict_after=1), mpips.Adam(0.01)
    else:
        model, rule = functools.partial(net, torch.nn.Embedding), mpips.AdamW(0.01)
    result = mt.run(
        train, model, rule, evaluate=metrics, held_out=samples, out=out, mode=mode, resume="auto",
        checkpoint_every="30steps", node_size=2, servers=2, read="consistent", record=True,
        quiet=True, keep=100,
    )  # fmt: skip
    return int(result.code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
