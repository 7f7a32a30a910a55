"""The barrier of a node: its ranks publish a turn, and wait until all have come to it."""

from typing import TYPE_CHECKING

from mpips.kernels.atomics import observe, publish
from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.compiler import array_at, sched_yield

# While a rank waits: offers of the core that it makes, each of under a microsecond where nobody
# takes it, and the looks between two of them.
_OFFERS = 40
_LOOKS = 50


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
    """`meet`, and where all have come, add up a row of each; one call instead of two.

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
