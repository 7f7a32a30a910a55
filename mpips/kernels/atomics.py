"""Header words with atomic publication, and the barrier of a node.

They are the only memory that ranks share unlocked.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.intrinsics import array_at, load_acquire, sched_yield, store_release

# While a rank waits: offers of the core that it makes, each of under a microsecond where nobody
# takes it, and the looks between two of them.
_OFFERS = 40
_LOOKS = 50


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


@kernel()
def meet(words: Vector, turn: int, looks: int) -> bool:
    """Publish `turn` in one's own header word, and look whether the others' have reached it too.

    Args:
        words: Addresses of header words, one's own first, shape (n,), dtype int64. The words are
            int64, 8-byte aligned, and stay alive during the call.
        turn: Number of the barrier, larger than that of the one before.
        looks: How many looks may be in vain before the core is offered to whoever else wants it;
            then it is offered again and again, for a bounded time. 0 for a single look.

    Returns:
        Whether all have come. What they wrote before is then visible; if not, call again.
    """
    publish(array_at(words[0], words, 1), 0, turn)
    k, offers = 1, _OFFERS if looks else 0
    for offer in range(offers + 1):
        vain = 0
        while k < words.size and vain <= looks:
            if observe(array_at(words[k], words, 1), 0) >= turn:
                k += 1
            else:
                vain += 1
        if k == words.size:
            return True
        if offer < offers:
            sched_yield()
        looks = min(looks, _LOOKS)
    return False


@kernel()
def meet_and_add(words: Vector, turn: int, looks: int, rows: Vector, out: Vector) -> bool:
    """Call `meet`, and where all have come, add up a row of each.

    Args:
        words: Addresses of header words, one's own first; see `meet`.
        turn: Number of the barrier.
        looks: How many looks may be in vain; see `meet`.
        rows: Address in bytes of each row, shape (n,), dtype int64. The rows have out's dtype and
            length, are aligned to it, and stay alive during the call.
        out: Where the sum goes, in the order of `rows`; must not overlap any of them.

    Returns:
        Whether all have come; if not, nothing is added up.
    """
    if not meet(words, turn, looks):
        return False
    out[:] = 0
    for k in range(rows.size):
        row = array_at(rows[k], out, out.size)
        for i in range(out.size):
            out[i] += row[i]
    return True
