"""Columns of categories as features of sparse samples: ``train.csv::site,device,click``.

Each value of each column of inputs, read as text, is a feature of value 1. Its id is a hash of the
column's name and that text: nothing has to be counted or kept, and values that training has not
seen have ids too. Two values may share one: few do while there are far fewer than ids, and those
that do are counted.

References: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
"""

import hashlib
from typing import Any

import numpy as np

from mpips.datasets.csr import Csr, SparseSource

IDS = 1 << 20
NAME = "hashed columns"  # of an array of ids


class Seen:
    """Which ids this process has read, and which of them stand for more than one value.

    Args:
        ids: How many there are; of more than `IDS` it looks at some alone, every other or so.
    """

    def __init__(self, ids: int = IDS) -> None:
        self._ids, self._step = ids, -(-ids // IDS)
        self._prints = np.zeros(0, np.uint32)  # of the first value of each id; 0: none yet
        self._shared = np.zeros(0, bool)

    def add(self, digests: np.ndarray) -> None:
        """Note some values by their digests, shape (n,), uint64."""
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
        """Forget all."""
        self._prints, self._shared = self._prints[:0], self._shared[:0]

    @property
    def of(self) -> int:
        """How many ids it looks at."""
        return -(-self._ids // self._step)

    @property
    def bits(self) -> np.ndarray | None:
        """A bit an id, of those read and of those shared, shape (2, of / 8), uint8; None of none.

        Those of several processes are joined by ``|``.
        """
        if not self._prints.size:
            return None
        return np.packbits([self._prints != 0, self._shared], axis=1)


seen = Seen()  # of the data that was opened last


def ids_of(column: str, values: Any) -> np.ndarray:
    """Return the ids of a column's values.

    Args:
        column: Its name.
        values: An Arrow array of text, or of anything that can be text; a missing one is empty.

    Returns:
        Shape (n,), int64, from 0 to ``IDS - 1``.
    """
    coded = values if hasattr(values, "dictionary") else values.dictionary_encode()
    words = [word or "" for word in coded.dictionary.cast("string").to_pylist()]
    digests = np.frombuffer(b"".join(_digest(column, word) for word in [*words, ""]), "<u8")
    seen.add(digests if coded.null_count else digests[:-1])
    places = coded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return (digests % IDS).astype(np.int64)[places]


def _digest(column: str, word: str) -> bytes:
    return hashlib.blake2b(f"{column}\0{word}".encode(), digest_size=8).digest()


class HashedSource(SparseSource):
    """Samples of columns of ids, made `Csr` as they become a batch's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        seen.clear()

    def _inputs(self, x: Any, dtype: np.dtype) -> Any:
        if isinstance(x, Csr):
            return x
        ids = x.reshape(len(x), -1).astype(np.int64)
        starts = np.arange(len(x) + 1) * ids.shape[1]
        return Csr(starts, ids.reshape(-1), np.ones(ids.size, dtype), IDS)
