"""Columns of categories as features of sparse samples: ``train.csv::site,device,click``.

Each value of each column of inputs, read as text, is a feature of value 1. Its id is a hash of the
column's name and that text: nothing has to be counted or kept, and values that training has not
seen have ids too. Two values may share one: few do while there are far fewer than ids.

References: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
"""

import hashlib
from typing import Any

import numpy as np

from mpips.datasets.csr import Csr
from mpips.datasets.sparse import SparseSource

IDS = 1 << 20
NAME = "hashed columns"  # of an array of ids


def ids_of(column: str, values: Any) -> np.ndarray:
    """Return the ids of a column's values.

    Args:
        column: Its name.
        values: An Arrow array of text, or of anything that can be text; a missing one is empty.

    Returns:
        Shape (n,), int64, from 0 to ``IDS - 1``.
    """
    coded = values if hasattr(values, "dictionary") else values.dictionary_encode()
    words = coded.dictionary.cast("string").to_pylist()
    known = np.array([_id(column, word) for word in [*words, ""]], np.int64)
    places = coded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return known[places]


def _id(column: str, word: str | None) -> int:
    digest = hashlib.blake2b(f"{column}\0{word or ''}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % IDS


class HashedSource(SparseSource):
    """Samples of columns of ids, made `Csr` as they become a batch's."""

    def _inputs(self, x: Any, dtype: np.dtype) -> Any:
        if isinstance(x, Csr):
            return x
        ids = x.reshape(len(x), -1).astype(np.int64)
        starts = np.arange(len(x) + 1) * ids.shape[1]
        return Csr(starts, ids.reshape(-1), np.ones(ids.size, dtype), IDS)
