"""Choice between Get and reply for reads of remote shards.

One worker tries both ways, and tells all.
"""

import time
from collections.abc import Callable

import numpy as np

from mpips.mpi.collectives import begin_broadcast
from mpips.mpi.start import Request, is_open_mpi
from mpips.mpi.world import Cluster
from mpips.ps.client import Puller
from mpips.ps.design import Design

WAYS = ("get", "reply")
TRIES = 3
GAIN = 0.8  # a Get has to be so much faster to be chosen


def agree(
    cluster: Cluster,
    design: Design,
    puller: Callable[[str], Puller] | None,
    wait: Callable[[Request], object],
) -> np.ndarray | None:
    """Have one worker read its remote shards by Get and by reply, and tell all how long it took.

    Args:
        cluster: The job's ranks.
        design: Of the store.
        puller: On workers, returns one that reads by "get" or by "reply".
        wait: How this rank waits for the result; servers serve meanwhile.

    Returns:
        Seconds of a read by Get and by reply, shape (2,), or None where there is no choice.

    Collective: yes.
    """
    roles, node_of = cluster.roles, cluster.node_of
    owners = [r for r, s in zip(roles.servers, design.shards, strict=True) if s.size]
    remote = [w for w in roles.workers if any(node_of[r] != node_of[w] for r in owners)]
    decided = design.far_read != "auto" or design.consistent or design.replies.codec is not None
    if not remote or decided or design.reads_wait or _get_keeps_memory(cluster):
        return None
    times = np.zeros(2)
    if puller is not None and cluster.rank == remote[0]:
        out = np.zeros(design.size, design.dtype)
        times[:] = [_seconds(puller(way), out) for way in WAYS]
    wait(begin_broadcast(cluster.comm, times, remote[0]))
    return times


def _seconds(puller: Puller, out: np.ndarray) -> float:
    found = []
    for _ in range(TRIES):
        start = time.perf_counter()
        puller.pull(out)
        found.append(time.perf_counter() - start)
    return min(found)


def _get_keeps_memory(cluster: Cluster) -> bool:
    """Whether owners lose memory by Get: Open MPI 5.0's do where nodes are of one host.

    Three readers at once left 7 KB of each 16.8 MB behind, seven 30 to 70 KB.
    """
    return is_open_mpi() and len(set(cluster.hosts)) < cluster.nodes


def way_of(design: Design, times: np.ndarray | None) -> str:
    """Return how far shards are read, when `agree` has returned `times`."""
    if times is not None:
        return faster(times)
    return "reply" if design.far_read == "auto" else design.far_read


def faster(times: np.ndarray) -> str:
    """Return the way to read; a reply, which leaves the other direction free, in a tie."""
    return "get" if times[0] < GAIN * times[1] else "reply"


def announcement(times: np.ndarray) -> str:
    """Return a line that says what was found."""
    get_ms, reply_ms = (1e3 * times).tolist()
    return f"remote reads by {faster(times)}: {get_ms:.3g} ms by Get, {reply_ms:.3g} ms by reply"
