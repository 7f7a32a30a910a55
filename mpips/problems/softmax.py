"""Softmax regression (multinomial logistic regression) with cross-entropy loss."""

import math
from typing import TYPE_CHECKING

import numpy as np

from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem, Workspace, affine, affine_grad, flat_inputs

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo


class Softmax(Problem):
    """Softmax regression of class labels.

    Equation, with z = x w + b, p = softmax(z) and Y the labels as one-hot rows::

        loss = -1/n sum_i log p_{i, y_i},   dloss/dw = x^T (p - Y) / n,   dloss/db = 1^T (p - Y) / n

    Parameters: ``w`` (inputs, classes) and ``b`` (classes,), zero at first (the loss is convex).

    Raises:
        UserError: If the dataset has no class labels.
    """

    def __init__(self, data: "DataInfo", config: "Config") -> None:
        super().__init__(data, config)
        if data.classes is None:
            remedy = "use --problem linear, or store the labels as integers from 0"
            if data.countable:
                remedy = f"they are whole numbers: give --classes {data.countable}"
            raise UserError(
                f"problem 'softmax' with the real-valued targets of dataset {data.name!r}",
                "class labels",
                remedy,
            )
        inputs = math.prod(data.x_shape)
        self.layout = Layout.of({"w": (inputs, data.classes), "b": (data.classes,)})
        self._work = Workspace()

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return zeros; `rng` is not used."""
        return self.layout.views(np.zeros(self.layout.size, self.config.dtype))

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient to `out`."""
        with np.errstate(all="ignore"):
            x = flat_inputs(batch.x)
            delta = self._logits(params, x, self._work)
            loss = cross_entropy(delta, batch.y)
            affine_grad(x, delta, out["w"], out["b"])
        return loss

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return ``{"loss": mean loss, "accuracy": part of the samples classified rightly}``."""
        with np.errstate(all="ignore"):
            z = self._logits(params, flat_inputs(batch.x), Workspace())
            right = accuracy(z, batch.y)
            return {"loss": cross_entropy(z, batch.y), "accuracy": right}

    def _logits(self, params: Arrays, x: np.ndarray, work: Workspace) -> np.ndarray:
        w, b = params["w"], params["b"]
        return affine(x, w, b, work.array("z", (x.shape[0], w.shape[1]), w.dtype))


def cross_entropy(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross entropy of softmax(z) and labels; `z` becomes its gradient.

    Logits of any size are right: the largest of each row is subtracted first.

    Args:
        z: Logits, shape (n, classes); overwritten with ``(softmax(z) - onehot(y)) / n``.
        y: Labels, shape (n,), integers in [0, classes) (the dataset's reader has checked them).
    """
    rows = np.arange(z.shape[0])
    z -= z.max(axis=1, keepdims=True)
    own = z[rows, y]
    np.exp(z, out=z)
    total = z.sum(axis=1, keepdims=True)
    losses = np.log(total[:, 0]) - own
    z /= total
    z[rows, y] -= 1
    z /= z.shape[0]
    return float(losses.mean(dtype=np.float64))


def accuracy(z: np.ndarray, y: np.ndarray) -> float:
    """Return the part of the rows of `z` whose largest entry is at the label.

    Args:
        z: Logits, shape (n, classes). A row whose largest is NaN or infinite counts as wrong.
        y: Labels, shape (n,), integers.
    """
    best = z.argmax(axis=1)
    # A model that has diverged is not right by chance; argmax takes a NaN for the largest.
    defined = np.isfinite(z[np.arange(z.shape[0]), best])
    return float(np.mean((best == y) & defined))
