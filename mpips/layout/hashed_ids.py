"""Rows of ids that are no numbers of rows: words, and integers of 64 bits, by a fixed hash.

An id's row is 64 bits modulo the rows of its table: of an integer the finaliser of SplitMix64,
which gives two integers never the same bits, of a word BLAKE2b of its UTF-8. Nothing is counted or
kept, and no seed is in it: an id has the same row in every run.

References: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009;
Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

import hashlib

import numpy as np

from mpips.errors import UserError

_U = np.uint64
_MIX_1, _MIX_2 = _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


def digests_of(name: str, ids: np.ndarray) -> np.ndarray:
    """Return 64 bits of each id.

    Args:
        name: Of the table.
        ids: Integers, of which a negative one is as uint64 holds it, or words (str), any shape.

    Returns:
        Shape of `ids`, uint64.

    Raises:
        UserError: If they are neither.
    """
    if ids.dtype.kind in "iu":
        return _mixed(ids.astype(np.uint64))
    words = ids.reshape(-1).tolist()
    if ids.dtype.kind not in "UTO" or not all(isinstance(word, str) for word in words):
        expected = "integers, or str; integers fit into int64, or into uint64"
        raise UserError(f"ids of table {name!r} of dtype {ids.dtype}", expected)
    digests = b"".join(map(_digest, words))
    return np.frombuffer(digests, "<u8").astype(np.uint64).reshape(ids.shape)


def rows_of(digests: np.ndarray, rows: int) -> np.ndarray:
    """Return the rows of ids by their digests, the same shape, int64."""
    return (digests % _U(rows)).astype(np.int64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Return what `mpips.kernels.row_keys.mixed` does of each word."""
    words = (words ^ (words >> _U(30))) * _MIX_1
    words = (words ^ (words >> _U(27))) * _MIX_2
    return words ^ (words >> _U(31))


def _digest(word: str) -> bytes:
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
