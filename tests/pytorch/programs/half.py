"""A model in 16 bits learns in mode sync, on one rank."""

from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt

x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
DATA = TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Module:
    """Return a net with running means, all of it in bfloat16."""
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).bfloat16()


def train(worker: mt.Worker) -> None:
    """Follow the gradient of the squared error."""
    for a, b in worker.loader(DATA, batch_size=32, epochs=40):
        worker.optimizer.zero_grad()
        F.mse_loss(worker.model(a), b).backward()
        worker.optimizer.step()


def loss(model: nn.Module, batch: Any) -> dict[str, float]:
    """Return the mean squared error."""
    return {"loss": float(F.mse_loss(model(batch[0]), batch[1]))}


def main(out: Path) -> None:
    """Train it on rank 0, and print the types of what it ends with."""
    if MPI.COMM_WORLD.rank:
        return
    found = mt.run(
        train, net, mpips.Adam(0.02), mode="sync", out=out, quiet=True, evaluate=loss,
        held_out=DATA, comm=MPI.COMM_SELF,
    )  # fmt: skip
    types = {name: t.dtype for name, t in found.state_dict.items() if t.is_floating_point()}
    assert found.summary["eval_loss"] < 0.1, found.summary
    assert found.params["1.weight"].dtype == "float32"
    print(f"half: {types}", flush=True)
