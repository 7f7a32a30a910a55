"""Reads of a table's rows during writes; see `mpips.kernels.rows` for its memory.

Rows are read in two loops, a block at a time: the first finds the lines of a block, and the second
copies those of the block before. With each row that it copies it has one of the other block on its
way, and it has few instructions a row: so the processor waits for many rows at once.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels import rows
from mpips.kernels.compiled import Matrix, Vector, kernel
from mpips.kernels.row_keys import make_row

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.intrinsics import array_at, copy_numbers, load_acquire, prefetch, scratch

READS = 100  # of a torn row, after which it is taken as it is
TORN = 1 << 32  # what `gather` adds for such a row
BLOCK = 64  # rows
NUMBERS = 3 * BLOCK  # of a block: see `locate`


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
    again, n, dim, size = 0, places.size, out.shape[1], width * out.itemsize
    found, following = scratch(NUMBERS).view(np.int64), scratch(NUMBERS).view(np.int64)
    left = scratch(BLOCK).view(np.int64)
    locate(places, begins, where, size, numbers, following)
    for i in range(min(n, BLOCK)):
        prefetch(following[3 * i], dim * out.itemsize)
    for begin in range(0, n, BLOCK):
        end, found, following = begin + BLOCK, following, found
        locate(places[end:], begins, where, size, numbers, following)
        for k in range(copy_whole(found, following, out[begin:end], left)):
            i = left[k]
            address, word, slot = found[3 * i], found[3 * i + 1], found[3 * i + 2]
            if address:
                line, stripe = array_at(address, out, dim), array_at(word, begins, 1)
                again += load_acquire(stripe, 0) >> (slot & rows.BIT_MASK) & 1
                again += read_row(slot, places[begin + i], line, stripe, key, out[begin + i])
    return again


@kernel(quick=True)
def locate(
    places: Vector, begins: Vector, where: Matrix, size: int, numbers: Vector, found: Vector
) -> None:
    """Find the lines of a block of rows.

    Args:
        places: Those of the block and of all rows behind it; see `gather`, as `begins`, `where` and
            `numbers`.
        begins: Its first number is 0.
        where: The same.
        size: Bytes of a line.
        numbers: The same.
        found: Where three numbers of each row go: the address of its line, 0 of servers without
            one; that of its stripe's word, or of a 0 if the row has no line; and the line's number,
            -1 if the row has none.
    """
    zero = np.int64(begins.ctypes.data)
    for i in range(min(BLOCK, places.size)):
        owner = rows.owner_of(places[i], begins)
        memory, slot = where[owner], places[i] - begins[owner]
        line, word = memory[rows.LINES], zero
        if line:
            if memory[rows.HEADER]:
                if i + rows.AHEAD < places.size:
                    rows.fetch_entry(places[i + rows.AHEAD], begins, where, numbers)
                slot = rows.find_line(slot, memory, begins, numbers)
            if slot >= 0:
                line += slot * size
                word = memory[rows.STRIPES] + 8 * (slot >> rows.STRIPE_BITS)
        found[3 * i], found[3 * i + 1], found[3 * i + 2] = line, word, slot


@kernel(quick=True)
def copy_whole(found: Vector, following: Vector, out: Matrix, left: Vector) -> int:
    """Copy rows that were touched, and are not written meanwhile.

    No call is in its loop: it would keep reads of several rows from overlapping.

    Args:
        found: See `locate`.
        following: The same of the next block: its lines are on their way then. Where that is
            shorter, what stands behind it is no address, which a processor ignores.
        out: Where the rows go, shape (n, dim).
        left: Where the indices of other rows go.

    Returns:
        How many others there are.
    """
    count, n, dim = 0, out.shape[0], out.shape[1]
    nbytes, target = dim * out.itemsize, np.int64(out.ctypes.data)
    for k in range(n):
        prefetch(following[3 * k + 1], 1)
        prefetch(following[3 * k], nbytes)
        word, slot = array_at(found[3 * k + 1], found, 1), found[3 * k + 2]
        before = load_acquire(word, 0)
        if before >> (slot & rows.BIT_MASK) & 1 and not before & rows.WRITING:
            copy_numbers(array_at(target + k * nbytes, out, dim), array_at(found[3 * k], out, dim))
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
