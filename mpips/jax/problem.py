"""A loss for JAX as the problem of a job: ``python -m mpips.train --problem net.py:loss``."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mpips.datasets import Batch
from mpips.jax.trees import PyTree, arrays, checked_loss, evaluation, loss_alone, value_and_grad
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets import DataInfo

TRIED = 2  # samples that a loss is tried on


class LossProblem(Problem):
    """A loss of a pytree, and what stands beside it in its file.

    That is ``init(rng, data)``, which returns the initial parameters, and if there is one
    ``evaluate(params, x, y)``, which returns means over a batch by name, ``loss`` among them.

    Args:
        loss: ``loss(params, x, y)`` returns the mean loss over a batch. `x` is of shape
            (n, *x_shape); `y` is class numbers, shape (n,), or targets, shape (n, *y_shape).
        beside: Names of its file.
        data: What the dataset looks like.
        config: The run's configuration. In a job of float64 JAX computes in 64 bits.

    Raises:
        UserError: If a leaf is none of floating-point numbers, or the loss no number; what the
            user's code raises, as it is.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        beside: Mapping[str, Any],
        data: "DataInfo",
        config: "Config",
    ) -> None:
        super().__init__(data, config)
        if config.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        self._make = beside["init"]
        params = self._make(np.random.default_rng(config.seed), data)
        self.layout = Layout.of({name: array.shape for name, array in arrays(params).items()})
        like = jax.tree.map(_without_memory, params)
        self._gradient = value_and_grad(loss, like)
        means = beside.get("evaluate") or functools.partial(loss_alone, loss)
        self._evaluate = evaluation(means, like)
        self._rest = data.n_train % config.batch_size  # samples of an epoch's last batch
        self._try(loss, params)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that the file's ``init`` makes."""
        return arrays(self._make(rng, self.data))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient; see `Problem`.

        The first time it is compiled for an epoch's last batch too: a gradient that waited for that
        later would be as many updates old.
        """
        if 0 < self._rest < len(batch):
            n, self._rest = self._rest, 0
            self._gradient(params, Batch(batch.x[:n], batch.y[:n], batch.ids[:n]), out)
        return self._gradient(params, batch, out)

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return what the file's ``evaluate`` does, or the mean loss."""
        return self._evaluate(params, batch)

    def _try(self, loss: Callable[..., Any], params: PyTree) -> None:
        """Trace the loss, so that what is wrong is said on every rank; nothing is computed."""
        data, dtype = self.data, np.dtype(self.config.dtype)
        x = np.zeros((TRIED, *data.x_shape), dtype)
        y = np.zeros((TRIED, *data.y_shape), dtype if data.classes is None else np.int64)
        checked_loss(jax.eval_shape(loss, params, x, y))


def _without_memory(leaf: Any) -> np.ndarray:
    """Return an array of that shape and type: the parameters lie elsewhere."""
    return np.broadcast_to(np.zeros((), np.asarray(leaf).dtype), np.shape(leaf))
