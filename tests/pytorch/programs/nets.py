"""What the programs of these tests train: a convolutional net on the digits."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from mpips.config import Config
from mpips.datasets import Source, open_dataset


def _tensors(source: Source) -> TensorDataset:
    x, y = source.load(0, source.n, np.dtype("f4"))
    return TensorDataset(torch.tensor(x).view(-1, 1, 8, 8), torch.tensor(y))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the built-in digits as images, to train on and held out."""
    with open_dataset(Config()) as data:
        assert data.test is not None
        return _tensors(data.train), _tensors(data.test)


class Net(nn.Module):
    """Two convolutions and a linear layer, 15,338 trained parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Linear(128, 80)
        self.out = nn.Linear(80, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.out(F.relu(self.last(x.flatten(1))))


class Odd(Net):
    """The same with all that is not plain: frozen, tied and unused parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(16)
        self.unused = nn.Linear(3, 2)
        self.same = nn.Linear(80, 10)
        self.same.weight = self.out.weight
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.relu(self.last(x.flatten(1)))
        return (self.out(x) + self.same(x)) / 2


def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
    """Return the mean loss and the accuracy over a batch."""
    x, y = batch
    z = model(x)
    assert not model.training
    assert not z.requires_grad
    right = (z.argmax(1) == y).float().mean()
    return {"loss": float(F.cross_entropy(z, y)), "accuracy": float(right)}
