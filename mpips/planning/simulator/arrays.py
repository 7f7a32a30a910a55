"""Arrays of a simulated job: columns, and the heap of events.

`mpips.planning.simulator.loop` works on them. Events form a binary heap by time. Events at the same
time are ordered by their creation.
"""

from typing import NamedTuple

import numpy as np

from mpips.kernels.compiled import Vector, kernel

Matrix = np.ndarray

# Columns of the heap, one event a row; the first event is in row 1.
TIME, ORDER, CODE = range(3)
KIND_BITS, LANE_BITS = 42, 21  # of a code: kind, worker, lane
WARM_AT, LAST_AT, END_AT = range(3)  # in row 0 of `events`, which is no event
# Elements of `numbers`: events in the heap, events created, and other counts.
SIZE, MADE = range(2)
WORKERS, LANES, TOTAL, QUOTA, BOUND, PREFETCH, SHARES, READS, WARM, LAST = range(2, 12)
ASSIGNED, STARTED, COMPLETE, BLOCKED, PIECES = range(12, 17)
NUMBERS = 17
# Columns of `workers`.
NODE, REMOTE, COPY_S, SHARE, STEP, IDLE, WAITING, UNSENT, WAITS_CLOCK = range(9)
MISSING, ARRIVED = 9, 11  # two columns each, for even and odd steps
SINCE, COMPUTE, PULL, PUSH, WAIT, KNOWN = range(13, 19)
BATCH = 19
RING = 64  # number of the last steps that are stored
WORKER_COLUMNS = BATCH + RING
# Columns of `lanes`; the last row is the data storage.
AT, DELAY, PULL_OUT, PULL_IN, PUSH_OUT, PUSH_IN, APPLY, SLOTS, FREE, BUSY, VERSION = range(11)
HEAD, TAIL = 11, 12  # queue of workers that wait for a receive slot
LANE_COLUMNS = 13
# Columns of `parts`, with a row for each worker and row of `lanes`. Shared reads of a node use the
# row with the node's number.
PULLED, APPLIED, NEXT, WAITS, JOINT, JOINED, ASKED, DONE, REPLIED = range(9)
BEHIND = 9  # two columns: the next message in the queue of responses, and of pushes
TO_SEND = 11  # two columns: pieces of this response or push that have not begun to leave
REPLYING = 13  # version in a response that is under way
SEEN = 14
PART_COLUMNS = SEEN + RING
# Columns of `pipes`, a row for each node.
IN, OUT_BUSY, IN_BUSY, SENDING, TURN, ROW = range(6)
QUEUE = 6  # first messages of responses and of pushes, then last ones
PIPE_COLUMNS = 10
BINS = 4096  # of staleness in `tally`; after them, unapplied parts of each batch


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
    """Add an event to the heap.

    Args:
        heap: Events.
        n: Counts.
        time: Time of the event.
        kind: Kind of the event.
        w: Worker or node.
        k: Lane.
    """
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
    """Return whether event `i` comes before event `j`."""
    if heap[i, TIME] != heap[j, TIME]:
        return heap[i, TIME] < heap[j, TIME]
    return heap[i, ORDER] < heap[j, ORDER]


@kernel()
def drop_first(heap: Matrix, n: Vector) -> None:
    """Remove the first event from the heap."""
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
