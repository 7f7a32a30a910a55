"""Reads of a table's rows during writes; see `mpips.kernels.rows` for its memory.

Rows are read in two loops, a block at a time: the first finds their lines, and the second copies
them. It has few instructions a row, so that the processor waits for several rows at once.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels import rows
from mpips.kernels.compiled import Matrix, Vector, kernel
from mpips.kernels.row_groups import MOST_LINES, NEAR
from mpips.kernels.row_keys import make_row

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.intrinsics import array_at, load_acquire, prefetch, scratch

READS = 100  # of a torn row, after which it is taken as it is
TORN = 1 << 32  # what `gather` adds for such a row
BLOCK = 256  # rows


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
    """Read rows of several servers.

    Args:
        places: The place of each row, shape (n,), dtype int64.
        begins: The first place of each server, and the end, shape (servers + 1,), dtype int64.
        where: Addresses of each server's memory, shape (servers, 5), dtype int64: see `rows.LINES`
            to `KEYS`. Rows of servers without an address of lines are left out. The memory stays
            alive during the call.
        key: See `mpips.kernels.row_keys`.
        width: Numbers of a line.
        numbers: Any vector of dtype uint32.
        out: Where the rows go, shape (n, dim), dtype of the lines.

    Returns:
        How many reads found a line that was written meanwhile, and `TORN` times the rows that were
        taken so at last.
    """
    again, dim, size = 0, out.shape[1], width * out.itemsize
    lines, words = scratch(256).view(np.int64), scratch(256).view(np.int64)  # of `BLOCK` rows
    slots, left = scratch(256).view(np.int64), scratch(256).view(np.int64)
    for begin in range(0, places.size, BLOCK):
        some, target = places[begin : begin + BLOCK], out[begin : begin + BLOCK]
        locate(some, begins, where, size, numbers, lines, words, slots)
        for k in range(copy_whole(lines, words, slots, target, left)):
            i = left[k]
            if lines[i]:
                line, word = array_at(lines[i], out, dim), array_at(words[i], begins, 1)
                again += load_acquire(word, 0) >> (slots[i] & rows.BIT_MASK) & 1
                again += read_row(slots[i], some[i], line, word, key, target[i])
    return again


@kernel(quick=True)
def locate(
    places: Vector,
    begins: Vector,
    where: Matrix,
    size: int,
    numbers: Vector,
    lines: Vector,
    words: Vector,
    slots: Vector,
) -> None:
    """Find the lines of rows.

    Args:
        places: See `gather`, as `begins`, `where` and `numbers`.
        begins: Its first number is 0.
        where: The same.
        size: Bytes of a line.
        numbers: The same.
        lines: Where the address of each line goes, 0 of servers without one.
        words: Where the address of its stripe's word goes, or of a 0 if the row has no line.
        slots: Where its number goes, -1 if the row has none.
    """
    for i in range(places.size):
        owner = rows.owner_of(places[i], begins)
        slot = places[i] - begins[owner]
        lines[i], words[i] = where[owner, rows.LINES], begins.ctypes.data
        if lines[i]:
            if where[owner, rows.HEADER]:
                if i + rows.AHEAD < places.size:
                    rows.fetch_entry(places[i + rows.AHEAD], begins, where, numbers)
                slot = rows.find_line(slot, where[owner], begins, numbers)
            if slot >= 0:
                lines[i] += slot * size
                words[i] = where[owner, rows.STRIPES] + 8 * (slot >> rows.STRIPE_BITS)
        slots[i] = slot


@kernel(quick=True)
def copy_whole(lines: Vector, words: Vector, slots: Vector, out: Matrix, left: Vector) -> int:
    """Copy rows that were touched, and are not written meanwhile.

    No call is in its loop: it would keep reads of several rows from overlapping.

    Args:
        lines: See `locate`, as `words` and `slots`.
        words: The same.
        slots: The same.
        out: Where the rows go, shape (n, dim).
        left: Where the indices of other rows go.

    Returns:
        How many others there are.
    """
    count, n, dim = 0, out.shape[0], out.shape[1]
    fetched = min(dim * out.itemsize, MOST_LINES * 64)
    for i in range(n + NEAR):
        if i < n:
            prefetch(array_at(words[i], lines, 1), 0, 0)
            line = array_at(lines[i], lines, 1)
            for skip in range(0, fetched, 64):
                prefetch(line, 0, skip)
            prefetch(line, 0, fetched - 1)  # on a further line of the cache if it is not aligned
        if i >= NEAR:
            k = i - NEAR
            word = array_at(words[k], lines, 1)
            before = load_acquire(word, 0)
            if before >> (slots[k] & rows.BIT_MASK) & 1 and not before & rows.WRITING:
                source, row = array_at(lines[k], out, dim), out[k]
                for j in range(dim):
                    row[j] = source[j]
                if load_acquire(word, 0) == before:
                    continue
            left[count] = k
            count += 1
    return count


@kernel(quick=True)
def read_row(
    slot: np.int64, place: int, line: Vector, word: Vector, key: Vector, out: Vector
) -> int:
    """Read a row whose line has this word of its stripe, once more or for the first time."""
    bit = 1 << (slot & rows.BIT_MASK)
    for attempt in range(READS - 1):
        before = load_acquire(word, 0) if slot >= 0 else 0
        if not before & bit:
            make_row(place, key, out)
            return attempt
        if not before & rows.WRITING:
            rows.copy_line(line, out)
            if load_acquire(word, 0) == before:
                return attempt
    rows.copy_line(line, out)
    return TORN + READS - 1
