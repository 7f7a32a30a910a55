"""Lines of rows that are about to be changed, kept and put back."""

from typing import TYPE_CHECKING

from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.rows import (
    AHEAD,
    BIT_MASK,
    BITS,
    COUNT,
    LINE_BITS,
    STRIPE_BITS,
    WRITING,
    Matrix,
    copy_line,
    entry_of,
    fetch,
    home_of,
)

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.compiler import store_ordered


@kernel()
def keep(slot: Vector, lines: Matrix, stripes: Vector, kept: Matrix, touched: Vector) -> None:
    """Copy lines, and note which of them have been touched.

    Args:
        slot: Which, no two alike, shape (n,), dtype int64.
        lines: Of the table.
        stripes: Its stripe words.
        kept: Where the lines go, shape (n, width).
        touched: Where it is noted, shape (n,), dtype int64.
    """
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        copy_line(lines[slot[u]], kept[u])
        touched[u] = stripes[slot[u] >> STRIPE_BITS] >> (slot[u] & BIT_MASK) & 1


@kernel()
def put_back(slot: Vector, kept: Matrix, touched: Vector, lines: Matrix, stripes: Vector) -> None:
    """Undo what was done to lines since `keep`, whose arguments these are, even half a write."""
    for u in range(slot.size):
        stripe, bit = slot[u] >> STRIPE_BITS, 1 << (slot[u] & BIT_MASK)
        word = stripes[stripe] | WRITING
        store_ordered(stripes, stripe, word)
        copy_line(kept[u], lines[slot[u]])
        if not touched[u]:
            word &= ~bit
        store_ordered(stripes, stripe, word + WRITING)


@kernel()
def mend_index(header: Vector, index: Vector, keys: Vector) -> None:
    """See to it that the line given last is in the index; see `mpips.kernels.rows.take_lines`."""
    bits, count = header[BITS], header[COUNT]
    if count == 0:
        return
    size = 1 << bits
    entries, last = index[size : 2 * size], keys[count - 1]
    at, entry = home_of(last, bits), entry_of(last, count - 1, bits, header[LINE_BITS])
    while entries[at] != 0 and entries[at] != entry:
        at = (at + 1) & (size - 1)
    entries[at] = entry
