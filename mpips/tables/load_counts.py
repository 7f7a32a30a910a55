"""How rows are spread: which server has them, and which occur most, by a sample of ids.

Those that occur most are found by a few counters, by Space-Saving.

References: A. Metwally, D. Agrawal, A. El Abbadi, "Efficient Computation of Frequent and Top-k
Elements in Data Streams", ICDT 2005.
"""

import numpy as np

from mpips.kernels.compiled import Vector, kernel

Matrix = np.ndarray

STEP = 509  # of so many ids one is looked at; a prime, as ids of a batch may have a period
KEYS, COUNTS, ERRORS = range(3)  # of the counters


@kernel(quick=True)
def note_places(places: Vector, begins: Vector, sampled: Vector, following: Vector) -> None:
    """Count one place in `STEP` for the server that owns it.

    Args:
        places: Of the ids that are read now, shape (n,), int64.
        begins: The first place of each server, and the end, shape (servers + 1,), int64.
        sampled: Counts, shape (servers,), int64.
        following: How many ids are left out before the next one, shape (1,), int64.
    """
    at = following[0]
    while at < places.size:
        server = 0
        while places[at] >= begins[server + 1]:
            server += 1
        sampled[server] += 1
        at += STEP
    following[0] = at - places.size


@kernel(quick=True)
def note_pushed(
    ids: Vector, bounds: Vector, pushed: Vector, counters: Matrix, following: Vector
) -> None:
    """Count rows by their server, and one id in `STEP` among those that occur most.

    An id that has no counter takes that of the id that was counted least.

    Args:
        ids: Row numbers, shape (n,), int64.
        bounds: Where each server's rows begin, and the end, shape (servers + 1,), int64.
        pushed: Rows by server, shape (servers,), int64.
        counters: The id of each, how often it was counted, and by how much that may be too many,
            shape (3, k), int64, at first 0.
        following: As for `note_places`.
    """
    for server in range(pushed.size):
        pushed[server] += bounds[server + 1] - bounds[server]
    keys, counts, errors = counters[KEYS], counters[COUNTS], counters[ERRORS]
    at = following[0]
    while at < ids.size:
        place, found = 0, False
        for k in range(keys.size):
            if keys[k] == ids[at] and counts[k]:
                place, found = k, True
                break
            if counts[k] < counts[place]:
                place = k
        if not found:
            keys[place], errors[place] = ids[at], counts[place]
        counts[place] += 1
        at += STEP
    following[0] = at - ids.size
