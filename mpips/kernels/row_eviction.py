"""Eviction of old rows from a lazy table during reads.

The server evicts rows while workers read. A reader accepts the data of a line if the line has the
row's key, and the stripe word is the same before and after. So the server first changes the key of
a freed line, and then its version. It copies a moved line completely before it sets the key of the
new line, and frees the old line after the index refers to the new one. In between, readers find a
row at its old or new line, or not at all if it was evicted. These reads check keys, which costs
time; tables without eviction use `mpips.kernels.row_reads.gather`.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels import row_reads, rows
from mpips.kernels.compiled import Matrix, Vector, kernel
from mpips.kernels.row_keys import make_row

if TYPE_CHECKING:  # the compiler of loops defines these names
    from mpips.kernels.intrinsics import array_at, load_acquire, prefetch, store_ordered


@kernel()
def evict(
    limit: int, header: Vector, keys: Vector, seen: Vector, lines: Matrix, stripes: Vector
) -> None:
    """Free old lines, and move the last lines into the gaps.

    The eviction is complete when a new index is in use and `free_lines` has been called.

    Args:
        limit: Lines that were last seen before it are freed.
        header: See `mpips.kernels.rows.take_lines`. Its count becomes that of the remaining lines.
        keys: See `mpips.kernels.rows.take_lines`.
        seen: Time at which each line was last seen, dtype uint32.
        lines: Lines of the table.
        stripes: Stripe words of the table.
    """
    store_ordered(header, rows.MOVES, header[rows.MOVES] + 1)
    count, left = header[rows.COUNT], header[rows.COUNT]
    for slot in range(count):
        if np.int64(seen[slot]) < limit:
            free_line(slot, keys, lines, stripes)
            left -= 1
    last = count - 1
    for slot in range(left):
        if np.int64(keys[slot]) == rows.FREE:
            while np.int64(keys[last]) == rows.FREE:
                last -= 1
            copy_to(slot, last, lines, stripes)
            seen[slot] = seen[last]
            keys[slot] = keys[last]
            last -= 1
    store_ordered(header, rows.COUNT, left)


@kernel()
def free_lines(count: int, header: Vector, keys: Vector, lines: Matrix, stripes: Vector) -> None:
    """Free the lines from the remaining ones up to `count`; other arguments as in `evict`."""
    for slot in range(header[rows.COUNT], count):
        free_line(slot, keys, lines, stripes)
    store_ordered(header, rows.MOVES, header[rows.MOVES] + 1)


@kernel(quick=True)
def free_line(slot: int, keys: Vector, lines: Matrix, stripes: Vector) -> None:
    """Reset a line to its state before any row had it."""
    keys[slot] = rows.FREE
    word = rows.begin_write(slot, stripes)
    for j in range(lines.shape[1]):
        lines[slot, j] = 0
    rows.close_line(slot, stripes, word & ~(1 << (slot & rows.BIT_MASK)))


@kernel(quick=True)
def copy_to(slot: int, source: int, lines: Matrix, stripes: Vector) -> None:
    """Copy line `source` to the free line `slot`, if it has been touched."""
    if not stripes[source >> rows.STRIPE_BITS] >> (source & rows.BIT_MASK) & 1:
        return
    word = rows.begin_write(slot, stripes)
    rows.copy_line(lines[source], lines[slot])
    rows.close_line(slot, stripes, word | 1 << (slot & rows.BIT_MASK))


@kernel()
def gather(
    places: Vector,
    begins: Vector,
    where: Matrix,
    key: Vector,
    width: int,
    numbers: Vector,
    out: Matrix,
) -> int:
    """Read rows during evictions; arguments as in `mpips.kernels.row_reads.gather`."""
    again, n, size = 0, places.size, width * out.itemsize
    for i in range(n + rows.AHEAD):
        if i < n:
            owner = rows.owner_of(places[i], begins)
            if where[owner, rows.LINES]:
                slot = find(places[i] - begins[owner], where[owner], begins, numbers)
                if slot >= 0:
                    prefetch(where[owner, rows.LINES] + slot * size, out.shape[1] * out.itemsize)
                    prefetch(where[owner, rows.STRIPES] + 8 * (slot >> rows.STRIPE_BITS), 1)
        if i >= rows.AHEAD:
            place = places[i - rows.AHEAD]
            owner = rows.owner_of(place, begins)
            if where[owner, rows.LINES]:
                local = place - begins[owner]
                again += read_row(
                    place, local, where[owner], size, numbers, key, out[i - rows.AHEAD]
                )
    return again


@kernel(quick=True)
def read_row(
    place: int, local: int, where: Vector, size: int, numbers: Vector, key: Vector, out: Vector
) -> int:
    """Read one row; return the number of further attempts, plus `TORN` if it may be torn."""
    own, touched, line = False, np.int64(0), out
    for attempt in range(row_reads.READS):
        slot = find(local, where, where, numbers)
        if slot < 0:
            make_row(place, key, out)
            return attempt
        line = array_at(where[rows.LINES] + slot * size, out, out.size)
        word = array_at(where[rows.STRIPES] + 8 * (slot >> rows.STRIPE_BITS), where, 1)
        before = load_acquire(word, 0)
        own = np.int64(array_at(where[rows.KEYS] + 4 * slot, numbers, 1)[0]) == local
        touched = before >> (slot & rows.BIT_MASK) & 1
        if own and not touched:
            make_row(place, key, out)
        elif own:
            rows.copy_line(line, out)
        if own and not (touched and before & rows.WRITING) and load_acquire(word, 0) == before:
            return attempt
    if not (own and touched):
        make_row(place, key, out)
    return row_reads.TORN + row_reads.READS


@kernel(quick=True)
def find(local: int, where: Vector, words: Vector, numbers: Vector) -> np.int64:
    """Return the line of a row, or -1; repeat the search if an eviction began or ended."""
    header = array_at(where[rows.HEADER], words, rows.HEADER_WORDS)
    while True:
        moves = load_acquire(header, rows.MOVES)
        slot = rows.find_line(local, where, words, numbers)
        if slot >= 0 or load_acquire(header, rows.MOVES) == moves:
            return slot
