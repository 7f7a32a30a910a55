"""Litmus tests of `publish` and `observe`, between two processes in the memory of a window.

Each loop runs compiled, without a pause, so that stores and loads come as close together as the
processor allows; both are bounded. References: Alglave et al., TOPLAS 36 (2014).
"""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from numba import njit
from verdict import check

from mpips.kernels.atomics import observe, publish
from mpips.mpi.window import Field, Plan, Window
from mpips.mpi.world import Cluster

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=2)]

ROUNDS = 100_000
CHUNK = 10_000
PLAN = Plan((Field("flag", "i8", (8,)), Field("data", "f8", (64,))))


@njit(nogil=True)
def write(flag: np.ndarray, data: np.ndarray, begin: int, end: int) -> None:
    for turn in range(begin, end):
        for line in range(0, data.size, 8):
            data[line] = turn
        publish(flag, 0, turn)


@njit(nogil=True)
def read(flag: np.ndarray, data: np.ndarray, looks: int) -> tuple[int, int]:
    """Return how many data are older than the flag that was seen before them, and the flag."""
    old = seen = 0
    for _ in range(looks):
        seen = observe(flag, 0)
        for line in range(data.size - 8, -1, -8):
            old += data[line] < seen
    return old, seen


@njit(nogil=True)
def cross(mine: np.ndarray, theirs: np.ndarray, saw: np.ndarray, begin: int, end: int) -> None:
    for turn in range(begin, end):
        publish(mine, 0, turn)
        saw[turn] = observe(theirs, 0)


@pytest.fixture
def window(cluster: Cluster) -> Iterator[Window]:
    """Return the memory of two ranks that read and write it, the loops compiled."""
    if cluster.nodes > 1:
        pytest.skip("loads and stores reach one node only")
    flag, data = np.zeros(8, "i8"), np.zeros(64)
    write(flag, data, 0, 1)
    read(flag, data, 1)
    cross(flag, flag, np.zeros(1, "i8"), 0, 1)
    made = Window(cluster, [PLAN] * cluster.world)
    cluster.barrier()
    yield made
    made.free()


def test_message_passing(cluster: Cluster, window: Window) -> None:
    """Who sees the flag sees what was written before it, on several cache lines."""
    flag, data = window.view(0, "flag"), window.view(0, "data")
    old = seen = 0
    if cluster.rank == 0:
        for begin in range(1, ROUNDS, CHUNK):
            write(flag, data, begin, min(begin + CHUNK, ROUNDS))
    else:
        deadline = time.monotonic() + 30
        while seen < ROUNDS - 1 and time.monotonic() < deadline:
            found, seen = read(flag, data, CHUNK)
            old += found
    check(cluster.comm, old == 0, f"{old} of the reads found older data, flag {seen}")
    check(cluster.comm, cluster.rank == 0 or seen == ROUNDS - 1, seen)


def test_store_buffering(cluster: Cluster, window: Window) -> None:
    """Of two ranks that publish and then observe, one at least sees the other's word.

    Both run freely. If rank 0 saw only ``a[i] < j`` in its turn i, then its publish of i came
    before rank 1's of j, so rank 1 must see i or more in turn j. The smallest such j is
    ``a[i] + 1``, and what rank 1 sees never falls.
    """
    mine, theirs = window.view(cluster.rank, "flag"), window.view(1 - cluster.rank, "flag")
    saw = np.zeros(ROUNDS, "i8")
    for begin in range(1, ROUNDS, CHUNK):
        cross(mine, theirs, saw, begin, min(begin + CHUNK, ROUNDS))
    first, second = cluster.comm.allgather(saw)
    turns = np.arange(1, ROUNDS)
    turns = turns[first[1:] + 1 < ROUNDS]
    both_missed = int((second[first[turns] + 1] < turns).sum())
    check(cluster.comm, both_missed == 0, f"both missed the other {both_missed} times")
