"""Sparse samples: compressed rows, and columns of categories hashed to ids.

For columns of categories, ``train.csv::site,device,click``, each value of each column of inputs is
a feature of value `scale`, by default 1. Its id is a hash of the column's name and the value as
text. So no values are counted or stored, and values that training has not seen have ids too. Two
values may share an id. This is rare as long as there are far fewer values than ids, and shared ids
are counted.

Reference: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpips.datasets.base import Source, not_finite
from mpips.datasets.table import ArrayInfo

IDS = 1 << 20


@dataclass(frozen=True)
class Csr:
    """Rows of a sparse matrix in compressed form.

    Attributes:
        starts: Offset of each row's numbers, and the end, shape (n + 1,), int64, from 0.
        indices: Columns of the numbers, shape (stored,), int64, increasing within a row.
        values: The numbers, shape (stored,).
        width: Number of columns of the matrix.
    """

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.starts.nbytes + self.indices.nbytes + self.values.nbytes

    @property
    def samples(self) -> np.ndarray:
        """Row of each stored number, shape (stored,), int64."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def __getitem__(self, rows: slice) -> "Csr":
        """Return rows ``begin:end``, with views of their numbers."""
        begin, end, _ = rows.indices(len(self))
        first, last = int(self.starts[begin]), int(self.starts[end])
        starts = self.starts[begin : end + 1] - first
        return Csr(starts, self.indices[first:last], self.values[first:last], self.width)

    def take(self, rows: np.ndarray) -> "Csr":
        """Return the given rows, shape (k,), in that order."""
        begins, counts = self.starts[rows], self.starts[rows + 1] - self.starts[rows]
        starts = np.concatenate(([0], np.cumsum(counts)))
        # Offset of each number of these rows: its row's begin plus 0, 1, 2, ...
        offsets = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
        return Csr(starts, self.indices[offsets], self.values[offsets], self.width)

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum over each row's numbers.

        Args:
            numbers: A value or an array for each stored number, shape (stored, ...).

        Returns:
            Sums, shape (n, ...), the dtype of `numbers`; zeros for empty rows.
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
    """Return the rows of all parts, in order; the parts have the same width."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0, *(len(part.indices) for part in parts)])
    starts = [part.starts[:-1] + end for part, end in zip(parts, ends, strict=False)]
    indices = np.concatenate([part.indices for part in parts])
    values = np.concatenate([part.values for part in parts])
    return Csr(np.concatenate([*starts, ends[-1:]]), indices, values, parts[0].width)


class Seen:
    """Ids that this process has read, and ids that it has read for more than one value.

    Args:
        ids: Number of ids. If there are more than `IDS`, only every k-th id is tracked.
    """

    def __init__(self, ids: int = IDS) -> None:
        self._ids, self._step = ids, -(-ids // IDS)
        self._prints = np.zeros(0, np.uint32)  # fingerprint of each id's first value; 0: not read
        self._shared = np.zeros(0, bool)

    def add(self, digests: np.ndarray) -> None:
        """Note values that were read, by their digests, shape (n,), uint64."""
        if not self._prints.size:
            self._prints, self._shared = np.zeros(self.of, np.uint32), np.zeros(self.of, bool)
        if self._step > 1:
            digests = digests[digests % self._ids % self._step == 0]
        ids = (digests % self._ids).astype(np.int64) // self._step
        prints = (digests // self._ids).astype(np.uint32) | 1
        new = self._prints[ids] == 0
        self._prints[ids[new]] = prints[new]
        self._shared[ids[self._prints[ids] != prints]] = True

    def clear(self) -> None:
        """Forget all ids."""
        self._prints, self._shared = self._prints[:0], self._shared[:0]

    @property
    def of(self) -> int:
        """Number of ids that are tracked."""
        return -(-self._ids // self._step)

    @property
    def bits(self) -> np.ndarray | None:
        """Bits of the ids that were read and that are shared, shape (2, of / 8), uint8, or None.

        It is None if no id was read. Join the bits of several processes by ``|``.
        """
        if not self._prints.size:
            return None
        return np.packbits([self._prints != 0, self._shared], axis=1)


seen = Seen()  # ids of the data that was opened last


def ids_of(column: str, values: Any) -> np.ndarray:
    """Return the ids of a column's values.

    Args:
        column: Name of the column.
        values: An Arrow array of text, or of values that can be cast to text; a missing value is
            the empty text.

    Returns:
        Ids from 0 to ``IDS - 1``, shape (n,), int64.
    """
    coded = values if hasattr(values, "dictionary") else values.dictionary_encode()
    words = [word or "" for word in coded.dictionary.cast("string").to_pylist()]
    digests = np.frombuffer(b"".join(_digest(column, word) for word in [*words, ""]), "<u8")
    seen.add(digests if coded.null_count else digests[:-1])
    codes = coded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return (digests % IDS).astype(np.int64)[codes]


def _digest(column: str, word: str) -> bytes:
    return hashlib.blake2b(f"{column}\0{word}".encode(), digest_size=8).digest()


class SparseSource(Source):
    """Samples with inputs as `Csr`, from a table of `Csr` or of ids in columns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        seen.clear()

    def _inputs(self, x: Any, dtype: np.dtype) -> Any:
        with np.errstate(over="ignore"):
            if not isinstance(x, Csr):
                ids = x.reshape(len(x), -1).astype(np.int64)
                starts = np.arange(len(x) + 1) * ids.shape[1]
                return Csr(starts, ids.reshape(-1), np.full(ids.size, self._scale, dtype), IDS)
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
