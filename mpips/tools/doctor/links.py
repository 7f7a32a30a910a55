"""Rates of pulls, pushes and Allreduce on links, beside plain sends."""

import statistics
import time

import numpy as np

from mpips.mpi.collectives import begin_broadcast, begin_sum, broadcast, cluster_subset, free
from mpips.mpi.tags import TAG_PLAIN
from mpips.mpi.waiting import all_done
from mpips.mpi.world import Cluster
from mpips.tools.bench.link import Sides
from mpips.tools.bench.measure import in_turn
from mpips.tools.doctor.network import Link, pairs

SIZE = 4 << 20
TIMES = (2, 16)  # transfers of one turn, at least and at most
TURN_S = 0.05
REPEATS = 2
WAIT_S = 0.01


def try_links(cluster: Cluster) -> list[Link]:
    """Measure between some pairs of ranks, one after the other. Collective: yes."""
    return [_try_link(cluster, pair) for pair in pairs(cluster.node_of)]


def _try_link(cluster: Cluster, pair: tuple[int, int]) -> Link:
    """Measure between two ranks; the others sleep. Collective: yes."""
    comm = cluster_subset(cluster, pair)
    found = np.zeros(4)
    if cluster.rank in pair:
        node_size = 0 if cluster.node_of[pair[0]] == cluster.node_of[pair[1]] else 1
        two = Cluster(comm, node_size=node_size)
        found[:] = _measure(two, node_size)
        two.free()
    free(comm)
    done = begin_broadcast(cluster.comm, found, pair[0])
    while not done.Test():
        time.sleep(WAIT_S)
    return Link((cluster.hosts[pair[0]], cluster.hosts[pair[1]]), pair, *found.tolist())


def _measure(two: Cluster, node_size: int) -> list[float]:
    """Return the bytes a second of send, pull, push, Allreduce."""
    sides = Sides(two, SIZE, prefetch=False, node_size=node_size)
    data = np.ones(SIZE // 4, "f4")
    first = in_turn(two, {"send": lambda: _send(two, data, 1)}, 1)["send"]
    times = max(TIMES[0], min(TIMES[1], round(TURN_S / max(min(first), 1e-6))))
    times = broadcast(two.comm, times)
    sides.times = times
    turns = {
        "send": lambda: _send(two, data, times),
        "pull": sides.pull,
        "push": sides.push,
        "allreduce": lambda: _allreduce(two, data, times),
    }
    found = in_turn(two, turns, REPEATS)
    sides.free()
    return [times * SIZE / statistics.median(found[name]) for name in turns]


def _send(two: Cluster, data: np.ndarray, times: int) -> None:
    """Send from rank 1 to rank 0, as a worker does to a server."""
    for _ in range(times):
        if two.rank == 1:
            two.wait_request(two.arrays.begin_send(data, 0, TAG_PLAIN))
        else:
            two.wait_request(two.arrays.begin_receive(data, 1, TAG_PLAIN))


def _allreduce(two: Cluster, data: np.ndarray, times: int) -> None:
    data[:] = 0
    for _ in range(times):
        request = begin_sum(two.comm, data)
        two.wait(lambda: all_done([request]))  # noqa: B023  (waited for in this turn)
