"""Rounds with nodes of servers alone, beside their least time, and beside rounds without them.

In a world of several nodes, the ranks of the last node, or of the last two nodes, are servers, and
all others are workers. The least time of a round of M bytes with n nodes of workers and k nodes of
servers is 2 n (n - 1) M / (n^2 + k n - 2 k) at TCP's rate between two nodes (Jiang et al., OSDI
2020).
"""

from collections.abc import Iterator

import numpy as np

from mpips.mpi.collectives import begin_broadcast, cluster_subset, free
from mpips.mpi.world import Cluster
from mpips.tools.bench.link import Link, pair_of
from mpips.tools.bench.measure import Options, Row, bytes_text, in_turn, milliseconds
from mpips.tools.bench.rounds import Rounds
from mpips.tools.bench.world import Rows

SIZES, QUICK = (8 << 20, 16 << 20), (64 << 10,)
ROUNDS = (2, 4)  # smallest and largest number in one repeat
WORK_BYTES = 64 << 20
MOST = 2  # largest number of nodes of servers
AIM, NO_SLOWER = 0.85, 0.98
WITH, WITHOUT = "with servers", "without"


def run(cluster: Cluster, options: Options) -> Iterator[Row]:
    """Compare for each number of nodes of servers. Collective: yes."""
    rate = yield from pair_of(cluster, _rate)
    found = np.array([rate or 0.0])
    cluster.wait_request(begin_broadcast(cluster.comm, found, cluster.node_of.index(0)))
    for size in options.pick(SIZES, QUICK):
        for k in range(1, 1 + min(MOST, cluster.nodes - 2)):
            yield from _at(cluster, size, k, float(found[0]), options)


def _rate(two: Cluster) -> Rows[float]:
    """Return TCP's rate between two nodes, in bytes/s."""
    link, data = Link(two), np.zeros(WORK_BYTES, "u1")
    took = in_turn(two, {"tcp": lambda: link.one_way(data, 1, from_first=True)}, 3)
    link.close()
    yield from ()
    return WORK_BYTES / min(took["tcp"])


def least_s(size: int, n: int, k: int, rate: float) -> float:
    """Return the least time of a round of `size` bytes with n nodes of workers and k of servers."""
    k = min(n, k)
    return 2 * n * (n - 1) * size / (n * n + k * n - 2 * k) / rate


def _at(cluster: Cluster, size: int, k: int, rate: float, options: Options) -> Iterator[Row]:
    n, count = cluster.nodes - k, options.times(ROUNDS, WORK_BYTES // size)
    servers = [rank for rank, node in enumerate(cluster.node_of) if node >= n]
    workers = [rank for rank in range(cluster.world) if rank not in servers]
    comm = cluster_subset(cluster, workers)
    made_up = len(set(cluster.hosts)) < cluster.nodes
    few = Cluster(comm, made_up * cluster.node_of.count(0)) if cluster.rank in workers else None
    helped = Rounds(cluster, size, servers)
    alone = Rounds(few, size) if few is not None else None

    def without() -> None:
        if alone is not None:
            alone.exchange(count)

    sides = {WITH: lambda: helped.exchange(count), WITHOUT: without}
    times = in_turn(cluster, sides, options.repeats)
    helped.free()
    if alone is not None and few is not None:
        alone.free()
        few.free()
    free(comm)
    case = f"{bytes_text(size)}, {n} nodes of workers + {k} of servers"
    least = [count * least_s(size, n, k, rate)] * options.repeats
    for beside, other, aim in (("least", least, AIM), (WITHOUT, times[WITHOUT], NO_SLOWER)):
        yield milliseconds(("round", case, beside), count, (times[WITH], other), aim)
    least = [count * least_s(size, n, 0, rate)] * options.repeats
    case = f"{bytes_text(size)}, {n} nodes of workers"
    yield milliseconds(("round", case, "least"), count, (times[WITHOUT], least))
