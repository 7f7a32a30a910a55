"""Rows of several workers added up: sorted lists merged, each row once."""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, this is among its names
    from mpips.kernels.compiler import array_at

Matrix = np.ndarray

PLACES, SUMS, COUNT, NEXT, WORDS = range(5)  # of a list; NEXT is for the loop, then their number
NONE = np.int64(1 << 62)  # behind all places


@kernel()
def merge_rows(lists: Matrix, weights: Vector, local: Vector, out: Matrix) -> int:
    """Sum the rows of workers' lists, each times its worker's weight, in the order of the workers.

    Args:
        lists: A worker each, shape (workers, 4), dtype int64: the address of its places, which are
            int64 and increase, that of its gradients, of out's dtype, and how many it has. What
            they point to stays alive during the call. The last column is overwritten.
        weights: Shape (workers,), dtype float64; rounded to out's dtype.
        local: Where the places go, each once, increasing; as long as all lists together need.
        out: Where the sums go, shape (len(local), dim).

    Returns:
        How many rows there are.
    """
    real, dim, count = out.dtype.type, out.shape[1], 0
    size = dim * out.itemsize
    lists[:, NEXT] = 0
    while True:
        least = NONE
        for k in range(lists.shape[0]):
            at = lists[k, NEXT]
            if at < lists[k, COUNT]:
                least = min(least, array_at(lists[k, PLACES] + 8 * at, local, 1)[0])
        if least == NONE:
            return count
        row, first = out[count], True
        for k in range(lists.shape[0]):
            at = lists[k, NEXT]
            if at < lists[k, COUNT] and array_at(lists[k, PLACES] + 8 * at, local, 1)[0] == least:
                given = array_at(lists[k, SUMS] + size * at, out, dim)
                weight = real(weights[k])
                if first:
                    for j in range(dim):
                        row[j] = weight * given[j]
                else:
                    for j in range(dim):
                        row[j] += weight * given[j]
                first = False
                lists[k, NEXT] = at + 1
        local[count] = least
        count += 1
