"""Linear regression with squared loss."""

import math
from typing import TYPE_CHECKING

import numpy as np

from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem, Workspace, affine, affine_grad, flat_inputs

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo


class Linear(Problem):
    """Linear regression of real-valued targets, one or several columns.

    Equation, with r = x w + b - y, shape (n, outputs)::

        loss = 1/n sum_i 1/2 sum_j r_ij^2,   dloss/dw = x^T r / n,   dloss/db = 1^T r / n

    Parameters: ``w`` (inputs, outputs) and ``b`` (outputs,), zero at first (the loss is convex).

    Raises:
        UserError: If the dataset has class labels.
    """

    def __init__(self, data: "DataInfo", config: "Config") -> None:
        super().__init__(data, config)
        if data.classes is not None:
            raise UserError(
                f"problem 'linear' with the {data.classes} class labels of dataset {data.name!r}",
                "real-valued targets",
                "use --problem softmax, or store the targets in floating point",
            )
        inputs, outputs = math.prod(data.x_shape), math.prod(data.y_shape)
        self.layout = Layout.of({"w": (inputs, outputs), "b": (outputs,)})
        self._work = Workspace()

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return zeros; `rng` is not used."""
        return self.layout.views(np.zeros(self.layout.size, self.config.dtype))

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient to `out`."""
        with np.errstate(all="ignore"):
            x = flat_inputs(batch.x)
            delta = self._predict(params, x, self._work)
            loss = squared_error(delta, batch.y)
            affine_grad(x, delta, out["w"], out["b"])
        return loss

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return ``{"loss": mean loss}``."""
        with np.errstate(all="ignore"):
            z = self._predict(params, flat_inputs(batch.x), Workspace())
            return {"loss": squared_error(z, batch.y)}

    def _predict(self, params: Arrays, x: np.ndarray, work: Workspace) -> np.ndarray:
        w, b = params["w"], params["b"]
        return affine(x, w, b, work.array("z", (x.shape[0], w.shape[1]), w.dtype))


def squared_error(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over rows of ``1/2 sum_j (z_ij - y_ij)^2``; `z` becomes its gradient.

    Args:
        z: Predictions, shape (n, k); overwritten with ``(z - y) / n``.
        y: Targets, n * k numbers in any shape that begins with n.
    """
    n = z.shape[0]
    z -= y.reshape(z.shape)
    # Summed in float64: the square of a float32 residual overflows long before the residual.
    total = np.einsum("ij,ij->", z, z, dtype=np.float64, casting="same_kind")
    z /= n
    return float(total) / (2 * n)
