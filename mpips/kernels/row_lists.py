"""Lists of rows on their way between nodes: increasing places as the gaps between them.

A gap is written in groups of seven bits, the lowest first, each in a byte whose highest bit says
that more follow (LEB128, as in DWARF): rows that lie close together take a byte each.
"""

import numpy as np

from mpips.kernels.compiled import Vector, kernel

Matrix = np.ndarray

GROUP, MORE = 7, 1 << 7  # bits of a byte, and the bit that says that another one follows


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
