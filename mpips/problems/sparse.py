"""Models of two classes for sparse samples: few of very many features."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mpips import extras
from mpips.config import Config
from mpips.datasets.base import Batch, DataInfo
from mpips.datasets.csr import Csr
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.layout.tables import Init, Normal, Table, Zeros
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP
from mpips.problems.rows import RowReads, Rows, TableProblem

ROWS = "features"


class LogisticSparse(TableProblem):
    """Logistic regression, with the weight of each feature in a row of a table.

    Equation, with z_i = b + sum_j x_ij w_j and labels y in {0, 1}::

        loss = 1/n sum_i log(1 + exp(z_i)) - y_i z_i,   dloss/dz_i = (1 / (1 + exp(-z_i)) - y_i) / n

    Parameters: ``b`` (1,), initially zero. Table ``features``: the row of feature j is w_j,
    initially zero.

    Raises:
        UserError: If the data is not sparse, or does not have two classes.
    """

    name = "logistic_sparse"
    spread: ClassVar[float] = 0.0  # standard deviation of initial factors; 0 for no factors

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        what = f"problem {self.name!r} with"
        if not data.sparse:
            got = f"{what} dataset {data.name!r}, whose samples are dense"
            expected = "libsvm text, or columns of a CSV or Parquet file"
            raise UserError(got, expected, "use --problem softmax")
        if data.classes != 2:
            held = f"{data.classes} classes" if data.classes else "real-valued targets"
            got = f"{what} the {held} of dataset {data.name!r}"
            raise UserError(got, "labels 0 and 1, or -1 and +1")
        self.layout = Layout.of({"b": (1,)})
        dim = 1 + config.factors if self.spread else 1
        init: Init = Normal(self.spread) if self.spread else Zeros()
        self.tables = {ROWS: Table(data.x_shape[0], dim, init)}

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return zeros; `rng` is not used."""
        return {"b": np.zeros(1, self.config.dtype)}

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, write its gradient, and push that of its rows."""
        x: Csr = batch.x
        with np.errstate(all="ignore"):
            terms = x.values[:, None] * rows.pull(ROWS, x.indices)
            sums = x.sums(terms)
            loss, delta = cross_entropy(self._scores(x, terms, sums) + params["b"], batch.y)
            out["b"][0] = delta.sum()
            if np.isfinite(loss):
                slopes = self._slopes(x, terms, sums)
                slopes *= (delta[x.samples] * x.values)[:, None]
                rows.push(ROWS, x.indices, slopes)
        return loss

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: Batch) -> dict[str, float]:
        """Return ``{"loss": mean loss, "accuracy": fraction of correct classifications}``."""
        with np.errstate(all="ignore"):
            z = self._logits(params, rows.pull(ROWS, batch.x.indices), batch.x)
            right = ((z > 0) == batch.y) & np.isfinite(z)
            return {"loss": cross_entropy(z, batch.y)[0], "accuracy": float(right.mean())}

    def wanted_rows(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the features of a batch."""
        return {ROWS: batch.x.indices}

    def _logits(self, params: Arrays, rows: np.ndarray, x: Csr) -> np.ndarray:
        """Return z, shape (n,).

        Args:
            params: The parameters.
            rows: Row of the feature of each stored number of `x`, shape (stored, dim).
            x: The inputs.
        """
        terms = x.values[:, None] * rows
        return self._scores(x, terms, x.sums(terms)) + params["b"]

    def _scores(self, x: Csr, terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Return z without the bias, shape (n,).

        Args:
            x: The inputs.
            terms: ``x_ij`` times the row of j, for each stored number, shape (stored, dim).
            sums: Sum of the terms of each sample, shape (n, dim).
        """
        return sums[:, 0]

    def _slopes(self, x: Csr, terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Return the derivative of z by each of `terms`, in their shape, as a new array."""
        return np.ones_like(terms)


class FactorizationMachine(LogisticSparse):
    """Logistic regression on features and on pairs of features.

    The weight of a pair is the inner product of the factors of its two features. So the model also
    learns weights of rare pairs. Equation, with factors v_j of ``config.factors`` numbers::

        z_i = b + sum_j x_ij w_j + sum_{j < k} <v_j, v_k> x_ij x_ik,
        sum_{j < k} <v_j, v_k> x_ij x_ik = 1/2 (|s_i|^2 - sum_j |x_ij v_j|^2),  s_i = sum_j x_ij v_j

    and the loss of `LogisticSparse`. Parameters: ``b`` (1,), initially zero. Table ``features``:
    the row of feature j is w_j and then v_j, initially normal.

    References: Rendle, ICDM 2010.
    """

    name = "factorization_machine"
    spread = 0.05  # from zero, factors would never change

    def _scores(self, x: Csr, terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """See `LogisticSparse._scores`."""
        own = x.sums((terms[:, 1:] ** 2).sum(axis=1))
        return sums[:, 0] + 0.5 * ((sums[:, 1:] ** 2).sum(axis=1) - own)

    def _slopes(self, x: Csr, terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """See `LogisticSparse._slopes`."""
        slopes: np.ndarray = sums[x.samples] - terms
        slopes[:, 0] = 1
        return slopes


class WideDeep(LogisticSparse):
    """Logistic regression on features plus a perceptron on their embeddings, trained jointly.

    Equation, with embeddings v_j of ``config.factors`` numbers, and the perceptron of `MLP` with
    ``config.hidden`` layers of ``config.activation`` and one output::

        z_i = sum_j x_ij w_j + mlp(sum_j x_ij v_j)

    and the loss of `LogisticSparse`. A sample may have any number of features, so their embeddings
    are summed. PyTorch computes the gradients of z.

    Parameters: those of `MLP`; its last bias is the bias of the model. Table ``features``: the row
    of feature j is w_j and then v_j, initially normal.

    Raises:
        UserError: As `LogisticSparse`, or if PyTorch is not installed.

    References: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.
    """

    name = "wide_deep"
    spread = 0.3

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self._torch = extras.load("torch", "PyTorch", "torch", f"problem {self.name} is made of")
        deep = dataclasses.replace(data, x_shape=(config.factors,), y_shape=(), classes=None)
        self._deep = MLP(deep, config)
        self.layout = self._deep.layout

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the initial parameters of `MLP`."""
        return self._deep.init(rng)

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, write its gradient, and push that of its rows."""
        x: Csr = batch.x
        given = self._tensors(params)
        read = self._torch.from_numpy(rows.pull(ROWS, x.indices))
        for leaf in (*given.values(), read):
            leaf.requires_grad_()
        z = self._forward(given, read, x)
        with np.errstate(all="ignore"):
            loss, delta = cross_entropy(z.detach().numpy(), batch.y)
        z.backward(self._torch.from_numpy(delta))
        for name, leaf in given.items():
            out[name][...] = leaf.grad.numpy()
        if np.isfinite(loss):
            rows.push(ROWS, x.indices, read.grad.numpy())
        return loss

    def _logits(self, params: Arrays, rows: np.ndarray, x: Csr) -> np.ndarray:
        """See `LogisticSparse._logits`."""
        with self._torch.no_grad():
            return self._forward(self._tensors(params), self._torch.from_numpy(rows), x).numpy()

    def _tensors(self, params: Arrays) -> dict[str, Any]:
        """Return copies of the parameters: PyTorch warns of read-only arrays such as a replica."""
        return {name: self._torch.tensor(params[name]) for name in self.layout.names}

    def _forward(self, params: dict[str, Any], rows: Any, x: Csr) -> Any:
        """Return z, a tensor of shape (n,); arguments as `LogisticSparse._logits`, as tensors."""
        torch = self._torch
        terms = torch.from_numpy(x.values)[:, None] * rows
        sums = terms.new_zeros(len(x), terms.shape[1])
        sums = sums.index_add(0, torch.from_numpy(x.samples), terms)
        activation, h = getattr(torch, self.config.activation), sums[:, 1:]
        depth = len(params) // 2
        for k in range(1, depth + 1):
            h = torch.addmm(params[f"b{k}"], h, params[f"w{k}"])
            if k < depth:
                h = activation(h)
        return sums[:, 0] + h[:, 0]


def cross_entropy(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean cross entropy of 1 / (1 + exp(-z)) and labels, and its gradient by z.

    The result is correct for logits of any magnitude.

    Args:
        z: Logits, shape (n,).
        y: Labels 0 and 1, shape (n,), integers.
    """
    small = np.exp(-np.abs(z))  # in (0, 1]
    losses = np.maximum(z, 0) + np.log1p(small) - y.astype(z.dtype) * z
    delta = np.where(z >= 0, 1, small) / (1 + small) - y
    return float(losses.mean(dtype=np.float64)), (delta / len(y)).astype(z.dtype)
