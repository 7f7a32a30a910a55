"""Header words: an owner publishes, others observe; the only memory that ranks share unlocked."""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.compiler import array_at, load_acquire, store_release


@kernel(quick=True)
def publish(words: Vector, index: int, value: int) -> None:
    """Write one header word, after everything that this thread has written before.

    A fence follows, so that nothing that comes after is done before the word can be seen.

    Args:
        words: Header, dtype int64, 8-byte aligned; only its owner may publish.
        index: Which word, in ``[0, words.size)``.
        value: Its new value.

    Raises:
        IndexError: If the index is outside the header.
    """
    if index < 0 or index >= words.size:
        raise IndexError("header word outside the header")
    store_release(words, index, value)


@kernel(quick=True)
def observe(words: Vector, index: int) -> int:
    """Read one header word, after all earlier reads and before all later ones.

    What its owner wrote before publishing the value read is visible from then on.

    Args:
        words: Header, dtype int64, 8-byte aligned.
        index: Which word, in ``[0, words.size)``.

    Raises:
        IndexError: If the index is outside the header.
    """
    if index < 0 or index >= words.size:
        raise IndexError("header word outside the header")
    return load_acquire(words, index)


@kernel(quick=True)
def find_ahead(words: Vector, own: Vector, done: Vector, limit: Vector, first: int) -> int:
    """Find a header word that is ahead of what was done about it; all are looked at in turn.

    Args:
        words: Addresses of header words, shape (n,), dtype int64. The words are int64, 8-byte
            aligned, and stay alive during the call.
        own: Place of each in `done` and `limit`, shape (n,), dtype int64.
        done: Header words of what was done last, dtype int64; the next is one more.
        limit: The most that may be done now, shape and dtype of `done`.
        first: Which word to look at first, in ``[0, n)``.

    Returns:
        The index of the first one found, or -1. What its owner wrote before is then visible.
    """
    for i in range(words.size):
        k = (first + i) % words.size
        seq = observe(done, own[k]) + 1
        word = array_at(words[k], words, 1)
        if seq <= limit[own[k]] and observe(word, 0) >= seq:
            return k
    return -1


def no_limit(n: int) -> np.ndarray:
    """Return bounds for `find_ahead` that nothing reaches, shape (n,), dtype int64."""
    return np.full(n, np.iinfo(np.int64).max)
