"""Eviction of old rows from a lazy table during reads.

A reader believes what stands in a line where the line's key is its row's between two looks at the
word of its stripe. So lines that are freed get another key first, and then another version; a line
that is moved is whole before its key stands at the new place, and the old place is freed when the
index knows the new one. Between these steps readers find a row at either place, or, if it was
taken out, at none. They look twice for each: `mpips.kernels.row_reads.gather` is for lines that
stay.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels import row_reads, rows
from mpips.kernels.compiled import Matrix, Vector, kernel
from mpips.kernels.row_keys import make_row

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.intrinsics import array_at, load_acquire, prefetch, store_ordered


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
    """Free the lines behind those that are left, of so many; other arguments as for `evict`."""
    for slot in range(header[rows.COUNT], count):
        free_line(slot, keys, lines, stripes)
    store_ordered(header, rows.MOVES, header[rows.MOVES] + 1)


@kernel(quick=True)
def free_line(slot: int, keys: Vector, lines: Matrix, stripes: Vector) -> None:
    """Make a line what one is that no row has had."""
    keys[slot] = rows.FREE
    word = rows.begin_write(slot, stripes)
    for j in range(lines.shape[1]):
        lines[slot, j] = 0
    rows.close_line(slot, stripes, word & ~(1 << (slot & rows.BIT_MASK)))


@kernel(quick=True)
def copy_to(slot: int, source: int, lines: Matrix, stripes: Vector) -> None:
    """Copy a line to a free one, if it has been touched."""
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
    """Read rows of which some may be evicted meanwhile; see `mpips.kernels.row_reads.gather`."""
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
    """Read a row, whose line is its own if it is so between two looks at its stripe's word."""
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
    """Return the line of a row, or -1; looks again if lines were taken from rows meanwhile."""
    header = array_at(where[rows.HEADER], words, rows.HEADER_WORDS)
    while True:
        moves = load_acquire(header, rows.MOVES)
        slot = rows.find_line(local, where, words, numbers)
        if slot >= 0 or load_acquire(header, rows.MOVES) == moves:
            return slot
