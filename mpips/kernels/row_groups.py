"""Row ids of a step: grouping by row, and sums of gradients.

Rows are read in the order of their ids, duplicates as often as they are there. For gradients
duplicates are found by sorting the rows by their place, in as many passes as the digits of places
need; no pass has a branch that depends on the ids, and what has been read to be an index is
unsigned, so that nothing looks whether it counts from the end. A hash table would leave the rows in
no order: so they go to other nodes as they are, each less the one before, and the order of
summation is that of the ids. To deal places out by their highest bits, and then put neighbours in
order, takes a third less where the processor has seen the same list before, and a third more where
it has not.

A list of rows that goes to another node has the gaps between increasing places. A gap is written in
groups of seven bits, the lowest first, each in a byte whose highest bit says that more follow
(LEB128, as in DWARF): rows that lie close together take a byte each.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Matrix, Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, it is among its names
    from mpips.kernels.intrinsics import prefetch, sum_numbers

GROUP, MORE = 7, 1 << 7  # bits of a byte, and the bit that says that another one follows
NEAR = 32  # rows that are fetched ahead

_U = np.uint64


@kernel()
def sort_places(places: Vector, words: Vector, spare: Vector, counts: Matrix) -> None:
    """Sort places, and equal ones by where they stand.

    Args:
        places: Shape (n,), dtype int64.
        words: Where the result goes, shape (n,), dtype uint64: the place, and in the lowest bits,
            of which ``n - 1`` needs as many, the index in `places`.
        spare: Shape and dtype of `words`.
        counts: Shape (passes, 2**digit), dtype int64: a pass sorts by a digit of that many bits.
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
    """Return how many bits a number needs; none for 0 and below."""
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@kernel()
def group(
    words: Vector, begins: Vector, local: Vector, bounds: Vector, order: Vector, starts: Vector
) -> np.int64:
    """List every row once, those of each server in turn, and where it stands.

    Args:
        words: What `sort_places` has made, shape (n,).
        begins: The first place of each server, and the end, shape (servers + 1,), dtype int64.
        local: Where the rows go, each less the first place of its server, shape (n,), dtype int64.
        bounds: Where each server's begin in `local`, and the end, shape and dtype of `begins`.
        order: Indices of the ids, row by row, shape (n,), dtype int64.
        starts: Where those of each row begin in `order`, and the end, shape (n + 1,), dtype int64.

    Returns:
        How many rows there are: that many of `local` and one more of `starts` are written.
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
        grads: A gradient an id, shape (n, dim).
        order: See `group`.
        starts: See `group`, shape (rows + 1,).
        out: Where the sums go, shape (rows, dim), of the dtype of `grads`.
    """
    first, nbytes = np.int64(grads.ctypes.data), grads.shape[1] * grads.itemsize
    count = starts.size - 1
    for u in range(count):
        if u + NEAR < count:
            prefetch(first + order[starts[u + NEAR]] * nbytes, nbytes)
        sum_numbers(out[u], grads, order, starts[u], starts[u + 1])


@kernel(quick=True)
def first_wrong(local: Vector, count: int) -> int:
    """Return the index of the first place that is not in ``[0, count)``, or not above that before.

    Or -1, if there is none.
    """
    last, n, rises = np.int64(-1), local.size, True
    for i in range(1, n):  # without a branch, so that several are compared at once
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
    """Return the most that a place among so many rows takes."""
    return max(1, -(-(rows - 1).bit_length() // GROUP))


@kernel()
def write_places(places: Vector, out: Vector) -> int:
    """Write places.

    Args:
        places: Shape (n,), dtype int64; not negative, increasing.
        out: Shape (n * most_bytes(rows),) at least, dtype uint8.

    Returns:
        How many bytes are in use.
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
    """Read the next places.

    Args:
        data: What `write_places` wrote, dtype uint8.
        cursor: Where to go on, shape (2,), dtype int64, which is brought up to date: the byte, and
            the place that a gap of 0 stands for. Zeros at first.
        places: Where they go, shape (n,), dtype int64.

    Returns:
        How many there were: fewer than n if the data ends before.
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
    """Copy each row to the places of all its ids; see `mpips.layout.tables.Grouped`.

    Args:
        given: A row each, shape (n, dim).
        order: Indices of ids, row by row, dtype int64.
        starts: Where those of each row begin in `order`, and the end, shape (n + 1,), dtype int64.
        out: A row an id, dtype of `given`.
    """
    for u in range(starts.size - 1):
        row = given[u]
        for i in range(starts[u], starts[u + 1]):
            target = out[order[i]]
            for j in range(row.size):
                target[j] = row[j]
