"""PyTorch modules for tests: some that are problems of a dataset, and some that cannot be."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Conv(nn.Module):
    """Of the digits, with the usual loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x.view(-1, 1, 8, 8)))
        return self.out(F.max_pool2d(F.relu(x), 2).flatten(1))


class Affine(nn.Module):
    """Of any data, by what is said of it."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        outputs = data.classes or math.prod(data.y_shape)
        self.out = nn.Linear(math.prod(data.x_shape), outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.flatten(1))


class Normed(Affine):
    """With running means of its inputs."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.norm = nn.BatchNorm1d(math.prod(data.x_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x.flatten(1)))


class Absolute(Affine):
    """With a loss of its own, a frozen array, and one that nothing depends on."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x).reshape(y.shape) - y).abs().mean()


class Headless(nn.Module):
    """Has a loss and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(5, 4)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.weights(x), y)


class Threads(Conv):
    """Refuses to compute in more than one thread, but where it is tried on few samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) <= 2 or torch.get_num_threads() == 1, torch.get_num_threads()
        return super().forward(x)


class OtherInputs(nn.Module):
    sizes = 7, 4

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(*self.sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


class OtherOutputs(OtherInputs):
    sizes = 5, 3


class TwoArguments(OtherInputs):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()


class LossModule(Affine):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.loss = nn.CrossEntropyLoss()


class LossEach(Affine):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x), y, reduction="none")


class LossNumber(Affine):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return F.cross_entropy(self(x), y).item()


class Nothing(nn.Module):
    """Has no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
