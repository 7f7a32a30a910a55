"""PowerSGD: low-rank factors in place of matrices, for sums over nodes.

It is not a `Codec`, since no node can encode its vector alone: the nodes compute the factors of
their sum together, in two Allreduces (`mpips.rounds.powersgd`). Let S_w, shape (m, n), be node w's
share of the mean gradient, and E_w the error that it kept. A round is

    M_w = S_w + E_w
    P = sum_w M_w Q;  P^ = orthogonalize(P)
    Q_w = M_w^T P^;  Q' = sum_w Q_w
    G = P^ Q'^T  goes to the update rule;  E_w = M_w - P^ Q_w^T;  Q = Q' in the next round

where Q has shape (n, r) and begins with normal random numbers. G is the sum of all M_w, projected
onto the columns of P^. This is one step of the power method, which starts from the last round's Q.
The errors E_w add up to the part of the sum that G lacks. If a column of P depends linearly on the
columns before it, the round drops it, and its column of Q is drawn again.

A parameter of two or more dimensions is a matrix of shape (shape[0], -1). Vectors, and parameters
of less than 64 KiB, are sent uncompressed. So are matrices whose factors are not smaller than half
the matrix.

References: Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mpips.codecs import RAW_BYTES
from mpips.kernels.compiled import kernel
from mpips.layout import Layout, Shard

if TYPE_CHECKING:  # the compiler of loops defines this name
    from mpips.kernels.intrinsics import scratch

_BLOCK = 1024  # elements of a row that stay in the L1 cache over all columns of P^
_LANES = 8
_LOST = 1e-13  # a column that keeps no more of its length after the projections is dropped


@dataclass(frozen=True)
class Matrix:
    """A parameter that is sent as two factors.

    Attributes:
        name: Its name in the layout.
        begin: Index of its first element in the flat vector.
        m: Number of rows.
        n: Number of columns.
        p_begin: Index of its P, shape (m, r), in the vector of all P.
        q_begin: Index of its Q in the vector of all Q; Q is stored transposed, shape (r, n).
    """

    name: str
    begin: int
    m: int
    n: int
    p_begin: int
    q_begin: int


@dataclass(frozen=True)
class Factors:
    """Division of the flat vector into matrices, sent as factors, and uncompressed ranges.

    Attributes:
        rank: Number r of columns of a factor.
        matrices: The parameters that are sent as factors.
        raw: The ranges that are sent uncompressed; they cover all other parameters.
    """

    rank: int
    matrices: tuple[Matrix, ...]
    raw: tuple[Shard, ...]

    @classmethod
    def of(cls, layout: Layout, dtype: np.typing.DTypeLike, rank: int) -> "Factors":
        """Choose which parameters of a layout are sent as factors."""
        matrices, raw, p, q = [], list[Shard](), 0, 0
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            begin, end = layout.slices()[name]
            m, n = shape[0] if shape else 1, math.prod(shape[1:])
            large = (end - begin) * np.dtype(dtype).itemsize >= RAW_BYTES
            if len(shape) > 1 and large and 2 * rank * (m + n) < m * n:
                matrices.append(Matrix(name, begin, m, n, p, q))
                p, q = p + m * rank, q + n * rank
            elif raw and raw[-1].end == begin:
                raw[-1] = Shard(raw[-1].begin, end)
            else:
                raw.append(Shard(begin, end))
        return cls(rank, tuple(matrices), tuple(raw))

    @property
    def p_size(self) -> int:
        """Number of elements of all P."""
        return self.rank * sum(matrix.m for matrix in self.matrices)

    @property
    def q_size(self) -> int:
        """Number of elements of all Q."""
        return self.rank * sum(matrix.n for matrix in self.matrices)

    @property
    def raw_size(self) -> int:
        """Number of elements that are sent uncompressed."""
        return sum(part.size for part in self.raw)

    @property
    def sent(self) -> int:
        """Number of elements that a round sums over the nodes."""
        return self.p_size + self.q_size + self.raw_size

    def raw_parts(self, begin: int, end: int) -> list[tuple[int, Shard]]:
        """Map a range of the uncompressed elements to ranges of the flat vector.

        Args:
            begin: First element, counted over all ranges of `raw` in their order.
            end: One past the last element.

        Returns:
            For each range of the flat vector, the count of its first element, and the range.
        """
        ranges, at = [], 0
        for part in self.raw:
            a, b = max(begin, at), min(end, at + part.size)
            if a < b:
                ranges.append((a, Shard(part.begin + a - at, part.begin + b - at)))
            at += part.size
        return ranges

    def first_basis(self, seed: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """Return the initial Q of all matrices, shape (q_size,), the same on every node."""
        parts = [drawn(seed, 0, k, (self.rank, x.n)).ravel() for k, x in enumerate(self.matrices)]
        return np.concatenate([np.zeros(0), *parts]).astype(dtype)


def drawn(seed: int, step: int, index: int, shape: tuple[int, int]) -> np.ndarray:
    """Return standard normal numbers, a function of seed, round and index of the matrix."""
    return np.random.default_rng([seed, step, index]).standard_normal(shape)


# The loops sum in a fixed order, in IEEE arithmetic. So nodes get the same bits even if their
# processors and numbers of ranks differ; they do not send each other the parameters.


@kernel()
def _dot(x: np.ndarray, y: np.ndarray) -> float:
    lanes = scratch(_LANES)
    lanes[:] = 0
    whole = x.size - x.size % _LANES
    for at in range(0, whole, _LANES):
        a, b = x[at : at + _LANES], y[at : at + _LANES]
        for k in range(_LANES):
            lanes[k] += np.float64(a[k]) * np.float64(b[k])
    total = 0.0
    for k in range(_LANES):
        total += lanes[k]
    for i in range(whole, x.size):
        total += np.float64(x[i]) * np.float64(y[i])
    return total


@kernel()
def orthogonalize(p: np.ndarray, work: np.ndarray, lost: np.ndarray) -> None:
    """Make the columns of `p` orthonormal in place, by modified Gram-Schmidt in float64.

    Each column is projected twice, so the columns are orthogonal to working precision even if they
    were almost dependent. A column of which the projections leave nearly nothing is set to zero. A
    column that is not finite stays not finite.

    Args:
        p: The columns, shape (m, r); overwritten.
        work: Scratch memory, shape (r, m), dtype float64; overwritten.
        lost: Set to True for each column that was set to zero, shape (r,), dtype bool.
    """
    for j in range(work.shape[0]):
        x, top = work[j], 0.0
        for i in range(x.size):
            x[i] = p[i, j]
            top = max(top, abs(x[i]))
        if top > 0:  # scaled, so that no square overflows
            for i in range(x.size):
                x[i] /= top
        before = math.sqrt(_dot(x, x))
        for _ in range(2):
            for k in range(j):
                y = work[k]
                along = _dot(x, y)
                for i in range(x.size):
                    x[i] -= along * y[i]
        after = math.sqrt(_dot(x, x))
        lost[j] = after <= _LOST * before  # False if one of them is NaN
        for i in range(x.size):
            x[i] = 0.0 if lost[j] else x[i] / after
            p[i, j] = x[i]


@kernel()
def rebuild(
    p: np.ndarray, q: np.ndarray, own: np.ndarray, error: np.ndarray, grad: np.ndarray
) -> None:
    """Set ``grad = p q`` and subtract ``p own`` from `error`.

    Args:
        p: Rows of P^, shape (rows, r).
        q: Transpose of Q', shape (r, n).
        own: Transpose of this node's Q_w, shape (r, n).
        error: The same rows of M_w, shape (rows, n); they become those of E_w.
        grad: Gets the same rows of G, shape (rows, n).
    """
    for i in range(p.shape[0]):
        for at in range(0, q.shape[1], _BLOCK):
            g, e = grad[i, at : at + _BLOCK], error[i, at : at + _BLOCK]
            g[:] = 0
            for k in range(p.shape[1]):
                factor = p[i, k]
                x, y = q[k, at : at + _BLOCK], own[k, at : at + _BLOCK]
                for j in range(g.size):
                    g[j] += factor * x[j]
                    e[j] -= factor * y[j]


@kernel()
def product_squares(p: np.ndarray, q: np.ndarray) -> float:
    """Return the sum of the squares of ``p q``, without computing the product.

    Args:
        p: Shape (m, r).
        q: Shape (r, n).
    """
    total = 0.0
    for k in range(q.shape[0]):
        for j in range(k + 1):
            inner = 0.0
            for i in range(p.shape[0]):
                inner += np.float64(p[i, k]) * np.float64(p[i, j])
            total += (1.0 if j == k else 2.0) * inner * _dot(q[k], q[j])
    return total


@cache
def warm_powersgd(dtype: str) -> None:
    """Compile the loops of this module, or load them from the cache on disk."""
    one, lost = np.ones((1, 1), dtype), np.zeros(1, np.bool_)
    orthogonalize(one, np.zeros((1, 1)), lost)
    rebuild(one, one.copy(), one.copy(), one.copy(), one.copy())
    product_squares(one, one.copy())
