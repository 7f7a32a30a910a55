"""Sparse samples: rows of a compressed matrix, and a source of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpips.datasets.base import Source, not_finite
from mpips.datasets.table import ArrayInfo


@dataclass(frozen=True)
class Csr:
    """Rows of a sparse matrix, one behind the other.

    Attributes:
        starts: Where each row's numbers begin, and the end, shape (n + 1,), int64, from 0.
        indices: The columns, shape (stored,), int64, increasing within a row.
        values: Tsuccessor numbers, shape (stored,).
        width: Columns of the matrix.
    """

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.starts.nbytes + self.indices.nbytes + self.values.nbytes

    @property
    def samples(self) -> np.ndarray:
        """The row of each stored number, shape (stored,), int64."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def __getitem__(self, rows: slice) -> "Csr":
        """Return rows ``begin:end``, with views of their numbers."""
        begin, end, _ = rows.indices(len(self))
        first, last = int(self.starts[begin]), int(self.starts[end])
        starts = self.starts[begin : end + 1] - first
        return Csr(starts, self.indices[first:last], self.values[first:last], self.width)

    def take(self, rows: np.ndarray) -> "Csr":
        """Return some rows, by their numbers, shape (k,), in that order."""
        begins, counts = self.starts[rows], self.starts[rows + 1] - self.starts[rows]
        starts = np.concatenate(([0], np.cumsum(counts)))
        # Where each number of these rows lies: its row's begin plus 0, 1, 2, ...
        places = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
        return Csr(starts, self.indices[places], self.values[places], self.width)

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum of each row's numbers.

        Args:
            numbers: One, or several, a stored number, shape (stored, ...).

        Returns:
            Shape (n, ...), the dtype of `numbers`; zeros of rows without any.
        """
        out = np.zeros((len(self), *numbers.shape[1:]), numbers.dtype)
        filled = np.flatnonzero(np.diff(self.starts))
        if filled.size:
            out[filled] = np.add.reduceat(numbers, self.starts[filled], axis=0)
        return out

    def dense(self) -> np.ndarray:
        """Return the whole matrix, shape (n, width)."""
        out = np.zeros((len(self), self.width), self.values.dtype)
        out[self.samples, self.indices] = self.values
        return out


def join(parts: Sequence[Csr]) -> Csr:
    """Return the rows of all parts, of one width, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0, *(len(part.indices) for part in parts)])
    starts = [part.starts[:-1] + end for part, end in zip(parts, ends, strict=False)]
    indices = np.concatenate([part.indices for part in parts])
    values = np.concatenate([part.values for part in parts])
    return Csr(np.concatenate([*starts, ends[-1:]]), indices, values, parts[0].width)


class SparseSource(Source):
    """Samples whose inputs are `Csr`."""

    def _inputs(self, x: Any, dtype: np.dtype) -> Any:
        with np.errstate(over="ignore"):
            scaled = np.multiply(x.values, self._scale, dtype=dtype, casting="unsafe")
        return replace(x, values=scaled)

    def _check(self, values: Any, array: ArrayInfo, begin: int) -> None:
        if not isinstance(values, Csr):
            super()._check(values, array, begin)
            return
        bad = np.flatnonzero(~np.isfinite(values.values))
        if bad.size:
            at = int(bad[0])
            row, column = begin + int(values.samples[at]), int(values.indices[at])
            raise not_finite(self.table, array, int(self._rows[row]), [column], values.values[at])
