"""Wide and deep learning on samples of few of very many features, for two classes, in PyTorch."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips import extras
from mpips.layout.tables import Normal, Table
from mpips.problems.base import Arrays
from mpips.problems.logistic_sparse import ROWS, LogisticSparse
from mpips.problems.mlp import MLP
from mpips.problems.rows import RowReads, Rows

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo
    from mpips.datasets.csr import Csr

SPREAD = 0.3  # of rows at first


class WideDeep(LogisticSparse):
    """Logistic regression on features, and a perceptron on their embeddings, trained as one.

    Equation, with embeddings v_j of ``config.factors`` numbers, and the perceptron of `MLP` with
    ``config.hidden`` layers of ``config.activation`` and one output::

        z_i = sum_j x_ij w_j + mlp(sum_j x_ij v_j)

    and the loss of `LogisticSparse`. Embeddings are summed, as a sample may have any number of
    features. Gradients are PyTorch's.

    Parameters: those of `MLP`, whose last bias is the model's. Table ``features``, a row a feature:
    w_j and then v_j, normally distributed at first.

    Raises:
        UserError: As `LogisticSparse` and `MLP`, or if there is no PyTorch.

    References: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.
    """

    name = "wide_deep"

    def __init__(self, data: "DataInfo", config: "Config") -> None:
        super().__init__(data, config)
        self._torch = extras.load("torch", "PyTorch", "torch", f"problem {self.name} is made of")
        deep = dataclasses.replace(data, x_shape=(config.factors,), y_shape=(), classes=None)
        self._deep = MLP(deep, config)
        self.layout = self._deep.layout

    def _table(self, features: int) -> Table:
        return Table(rows=features, dim=1 + self.config.factors, init=Normal(SPREAD))

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return those that `MLP` begins with."""
        return self._deep.init(rng)

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, write its gradient, push that of its rows."""
        x: Csr = batch.x
        given = self._tensors(params)
        read = self._torch.from_numpy(rows.pull(ROWS, x.indices))
        for leaf in (*given.values(), read):
            leaf.requires_grad_()
        loss = self._loss(self._scores_of(given, read, x), batch.y)
        loss.backward()
        for name, leaf in given.items():
            out[name][...] = leaf.grad.numpy()
        if np.isfinite(found := float(loss.detach())):
            rows.push(ROWS, x.indices, read.grad.numpy())
        return found

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: "Batch") -> dict[str, float]:
        """Return ``{"loss": mean loss, "accuracy": part of the samples classified rightly}``."""
        x: Csr = batch.x
        with self._torch.no_grad():
            given = self._tensors(params)
            z = self._scores_of(given, self._torch.from_numpy(rows.pull(ROWS, x.indices)), x)
            right = ((z.numpy() > 0) == batch.y) & z.isfinite().numpy()
            return {"loss": float(self._loss(z, batch.y)), "accuracy": float(right.mean())}

    def _tensors(self, params: Arrays) -> dict[str, Any]:
        """Return copies of the parameters: a replica is only to be read, which PyTorch warns of."""
        return {name: self._torch.tensor(params[name]) for name in self.layout.names}

    def _scores_of(self, params: dict[str, Any], rows: Any, x: "Csr") -> Any:
        """Return z, a tensor of shape (n,), of parameters and of a row a stored number."""
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

    def _loss(self, z: Any, y: np.ndarray) -> Any:
        """Return the mean cross entropy, a tensor."""
        wanted = self._torch.from_numpy(y).to(z.dtype)
        return self._torch.nn.functional.binary_cross_entropy_with_logits(z, wanted)
