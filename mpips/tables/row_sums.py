"""Rows of several workers added up: sorted lists merged, each row once."""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, this is among its names
    from mpips.kernels.compiler import array_at

Matrix = np.ndarray

PLACES, SUMS, COUNT, DONE, NEXT, WORDS = range(6)  # of a list; DONE and NEXT are the loop's own
NONE = np.int64(1 << 62)  # behind all places


@kernel()
def merge_rows(lists: Matrix, weights: Vector, local: Vector, out: Matrix) -> int:
    """Sum the rows of workers' lists, each times its worker's weight, in the order of the workers.

    Args:
        lists: A column a worker, shape (WORDS, workers), dtype int64: the address of its places,
            which are int64 and increase, that of its gradients, of out's dtype, and how many it
            has. What they point to stays alive during the call. Other words are overwritten.
        weights: Shape (workers,), dtype float64; rounded to out's dtype.
        local: Where the places go, each once, increasing; as long as all lists together need.
        out: Where the sums go, shape (len(local), dim).

    Returns:
        How many rows there are.
    """
    real, dim, count = out.dtype.type, out.shape[1], 0
    size, following = dim * out.itemsize, lists[NEXT]
    for k in range(following.size):
        lists[DONE, k] = 0
        following[k] = array_at(lists[PLACES, k], local, 1)[0] if lists[COUNT, k] else NONE
    while True:
        least = NONE
        for k in range(following.size):
            least = min(least, following[k])
        if least == NONE:
            return count
        row, first = out[count], True
        for k in range(following.size):
            if following[k] != least:
                continue
            done = lists[DONE, k]
            given = array_at(lists[SUMS, k] + size * done, out, dim)
            weight = real(weights[k])
            if first:
                for j in range(dim):
                    row[j] = weight * given[j]
            else:
                for j in range(dim):
                    row[j] += weight * given[j]
            first = False
            done += 1
            lists[DONE, k], following[k] = done, NONE
            if done < lists[COUNT, k]:
                following[k] = array_at(lists[PLACES, k] + 8 * done, local, 1)[0]
        local[count] = least
        count += 1
