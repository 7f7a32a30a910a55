"""Atomic header words in shared memory, and the barrier of a node.

Header words are the only memory that ranks write and read at the same time without a lock.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # the compiler of loops defines these names
    from mpips.kernels.intrinsics import array_at, load_acquire, sched_yield, store_release

# A rank that waits yields its core so many times, each in under a microsecond if no other thread
# wants it, and polls so many times between two yields.
_YIELDS = 40
_POLLS = 50


@kernel(quick=True)
def publish(words: Vector, index: int, value: int) -> None:
    """Write one header word atomically, after all earlier writes of this thread (a release store).

    A fence follows: the word is visible before any later read or write of this thread happens.

    Args:
        words: Header, dtype int64, 8-byte aligned; only its owner may publish.
        index: Index of the word, in ``[0, words.size)``.
        value: New value of the word.

    Raises:
        IndexError: If the index is outside the header.
    """
    if index < 0 or index >= words.size:
        raise IndexError("header word outside the header")
    store_release(words, index, value)


@kernel(quick=True)
def observe(words: Vector, index: int) -> int:
    """Read one header word atomically, after all earlier reads and before all later ones.

    From then on, all that the owner wrote before it published this value is visible.

    Args:
        words: Header, dtype int64, 8-byte aligned.
        index: Index of the word, in ``[0, words.size)``.

    Raises:
        IndexError: If the index is outside the header.
    """
    if index < 0 or index >= words.size:
        raise IndexError("header word outside the header")
    return load_acquire(words, index)


@kernel(quick=True)
def find_ahead(words: Vector, index: Vector, done: Vector, limit: Vector, first: int) -> int:
    """Find a header word that announces a number which has not been handled yet.

    Word k is found if it is at least ``done[index[k]] + 1``, the next number to handle, and that
    number is at most ``limit[index[k]]``.

    Args:
        words: Addresses of header words, shape (n,), dtype int64. The words are int64, 8-byte
            aligned, and stay alive during the call.
        index: Index of each word in `done` and `limit`, shape (n,), dtype int64.
        done: Header words with the last number that was handled, dtype int64.
        limit: Largest numbers that may be handled now, shape and dtype of `done`.
        first: Index of the word to check first, in ``[0, n)``; the others follow cyclically.

    Returns:
        The index of the first word found, or -1. All that its owner wrote before it published the
        word is then visible.
    """
    for i in range(words.size):
        k = (first + i) % words.size
        seq = observe(done, index[k]) + 1
        word = array_at(words[k], words, 1)
        if seq <= limit[index[k]] and observe(word, 0) >= seq:
            return k
    return -1


def no_limit(n: int) -> np.ndarray:
    """Return limits for `find_ahead` that allow every number, shape (n,), dtype int64."""
    return np.full(n, np.iinfo(np.int64).max)


@kernel()
def meet(words: Vector, turn: int, polls: int) -> bool:
    """Arrive at barrier `turn`, and poll for a bounded time whether all ranks have arrived.

    Args:
        words: Addresses of the ranks' header words, this rank's first, shape (n,), dtype int64. The
            words are int64, 8-byte aligned, and stay alive during the call.
        turn: Number of the barrier, larger than that of the last one.
        polls: Number of failed polls after which this rank yields its core. It yields a bounded
            number of times, and polls in between. 0 to check each word once, without yielding.

    Returns:
        Whether all ranks have arrived. All that they wrote before is then visible. If False, call
        again.
    """
    publish(array_at(words[0], words, 1), 0, turn)
    k, yields = 1, _YIELDS if polls else 0
    for count in range(yields + 1):
        failed = 0
        while k < words.size and failed <= polls:
            if observe(array_at(words[k], words, 1), 0) >= turn:
                k += 1
            else:
                failed += 1
        if k == words.size:
            return True
        if count < yields:
            sched_yield()
        polls = min(polls, _POLLS)
    return False


@kernel()
def meet_and_add(words: Vector, turn: int, polls: int, rows: Vector, out: Vector) -> bool:
    """Arrive at a barrier as in `meet`, and once all ranks have arrived, add up vectors.

    Args:
        words: See `meet`.
        turn: See `meet`.
        polls: See `meet`.
        rows: Address in bytes of each vector, shape (n,), dtype int64. The vectors have out's dtype
            and length, are aligned to the dtype, and stay alive during the call.
        out: Gets the sum, added in the order of `rows`; must not overlap any of them.

    Returns:
        Whether all ranks have arrived; if not, `out` does not change.
    """
    if not meet(words, turn, polls):
        return False
    out[:] = 0
    for k in range(rows.size):
        row = array_at(rows[k], out, out.size)
        for i in range(out.size):
            out[i] += row[i]
    return True
