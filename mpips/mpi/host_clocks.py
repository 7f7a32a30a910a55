"""How far the hosts' clocks are apart: by the quickest of some messages there and back."""

import platform
import time
from collections.abc import Callable, Sequence

import numpy as np

from mpips.mpi.collectives import gather_polled
from mpips.mpi.messages import Arrays
from mpips.mpi.start import Comm
from mpips.mpi.tags import TAG_CLOCK
from mpips.mpi.world import Cluster

TRIES = 10


def first_ranks(cluster: Cluster) -> list[int]:
    """Return the first rank of each host."""
    return _firsts(cluster.hosts)


def _firsts(hosts: Sequence[str]) -> list[int]:
    return [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]


def skews(
    cluster: Cluster, everyone: Comm | None = None, clock: Callable[[], float] = time.time
) -> dict[str, float]:
    """Return on rank 0 the seconds by which each other host's clock is ahead of its own.

    Args:
        cluster: This rank's, which says how it waits.
        everyone: Those whose hosts are compared; by default the ranks of `cluster`.
        clock: Tells the time of this rank's host.

    Collective: yes, over `everyone`. Blocks: for ten messages there and back a host, one host after
    the other.

    Reference: Cristian, Distributed Computing 3 (1989).
    """
    comm = everyone or cluster.comm
    hosts = gather_polled(comm, platform.node(), cluster.wait_request)
    arrays, found = Arrays(comm), {}
    for rank in _firsts(hosts)[1:]:
        if comm.rank == 0:
            found[hosts[rank]] = _ask(cluster, arrays, rank, clock)
        elif comm.rank == rank:
            _answer(cluster, arrays, clock)
    return found


def _ask(cluster: Cluster, arrays: Arrays, rank: int, clock: Callable[[], float]) -> float:
    """Return the seconds by which another rank's clock is ahead."""
    best, ahead = float("inf"), 0.0
    for _ in range(TRIES):
        question, answer = np.zeros(1), np.zeros(1)
        start, now = time.perf_counter(), clock()
        coming = arrays.begin_receive(answer, rank, TAG_CLOCK)
        cluster.wait_request(arrays.begin_send(question, rank, TAG_CLOCK))
        cluster.wait_request(coming)
        spent = time.perf_counter() - start
        if spent < best:
            best, ahead = spent, float(answer[0]) - now - spent / 2
    return ahead


def _answer(cluster: Cluster, arrays: Arrays, clock: Callable[[], float]) -> None:
    for _ in range(TRIES):
        cluster.wait_request(arrays.begin_receive(np.zeros(1), 0, TAG_CLOCK))
        cluster.wait_request(arrays.begin_send(np.array([clock()]), 0, TAG_CLOCK))
