"""How far the hosts' clocks are apart: by the quickest of some messages there and back."""

import time
from collections.abc import Mapping

import numpy as np

from mpips.cluster import Cluster
from mpips.doctor.finding import Finding, ok, warn

TAG_CLOCK = 40
TRIES = 10
SKEW_S = 1.0


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
        coming = cluster.comm.Irecv(answer, rank, TAG_CLOCK)
        cluster.wait_request(cluster.comm.Isend(question, rank, TAG_CLOCK))
        cluster.wait_request(coming)
        spent = time.perf_counter() - start
        if spent < best:
            best, ahead = spent, float(answer[0]) - now - spent / 2
    return ahead


def _answer(cluster: Cluster) -> None:
    for _ in range(TRIES):
        cluster.wait_request(cluster.comm.Irecv(np.zeros(1), 0, TAG_CLOCK))
        cluster.wait_request(cluster.comm.Isend(np.array([time.time()]), 0, TAG_CLOCK))


def judge_clocks(skews: Mapping[str, float]) -> Finding:
    """Judge the seconds by which the clocks of other hosts are ahead of rank 0's."""
    if not skews:
        return ok("clocks", "one host, one clock")
    host = max(skews, key=lambda name: abs(skews[name]))
    told = f"at most {abs(skews[host]):.3g} s apart, on {host}"
    if abs(skews[host]) > SKEW_S:
        remedy = "have its clock set by NTP: dates in logs and of files mislead"
        return warn("clocks", told, remedy, skew_s=skews[host])
    return ok("clocks", told, skew_s=skews[host])
