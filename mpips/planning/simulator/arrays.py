"""Arrays of a simulated job: columns, and the heap of events.

`mpips.planning.simulator.loop` works on them. Events are in a binary heap by their time, equal ones
in the order in which they were made.
"""

from typing import NamedTuple

import numpy as np

from mpips.kernels.compiled import Vector, kernel

Matrix = np.ndarray

# Columns of the heap, a row an event, the first one in row 1.
TIME, ORDER, CODE = range(3)
KIND_BITS, LANE_BITS = 42, 21  # of a code: kind, worker, lane
WARM_AT, LAST_AT, END_AT = range(3)  # in row 0 of `events`, which is no event
# Words of `numbers`: events in the heap, and in all, and what else is counted.
SIZE, MADE = range(2)
WORKERS, LANES, TOTAL, QUOTA, BOUND, AHEAD, SHARES, READS, WARM, LAST = range(2, 12)
HANDED, STARTED, COMPLETE, BLOCKED, PIECES = range(12, 17)
NUMBERS = 17
# Columns of `workers`.
NODE, REMOTE, COPY_S, SHARE, STEP, IDLE, WAITING, UNSENT, HELD = range(9)
MISSING, ARRIVED = 9, 11  # two each, by whether the step is odd
SINCE, COMPUTE, PULL, PUSH, WAIT, KNOWN = range(13, 19)
BATCH = 19
RING = 64  # steps of which something is remembered
WORKER_COLUMNS = BATCH + RING
# Columns of `lanes`; the last row is what data is read from.
AT, DELAY, PULL_OUT, PULL_IN, PUSH_OUT, PUSH_IN, APPLY, PLACES, FREE, BUSY, VERSION = range(11)
HEAD, TAIL = 11, 12  # of those who wait for a place
LANE_COLUMNS = 13
# Columns of `parts`, a row a worker and row of `lanes`; those of joints a row a worker's node.
PULLED, APPLIED, NEXT, WAITS, JOINT, JOINED, ASKED, DONE, FOUND = range(9)
BEHIND = 9  # two, the next in a queue of replies and of pushes
LEFT = 11  # two, the pieces of such a message that have not begun to leave
FOUND_IN = 13  # the version in a reply that is on its way
SEEN = 14
PART_COLUMNS = SEEN + RING
# Columns of `pipes`, a row a node.
IN, OUT_BUSY, IN_BUSY, SENDING, TURN, ROW = range(6)
QUEUE = 6  # heads of replies and of pushes, then tails
PIPE_COLUMNS = 10
BINS = 4096  # of staleness in `tally`; behind them the parts of each batch that are not applied


class State(NamedTuple):
    """All arrays of a run; see the names of their columns."""

    events: Matrix
    numbers: Vector
    workers: Matrix
    lanes: Matrix
    parts: Matrix
    pipes: Matrix
    times: Matrix
    tally: Vector


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
    """Return whether an event comes before another."""
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
