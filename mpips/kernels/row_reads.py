"""Reads of a table's rows during writes; see `mpips.kernels.rows` for its memory.

Rows are read block by block, in two loops. The first loop finds the lines of a block; the second
loop copies the lines of the block before. For each line that it copies, it prefetches one of the
next block. It has few instructions for each row, so the processor waits for many rows at a time.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels import rows
from mpips.kernels.compiled import Matrix, Vector, kernel
from mpips.kernels.row_keys import make_row

if TYPE_CHECKING:  # the compiler of loops defines these names
    from mpips.kernels.intrinsics import array_at, copy_numbers, load_acquire, prefetch, scratch

READS = 100  # attempts to read a row; a row that is torn in the last one is used nevertheless
TORN = 1 << 32  # added to the result of `gather` for such a row
BLOCK = 64  # rows of a block
NUMBERS = 3 * BLOCK  # numbers that `locate` writes for a block


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
        places: Place of each row, shape (n,), dtype int64.
        begins: First place of each server, and the number of places, shape (servers + 1,), dtype
            int64.
        where: Addresses of each server's memory, shape (servers, 5), dtype int64: `rows.LINES` to
            `rows.KEYS`. Rows of a server are skipped if its address of lines is 0. The memory
            stays alive during the call.
        key: The table's key; see `mpips.kernels.row_keys`.
        width: Number of elements of a line.
        numbers: Any vector of dtype uint32; it gives the dtype of index and keys.
        out: Gets the rows, shape (n, dim), dtype of the lines.

    Returns:
        Number of reads that found a line being written, plus `TORN` for each row that was torn in
        the last attempt.
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
        places: Places of the block's rows, and of all rows after them.
        begins: As in `gather`. Its first element is 0.
        where: As in `gather`.
        size: Bytes of a line.
        numbers: As in `gather`.
        found: Gets three numbers for each row. The first is the address of its line, or 0 if its
            server is skipped. The second is the address of its stripe word, or of a word that is 0
            if the row has no line. The third is the line's number, or -1.
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
    """Copy the rows that are touched and not being written.

    The loop contains no call, because a call would keep reads of several rows from overlapping.

    Args:
        found: Result of `locate` for this block.
        following: Result of `locate` for the next block, whose lines are prefetched. If that block
            has fewer rows, some prefetches get invalid addresses, which the processor ignores.
        out: Gets the rows, shape (n, dim).
        left: Gets the indices of the rows that were not copied.

    Returns:
        Number of rows that were not copied.
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
    """Read one row, in several attempts if its line is being written.

    Returns:
        Number of attempts after the first one, plus `TORN` if the last one was torn.
    """
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
