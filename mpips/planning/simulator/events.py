"""A binary heap of events by their time, equal ones in the order in which they were made."""

import numpy as np

from mpips.kernels.compiled import Vector, kernel

Matrix = np.ndarray

# Columns of a heap, a row an event, the first one in row 1.
TIME, ORDER, CODE = range(3)
KIND_BITS, LANE_BITS = 42, 21  # of a code: kind, worker, lane
SIZE, MADE = range(2)  # words of its numbers: events in it, and in all


@kernel()
def put(heap: Matrix, n: Vector, time: float, kind: int, w: int, k: int) -> None:
    """Make an event."""
    n[MADE] += 1
    n[SIZE] += 1
    i = n[SIZE]
    while i > 1 and heap[i >> 1, TIME] > time:
        for c in range(3):
            heap[i, c] = heap[i >> 1, c]
        i >>= 1
    heap[i, TIME] = time
    heap[i, ORDER] = n[MADE]
    heap[i, CODE] = (kind << KIND_BITS) | (w << LANE_BITS) | k


@kernel(quick=True)
def before(heap: Matrix, i: int, j: int) -> bool:
    """Whether an event comes before another."""
    if heap[i, TIME] != heap[j, TIME]:
        return heap[i, TIME] < heap[j, TIME]
    return heap[i, ORDER] < heap[j, ORDER]


@kernel()
def drop_first(heap: Matrix, n: Vector) -> None:
    """Take the first event out of the heap."""
    last = n[SIZE]
    n[SIZE] -= 1
    i = 1
    while True:
        child = 2 * i
        if child >= last:
            break
        if child + 1 < last and before(heap, child + 1, child):
            child += 1
        if before(heap, last, child):
            break
        for c in range(3):
            heap[i, c] = heap[child, c]
        i = child
    for c in range(3):
        heap[i, c] = heap[last, c]
