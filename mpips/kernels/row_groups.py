"""Row ids of a step: grouping by row, and sums of gradients.

A read returns one row for each id, duplicates included. Gradients of duplicates are added up, so
their ids are grouped by a radix sort of the places. No pass of the sort has a branch that depends
on the ids, and indices are unsigned, so numba adds no test for negative ones. Sorted places, unlike
those of a hash table, can be sent to other nodes as differences, and gradients are added in the
order of the ids. (A sort by the highest bits first, then of neighbours, takes a third less time for
a list that the processor has just seen, and a third more for a new one.)

A list of rows that is sent to another node contains the gaps between increasing places. A gap is
written in groups of seven bits, the lowest first, one group in a byte. The byte's highest bit tells
whether another group follows (LEB128, as in DWARF). Rows close to each other take one byte each.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Matrix, Vector, kernel

if TYPE_CHECKING:  # the compiler of loops defines these names
    from mpips.kernels.intrinsics import prefetch, sum_numbers

GROUP, MORE = 7, 1 << 7  # bits of a group, and the bit that is set if another group follows
NEAR = 32  # rows between a prefetch and the use of its data

_U = np.uint64


@kernel()
def sort_places(places: Vector, words: Vector, spare: Vector, counts: Matrix) -> None:
    """Sort places; equal places stay in their order.

    Args:
        places: Shape (n,), dtype int64.
        words: Gets the result, shape (n,), dtype uint64. The low bits, as many as ``n - 1`` needs,
            contain the index in `places`, and the other bits contain the place.
        spare: Scratch memory, shape and dtype of `words`.
        counts: Scratch memory, shape (passes, 2**digit), dtype int64. Each pass sorts by `digit`
            bits of the places.
    """
    n, passes, radix = places.size, counts.shape[0], counts.shape[1]
    shift, digit = bits_of(n - 1), bits_of(radix - 1)
    mask = _U(radix - 1)
    counts[:] = 0
    for i in range(n):
        place = _U(places[i])
        for p in range(passes):
            counts[p, (place >> _U(p * digit)) & mask] += 1
    source, target = (words, spare) if passes % 2 == 0 else (spare, words)
    for p in range(passes):
        total, row = 0, counts[p]
        for k in range(radix):
            total, row[k] = total + row[k], total
        low = _U(p * digit)
        for i in range(n):
            word = source[i] if p else (_U(places[i]) << _U(shift)) | _U(i)
            bucket = (word >> (low + _U(shift))) & mask
            target[_U(row[bucket])] = word
            row[bucket] += 1
        source, target = target, source


@kernel(quick=True)
def bits_of(number: int) -> int:
    """Return the number of bits of a number; 0 for numbers below 1."""
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@kernel()
def group(
    words: Vector, begins: Vector, local: Vector, bounds: Vector, order: Vector, starts: Vector
) -> np.int64:
    """List every row once, server by server, with the indices of its ids.

    Args:
        words: Result of `sort_places`, shape (n,).
        begins: First place of each server, and the number of places, shape (servers + 1,), dtype
            int64.
        local: Gets the local place of each row: its place minus the first place of its server;
            shape (n,), dtype int64.
        bounds: Gets the index in `local` of each server's first row, and the number of rows; shape
            and dtype of `begins`.
        order: Gets the indices of the ids, row by row, shape (n,), dtype int64.
        starts: Gets the index in `order` of each row's first id, and n; shape (n + 1,), dtype
            int64.

    Returns:
        Number of rows. So many elements of `local`, and one more of `starts`, are written.
    """
    n, servers = words.size, begins.size - 1
    shift = _U(bits_of(n - 1))
    mask = (_U(1) << shift) - _U(1)
    count, owner, last = _U(0), 0, np.int64(-1)
    begin, end = begins[0], begins[1]
    bounds[0] = starts[0] = 0
    for i in range(n):
        place = np.int64(words[i] >> shift)
        order[i] = np.int64(words[i] & mask)
        while place >= end:
            owner += 1
            bounds[owner] = np.int64(count)
            begin, end = end, begins[owner + 1]
        count += _U(place != last)
        local[count - _U(1)] = place - begin
        starts[count] = i + 1
        last = place
    for k in range(owner, servers):
        bounds[k + 1] = np.int64(count)
    return np.int64(count)


@kernel()
def add_up(grads: Matrix, order: Vector, starts: Vector, out: Matrix) -> None:
    """Sum the gradients of each row, in the order of the ids.

    Args:
        grads: Gradient of each id, shape (n, dim).
        order: See `group`.
        starts: See `group`, shape (rows + 1,).
        out: Gets the sums, shape (rows, dim), dtype of `grads`.
    """
    first, nbytes = np.int64(grads.ctypes.data), grads.shape[1] * grads.itemsize
    count = starts.size - 1
    for u in range(count):
        if u + NEAR < count:
            prefetch(first + order[starts[u + NEAR]] * nbytes, nbytes)
        sum_numbers(out[u], grads, order, starts[u], starts[u + 1])


@kernel(quick=True)
def first_wrong(local: Vector, count: int) -> int:
    """Return the index of the first place that is wrong, or -1.

    A place must be in ``[0, count)``, and greater than the place before it.
    """
    last, n, rises = np.int64(-1), local.size, True
    for i in range(1, n):  # without a branch, so LLVM can vectorise it
        rises &= local[i] > local[i - 1]
    if n == 0 or (rises and local[0] >= 0 and local[n - 1] < count):
        return -1
    for i in range(n):
        if local[i] <= last or local[i] >= count:
            return i
        last = local[i]
    return -1


# Lists -----------------------------------------------------------------------------------------


def most_bytes(rows: int) -> int:
    """Return the most bytes that a gap between places takes, in a table of so many rows."""
    return max(1, -(-(rows - 1).bit_length() // GROUP))


@kernel()
def write_places(places: Vector, out: Vector) -> int:
    """Write a list of places.

    Args:
        places: Increasing places, none negative, shape (n,), dtype int64.
        out: Gets the list; at least ``n * most_bytes(rows)`` elements of dtype uint8.

    Returns:
        Number of bytes written.
    """
    used, following = 0, np.int64(0)
    for i in range(places.size):
        gap = places[i] - following
        following = places[i] + 1
        while gap >= MORE:
            out[used] = np.uint8(gap & (MORE - 1) | MORE)
            gap >>= GROUP
            used += 1
        out[used] = np.uint8(gap)
        used += 1
    return used


@kernel()
def read_places(data: Vector, cursor: Vector, places: Vector) -> int:
    """Read the next places of a list.

    Args:
        data: List from `write_places`, dtype uint8.
        cursor: Position in the list, shape (2,), dtype int64; updated. It contains the next byte,
            and the place to which the next gap is added. Begin with zeros.
        places: Gets the places, shape (n,), dtype int64.

    Returns:
        Number of places read; fewer than n if the list ends before.
    """
    at, following = cursor[0], cursor[1]
    for i in range(places.size):
        gap, shift, byte = np.int64(0), np.int64(0), np.int64(MORE)
        while byte >= MORE:
            if at >= data.size:
                return i
            byte = np.int64(data[at])
            gap |= (byte & (MORE - 1)) << shift
            shift += GROUP
            at += 1
        places[i] = following + gap
        following = places[i] + 1
    cursor[0], cursor[1] = at, following
    return places.size


@kernel()
def spread(given: Matrix, order: Vector, starts: Vector, out: Matrix) -> None:
    """Copy each row to the positions of all its ids; see `mpips.layout.tables.Grouped`.

    Args:
        given: The rows, each once, shape (n, dim).
        order: Indices of the ids, row by row, dtype int64.
        starts: Index in `order` of each row's first id, and the number of ids; shape (n + 1,),
            dtype int64.
        out: Gets one row for each id, dtype of `given`.
    """
    for u in range(starts.size - 1):
        row = given[u]
        for i in range(starts[u], starts[u + 1]):
            target = out[order[i]]
            for j in range(row.size):
                target[j] = row[j]
