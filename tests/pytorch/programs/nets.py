"""What the programs of these tests train: a convolutional net on the digits, and a loop."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mpips.torch as mt


def learn(worker: mt.Worker, data: Any, size: int, **given: Any) -> None:
    for x, y in worker.loader(data, batch_size=size, **given):
        worker.optimizer.zero_grad()
        F.cross_entropy(worker.model(x), y).backward()
        worker.optimizer.step()


class Net(nn.Module):
    """Convolutions, with all that is not plain: frozen, tied, unused parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm, self.unused = nn.BatchNorm2d(16), nn.Linear(3, 2)
        self.last, self.out, self.same = nn.Linear(128, 80), nn.Linear(80, 10), nn.Linear(80, 10)
        self.same.weight = self.out.weight
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.relu(self.last(x.flatten(1)))
        return (self.out(x) + self.same(x)) / 2


def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
    x, y = batch
    z = model(x)
    assert not model.training
    assert not z.requires_grad
    right = (z.argmax(1) == y).float().mean()
    return {"loss": float(F.cross_entropy(z, y)), "accuracy": float(right)}
