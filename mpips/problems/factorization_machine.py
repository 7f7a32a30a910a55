"""Factorization machine of the second order, for two classes."""

import numpy as np

from mpips.datasets.csr import Csr
from mpips.layout.tables import Normal, Table
from mpips.problems.logistic_sparse import LogisticSparse

SPREAD = 0.05  # of factors at first: without any, they would stay where they are


class FactorizationMachine(LogisticSparse):
    """Logistic regression on features and on pairs of them.

    A pair's weight is the product of the factors of its two features, so that one is learnt also
    for pairs that occur seldom. Equation, with factors v_j of ``config.factors`` numbers::

        z_i = b + sum_j x_ij w_j + sum_{j < k} <v_j, v_k> x_ij x_ik,
        sum_{j < k} <v_j, v_k> x_ij x_ik = 1/2 (|s_i|^2 - sum_j |x_ij v_j|^2),  s_i = sum_j x_ij v_j

    and the loss of `LogisticSparse`. Parameters: ``b`` (1,), zero at first. Table ``features``, a
    row a feature: w_j and then v_j, normally distributed at first.

    References: Rendle, ICDM 2010.
    """

    name = "factorization_machine"

    def _table(self, features: int) -> Table:
        return Table(rows=features, dim=1 + self.config.factors, init=Normal(SPREAD))

    def _scores(self, x: Csr, terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """See `LogisticSparse._scores`."""
        own = x.sums((terms[:, 1:] ** 2).sum(axis=1))
        scores: np.ndarray = sums[:, 0] + 0.5 * ((sums[:, 1:] ** 2).sum(axis=1) - own)
        return scores

    def _slopes(self, x: Csr, terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """See `LogisticSparse._slopes`."""
        slopes: np.ndarray = sums[x.samples] - terms
        slopes[:, 0] = 1
        return slopes
