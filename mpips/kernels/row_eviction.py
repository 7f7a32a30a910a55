"""Lines of a lazy table are taken from rows that were not seen for long, while others read.

A reader believes what stands in a line where the line's key is its row's between two looks at the
word of its stripe. So lines that are freed get another key first, and then another version; a line
that is moved is whole before its key stands at the new place, and the old place is freed when the
index knows the new one. Between these steps readers find a row at either place, or, if it was
taken out, at none.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.rows import (
    BIT_MASK,
    COUNT,
    FREE,
    MOVES,
    STRIPE_BITS,
    WRITING,
    Matrix,
    copy_line,
)

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.compiler import store_ordered


@kernel()
def count_older(limit: int, count: int, seen: Vector) -> int:
    """Return how many of the first lines were seen before `limit`."""
    older = 0
    for slot in range(count):
        if np.int64(seen[slot]) < limit:
            older += 1
    return older


@kernel()
def evict(
    limit: int, header: Vector, keys: Vector, seen: Vector, lines: Matrix, stripes: Vector
) -> None:
    """Free lines, and copy those behind into their places, so that the first ones are rows'.

    It is over when another index is in use and `free_lines` has done the rest.

    Args:
        limit: Lines that were seen before it are freed.
        header: See `mpips.kernels.rows.take_lines`; then it counts the lines that are left.
        keys: The same.
        seen: When each line was, dtype uint32.
        lines: Of the table.
        stripes: Its stripe words.
    """
    store_ordered(header, MOVES, header[MOVES] + 1)
    count, left = header[COUNT], header[COUNT]
    for slot in range(count):
        if np.int64(seen[slot]) < limit:
            free_line(slot, keys, lines, stripes)
            left -= 1
    last = count - 1
    for slot in range(left):
        if np.int64(keys[slot]) == FREE:
            while np.int64(keys[last]) == FREE:
                last -= 1
            copy_to(slot, last, lines, stripes)
            seen[slot] = seen[last]
            keys[slot] = keys[last]
            last -= 1
    store_ordered(header, COUNT, left)


@kernel()
def free_lines(count: int, header: Vector, keys: Vector, lines: Matrix, stripes: Vector) -> None:
    """Free the lines behind those that are left, of so many; other arguments as for `evict`."""
    for slot in range(header[COUNT], count):
        free_line(slot, keys, lines, stripes)
    store_ordered(header, MOVES, header[MOVES] + 1)


@kernel(quick=True)
def free_line(slot: int, keys: Vector, lines: Matrix, stripes: Vector) -> None:
    """Make a line what one is that no row has had."""
    keys[slot] = FREE
    stripe, bit = slot >> STRIPE_BITS, 1 << (slot & BIT_MASK)
    word = stripes[stripe] | WRITING
    store_ordered(stripes, stripe, word)
    for j in range(lines.shape[1]):
        lines[slot, j] = 0
    store_ordered(stripes, stripe, (word & ~bit) + WRITING)


@kernel(quick=True)
def copy_to(slot: int, source: int, lines: Matrix, stripes: Vector) -> None:
    """Copy a line to a free one, if it has been touched."""
    if not stripes[source >> STRIPE_BITS] >> (source & BIT_MASK) & 1:
        return
    stripe, bit = slot >> STRIPE_BITS, 1 << (slot & BIT_MASK)
    word = stripes[stripe] | WRITING
    store_ordered(stripes, stripe, word)
    copy_line(lines[source], lines[slot])
    store_ordered(stripes, stripe, (word | bit) + WRITING)
