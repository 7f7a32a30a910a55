"""How far the hosts' clocks are apart: by the quickest of some messages there and back."""

import time

import numpy as np

from mpips.cluster.tags import TAG_CLOCK
from mpips.cluster.world import Cluster

TRIES = 10


def first_ranks(cluster: Cluster) -> list[int]:
    """Return the first rank of each host."""
    return [r for r, host in enumerate(cluster.hosts) if cluster.hosts.index(host) == r]


def skews(cluster: Cluster) -> dict[str, float]:
    """Return on rank 0 the seconds by which each other host's clock is ahead of its own.

    Collective: yes. Blocks: for ten messages there and back a host, one host after the other.

    Reference: Cristian, Distributed Computing 3 (1989).
    """
    found = {}
    for rank in first_ranks(cluster)[1:]:
        if cluster.rank == 0:
            found[cluster.hosts[rank]] = _ask(cluster, rank)
        elif cluster.rank == rank:
            _answer(cluster)
    return found


def _ask(cluster: Cluster, rank: int) -> float:
    """Return the seconds by which another rank's clock is ahead."""
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
