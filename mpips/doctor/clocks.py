"""How far the hosts' clocks are apart: by the quickest of some messages there and back."""

import time

import numpy as np

from mpips.cluster.tags import TAG_CLOCK
from mpips.cluster.world import Cluster
from mpips.doctor.finding import Finding
from mpips.doctor.network import judge_clocks

TRIES = 10


def try_clocks(cluster: Cluster) -> list[Finding]:
    """Compare each host's clock with rank 0's. Collective: yes. The finding is rank 0's."""
    firsts = first_ranks(cluster)
    skews = {}
    for rank in firsts[1:]:
        if cluster.rank == 0:
            skews[cluster.hosts[rank]] = _ask(cluster, rank)
        elif cluster.rank == rank:
            _answer(cluster)
    return [judge_clocks(skews)]


def first_ranks(cluster: Cluster) -> list[int]:
    """Return the first rank of each host."""
    return [r for r, host in enumerate(cluster.hosts) if cluster.hosts.index(host) == r]


def _ask(cluster: Cluster, rank: int) -> float:
    """Return the seconds by which another rank's clock is ahead (Cristian, 1989)."""
    best, ahead = float("inf"), 0.0
    for _ in range(TRIES):
        question, answer = np.zeros(1), np.zeros(1)
        start, now = time.perf_counter(), time.time()
        coming = cluster.arrays.begin_receive(answer, rank, TAG_CLOCK)
        cluster.wait_request(cluster.arrays.begin_send(question, rank, TAG_CLOCK))
        cluster.wait_request(coming)
        spent = time.perf_counter() - start
        if spent < best:
            best, ahead = spent, float(answer[0]) - now - spent / 2
    return ahead


def _answer(cluster: Cluster) -> None:
    for _ in range(TRIES):
        cluster.wait_request(cluster.arrays.begin_receive(np.zeros(1), 0, TAG_CLOCK))
        cluster.wait_request(cluster.arrays.begin_send(np.array([time.time()]), 0, TAG_CLOCK))
