"""PowerSGD: low-rank factors in place of matrices, for sums over nodes.

It is no `Codec`, as it packs no vector by itself: what nodes send are the factors of their common
sum, in two Allreduces (`mpips.rounds.powersgd`). For a matrix of shape (m, n), node w's part S_w of
the mean gradient and the error E_w that it kept, a round is

    M_w = S_w + E_w
    P = sum_w M_w Q;  P^ = orthogonalize(P)
    Q_w = M_w^T P^;  Q' = sum_w Q_w
    G = P^ Q'^T  goes to the update rule;  E_w = M_w - P^ Q_w^T;  Q = Q' in the next round

with Q of shape (n, r), normal at first. G is the sum of all M_w projected onto the columns of P^:
one step of the power method, begun where the last round ended. Summed over nodes, what is kept is
what G lacks. A column of P that depends on those before it is dropped for the round, and its
column of Q drawn anew.

Parameters of two or more dimensions are matrices of shape (shape[0], -1). Those under 64 KB, and
those whose factors are not half as large, go as they are, as vectors do.

References: Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mpips.codecs import RAW_BYTES
from mpips.kernels.compiled import kernel
from mpips.layout import Layout, Shard

if TYPE_CHECKING:  # where a loop is compiled, this is among its names
    from mpips.kernels.intrinsics import scratch

_BLOCK = 1024  # elements of a row that stay in the first-level cache over the columns of P^
_LANES = 8
_LOST = 1e-13  # share of its length that a column must keep when the others are projected out


@dataclass(frozen=True)
class Matrix:
    """A parameter that is sent as two factors.

    Attributes:
        name: Its name in the layout.
        begin: Of its first element in the flat vector.
        m: Rows.
        n: Columns.
        p_begin: Of its P, shape (m, r), in the vector of all of them.
        q_begin: Likewise of its Q, which is held as its transpose, shape (r, n).
    """

    name: str
    begin: int
    m: int
    n: int
    p_begin: int
    q_begin: int


@dataclass(frozen=True)
class Factors:
    """How the flat vector is sent: which parts as factors, and which as they are.

    Attributes:
        rank: r.
        matrices: The parts that are sent as factors.
        raw: Everything else.
    """

    rank: int
    matrices: tuple[Matrix, ...]
    raw: tuple[Shard, ...]

    @classmethod
    def of(cls, layout: Layout, dtype: np.typing.DTypeLike, rank: int) -> "Factors":
        """Choose the matrices of a layout."""
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
        """Elements of all P."""
        return self.rank * sum(matrix.m for matrix in self.matrices)

    @property
    def q_size(self) -> int:
        """Elements of all Q."""
        return self.rank * sum(matrix.n for matrix in self.matrices)

    @property
    def raw_size(self) -> int:
        """Elements that are sent as they are."""
        return sum(part.size for part in self.raw)

    @property
    def sent(self) -> int:
        """Elements that a round adds up over the nodes."""
        return self.p_size + self.q_size + self.raw_size

    def raw_parts(self, begin: int, end: int) -> list[tuple[int, Shard]]:
        """Cut ``[begin, end)`` of the raw elements, one after another, into flat ranges.

        Returns:
            For each range, the number of its first raw element, and the range.
        """
        found, at = [], 0
        for part in self.raw:
            a, b = max(begin, at), min(end, at + part.size)
            if a < b:
                found.append((a, Shard(part.begin + a - at, part.begin + b - at)))
            at += part.size
        return found

    def first_basis(self, seed: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """Return the first Q of all matrices, shape (q_size,), the same on every node."""
        parts = [drawn(seed, 0, k, (self.rank, x.n)).ravel() for k, x in enumerate(self.matrices)]
        return np.concatenate([np.zeros(0), *parts]).astype(dtype)


def drawn(seed: int, step: int, index: int, shape: tuple[int, int]) -> np.ndarray:
    """Return normal numbers, a function of the seed, the round and the matrix."""
    return np.random.default_rng([seed, step, index]).standard_normal(shape)


def cut_rows(m: int, parts: Iterable[int], count: int) -> list[tuple[int, int]]:
    """Return the rows ``[begin, end)`` of each of `parts` out of `count` equal ones."""
    return [(m * k // count, m * (k + 1) // count) for k in parts]


# Sums are made in an order that is written here, in IEEE arithmetic, so that nodes of different
# processors and with different numbers of ranks get equal bits: no parameter is sent between them.


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

    Each column is projected twice, so that they are orthogonal to working precision however
    dependent they were. One that all but vanishes is set to zero. What is not finite stays so.

    Args:
        p: Shape (m, r).
        work: Shape (r, m), dtype float64; overwritten.
        lost: Shape (r,), dtype bool: set to which columns are zero now.
    """
    for j in range(work.shape[0]):
        x, top = work[j], 0.0
        for i in range(x.size):
            x[i] = p[i, j]
            top = max(top, abs(x[i]))
        if top > 0:  # so that no square overflows
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
        lost[j] = after <= _LOST * before  # never where either is NaN
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
        q: The transpose of Q', shape (r, n).
        own: That of this node's Q_w, shape (r, n).
        error: The same rows of M_w, shape (rows, n).
        grad: Of that shape.
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
    """Return the sum of the squares of ``p q``, without making it; shapes (m, r) and (r, n)."""
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
    """Compile, or load from the cache on disk, the loops."""
    one, lost = np.ones((1, 1), dtype), np.zeros(1, np.bool_)
    orthogonalize(one, np.zeros((1, 1)), lost)
    rebuild(one, one.copy(), one.copy(), one.copy(), one.copy())
    product_squares(one, one.copy())
