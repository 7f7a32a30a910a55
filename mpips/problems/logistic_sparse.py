"""Logistic regression of two classes on samples of few of very many features."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpips.errors import UserError
from mpips.layout import Layout
from mpips.layout.tables import Table, Zeros
from mpips.problems.base import Arrays
from mpips.problems.rows import RowReads, Rows, TableProblem

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo
    from mpips.datasets.csr import Csr

ROWS = "features"


class LogisticSparse(TableProblem):
    """Logistic regression with a row of a table for each feature.

    Equation, with z_i = b + sum_j x_ij w_j and labels y in {0, 1}::

        loss = 1/n sum_i log(1 + exp(z_i)) - y_i z_i,   dloss/dz_i = (1 / (1 + exp(-z_i)) - y_i) / n

    Parameters: ``b`` (1,), zero at first. Table ``features``, a row a feature: w_j, zero at first.

    Raises:
        UserError: If the data is not sparse, or has not two classes.
    """

    name = "logistic_sparse"

    def __init__(self, data: "DataInfo", config: "Config") -> None:
        super().__init__(data, config)
        what = f"problem {self.name!r} with"
        if not data.sparse:
            got = f"{what} dataset {data.name!r}, whose samples are dense"
            raise UserError(
                got, "libsvm text, or columns of a CSV or Parquet file", "use --problem softmax"
            )
        if data.classes != 2:
            held = f"{data.classes} classes" if data.classes else "real-valued targets"
            got = f"{what} the {held} of dataset {data.name!r}"
            raise UserError(got, "labels 0 and 1, or -1 and +1")
        self.layout = Layout.of({"b": (1,)})
        self.tables = {ROWS: self._table(data.x_shape[0])}

    def _table(self, features: int) -> Table:
        return Table(rows=features, dim=1, init=Zeros())

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return zeros; `rng` is not used."""
        return {"b": np.zeros(1, self.config.dtype)}

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, write its gradient, push that of its rows."""
        x: Csr = batch.x
        with np.errstate(all="ignore"):
            terms = x.values[:, None] * rows.pull(ROWS, x.indices)
            sums = x.sums(terms)
            z = self._scores(x, terms, sums) + params["b"]
            loss, delta = cross_entropy(z, batch.y)
            out["b"][0] = delta.sum()
            if np.isfinite(loss):
                slopes = self._slopes(x, terms, sums)
                slopes *= (delta[x.samples] * x.values)[:, None]
                rows.push(ROWS, x.indices, slopes)
        return loss

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: "Batch") -> dict[str, float]:
        """Return ``{"loss": mean loss, "accuracy": part of the samples classified rightly}``."""
        x: Csr = batch.x
        with np.errstate(all="ignore"):
            terms = x.values[:, None] * rows.pull(ROWS, x.indices)
            z = self._scores(x, terms, x.sums(terms)) + params["b"]
            right = ((z > 0) == batch.y) & np.isfinite(z)
            return {"loss": cross_entropy(z, batch.y)[0], "accuracy": float(right.mean())}

    def wanted_rows(self, batch: "Batch") -> Mapping[str, np.ndarray]:
        """Return the features of a batch."""
        return {ROWS: batch.x.indices}

    def _scores(self, x: "Csr", terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Return z but for the bias.

        Args:
            x: The inputs.
            terms: ``x_ij`` times the row of j, shape (stored, dim).
            sums: Of each sample's, shape (n, dim).
        """
        scores: np.ndarray = sums[:, 0]
        return scores

    def _slopes(self, x: "Csr", terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Return the derivative of a sample's z by each of `terms`, their shape, a new array."""
        return np.ones_like(terms)


def cross_entropy(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean cross entropy of 1 / (1 + exp(-z)) and labels, and its gradient by z.

    Logits of any size are right.

    Args:
        z: Logits, shape (n,).
        y: Labels 0 and 1, shape (n,), integers.
    """
    small = np.exp(-np.abs(z))  # in (0, 1]
    losses = np.maximum(z, 0) + np.log1p(small) - y.astype(z.dtype) * z
    delta = np.where(z >= 0, 1, small) / (1 + small) - y
    return float(losses.mean(dtype=np.float64)), (delta / len(y)).astype(z.dtype)
