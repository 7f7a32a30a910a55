"""Module as a job's problem: ``python -m mpips.train --problem net.py:Net``."""

import functools
import inspect
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from mpips.config import Config
from mpips.datasets.base import Batch, DataInfo
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem
from mpips.torch.model import (
    Bound,
    Initial,
    evaluating,
    make_model,
    tensors_of,
    trained_parameters,
)

TRIED = 2  # samples of the trial batch


class ModuleProblem(Problem):
    """A module and its loss: a method ``loss(x, y)``, or by default one for the kind of targets.

    The default is the cross entropy of ``module(x)`` for classes, and the mean squared error for
    real targets. `x` is a tensor of shape (n, *x_shape). `y` has class numbers, shape (n,), or
    targets, shape (n, *y_shape). The module has the job's dtype. Running means of normalization are
    statistics of the problem. Each rank has its own other buffers.

    Args:
        cls: Class of the module, called as ``cls()``, or as ``cls(data)`` if it needs an argument.
        data: Description of the dataset.
        config: The run's configuration.

    Raises:
        UserError: If the module cannot be trained, or not on this data. Exceptions of its own code
            propagate.
    """

    def __init__(self, cls: type[torch.nn.Module], data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self._make = functools.partial(_make, cls, data, getattr(torch, config.dtype))
        self.model = make_model(self._make, config.seed)
        initial = Initial(self.model)
        self.layout = Layout.of({name: array.shape for name, array in initial.items()})
        self.statistics = tuple(initial.running)
        self._name, self._own_loss = cls.__name__, callable(getattr(cls, "loss", None))
        if not self._own_loss and hasattr(self.model, "loss"):
            got = f"{self._name}.loss of type {type(self.model.loss).__name__}"
            raise UserError(got, "a method loss(self, x, y)", "give the attribute another name")
        self._classifies = self._try()
        for parameter in trained_parameters(self.model).values():
            parameter.data = parameter.data.new_empty(0)  # frees it, as a server computes nothing
        self._bound = Bound(self.model)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters and running means of a new module, seeded by `rng`."""
        return dict(Initial(make_model(self._make, int(rng.integers(2**31)))))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient; see `Problem`."""
        self._bound.share = self.share
        self._bound.move_to(params)
        self._bound.collect_into(out)
        self.model.train()
        loss = self._loss(*tensors_of({"x": batch.x, "y": batch.y}))
        loss.backward()
        self._bound.complete()
        return float(loss.detach())

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return the mean loss, and the accuracy if ``module(x)`` has an output for each class."""
        x, y = tensors_of({"x": batch.x, "y": batch.y})
        with evaluating(self.model, params):
            out: Any = self.model(x) if self._classifies or not self._own_loss else None
            means = {"loss": float(self._loss(x, y, out))}
        if self._classifies:
            means["accuracy"] = float((out.argmax(1) == y).double().mean())
        return means

    def _loss(
        self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean loss; `out` is ``module(x)`` if it is computed already."""
        if self._own_loss:
            return self.model.loss(x, y)
        out = self.model(x) if out is None else out
        if self.data.classes is not None:
            return F.cross_entropy(out, y)
        return F.mse_loss(out.reshape(y.shape), y)  # outputs (n, 1) fit targets (n,)

    def _try(self) -> bool:
        """Try the module on zeros, so that every rank reports an error at once.

        Returns:
            Whether it has an output for each class.

        Raises:
            UserError: If its output or its loss is of a wrong type or shape.
        """
        data, dtype = self.data, getattr(torch, self.config.dtype)
        x = torch.zeros(TRIED, *data.x_shape, dtype=dtype)
        y = torch.zeros(TRIED, *data.y_shape, dtype=dtype if data.classes is None else torch.int64)
        self.model.eval()
        try:
            shape = tuple(getattr(self.model(x), "shape", ()))
        except NotImplementedError:  # no forward method, which its own loss may not need
            if not self._own_loss:
                raise
            shape = ()
        classifies = data.classes is not None and shape == (TRIED, data.classes)
        fits = data.classes is None and shape[:1] == (TRIED,) and np.prod(shape) == y.numel()
        if not (classifies or fits or self._own_loss):
            expected = tuple(y.shape) if data.classes is None else (TRIED, data.classes)
            got = f"{self._name} that makes {shape} of inputs of shape {tuple(x.shape)}"
            raise UserError(got, f"{expected}", "or give it a method loss(self, x, y)")
        loss = self._loss(x, y)
        if not isinstance(loss, torch.Tensor) or loss.shape or not loss.requires_grad:
            kind = f"tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else repr(loss)
            got = f"loss of {self._name} that returned a {kind}"
            raise UserError(got, "a scalar tensor that depends on the parameters")
        return classifies


def _make(cls: type[torch.nn.Module], data: DataInfo, dtype: torch.dtype) -> torch.nn.Module:
    """Return a new module, with floating-point parameters and buffers of the given dtype."""
    try:
        inspect.signature(cls).bind()
    except TypeError:
        return cls(data).to(dtype)
    return cls().to(dtype)
