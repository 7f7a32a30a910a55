"""The arrays of a simulated job, and the names of their columns.

See `mpips.planning.simulator.loop`.
"""

from typing import NamedTuple

import numpy as np

from mpips.kernels.compiled import Vector

Matrix = np.ndarray

WARM_AT, LAST_AT, END_AT = range(3)  # in row 0 of `events`, which is no event
# Words of `numbers`, behind SIZE and MADE.
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
