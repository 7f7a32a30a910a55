"""Pulls, pushes and an Allreduce over each link, beside a plain send of the same bytes."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpips.bench.link import FAST, Sides
from mpips.bench.measure import in_turn
from mpips.cluster import Cluster, all_done, begin_sum, cluster_subset
from mpips.doctor.finding import Finding, ok, warn
from mpips.metrics import human_bytes

SIZE = 4 << 20
TIMES = (2, 16)  # transfers of one turn, at least and at most
TURN_S = 0.05
REPEATS = 2
LINKS_MAX = 8
TAG_PLAIN = 41
SHARE, FAST_SHARE = 0.5, 0.1  # of the plain send's rate; of one that processors limit
EVEN = 0.5  # of the median of all links
FABRIC = 0.2  # of what the fastest device says of itself
WAIT_S = 0.01


@dataclass(frozen=True)
class Link:
    """What one link carries, in bytes a second.

    Attributes:
        hosts: Names of both ends.
        ranks: Both ends.
        send: Of a plain send.
        pull: Of a pull.
        push: Of a push.
        allreduce: Of an Allreduce, of the vector's bytes.
    """

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    send: float
    pull: float
    push: float
    allreduce: float

    @property
    def name(self) -> str:
        """Both ends, in words."""
        a, b = self.hosts
        ranks = f"ranks {self.ranks[0]} and {self.ranks[1]}"
        return f"{a} to {b}" if a != b else f"{ranks} on {a}"

    @property
    def real(self) -> bool:
        """Whether it is between two hosts."""
        return self.hosts[0] != self.hosts[1]


def pairs(node_of: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranks between which to measure: node 0's first with others' firsts.

    On one node these are its first two ranks. Of many nodes some are taken, evenly.
    """
    firsts = [node_of.index(node) for node in sorted(set(node_of))]
    others = firsts[1:] or [r for r in range(len(node_of)) if r != firsts[0]][:1]
    step = max(1, -(-len(others) // LINKS_MAX))
    return [(firsts[0], other) for other in others[::step]]


def try_link(cluster: Cluster, pair: tuple[int, int]) -> Link | None:
    """Measure between two ranks; the others sleep. Collective: yes.

    Returns:
        What the link carries, on rank 0; None elsewhere.
    """
    comm = cluster_subset(cluster, pair)
    found = np.zeros(4)
    if cluster.rank in pair:
        near = 0 if cluster.node_of[pair[0]] == cluster.node_of[pair[1]] else 1
        two = Cluster(comm, node_size=near)
        found[:] = _measure(two, near)
        two.free()
        comm.Free()
    done = cluster.comm.Ibcast(found, pair[0])
    while not done.Test():
        time.sleep(WAIT_S)
    if cluster.rank != 0:
        return None
    hosts = cluster.hosts[pair[0]], cluster.hosts[pair[1]]
    return Link(hosts, pair, *found.tolist())


def _measure(two: Cluster, node_size: int) -> list[float]:
    """Return the bytes a second of send, pull, push, Allreduce."""
    sides = Sides(two, SIZE, prefetch=False, node_size=node_size)
    data = np.ones(SIZE // 4, "f4")
    first = in_turn(two, {"send": lambda: _send(two, data, 1)}, 1)["send"]
    times = max(TIMES[0], min(TIMES[1], round(TURN_S / max(min(first), 1e-6))))
    times = int(two.comm.bcast(times))
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
            two.wait_request(two.comm.Isend(data, 0, TAG_PLAIN))
        else:
            two.wait_request(two.comm.Irecv(data, 1, TAG_PLAIN))


def _allreduce(two: Cluster, data: np.ndarray, times: int) -> None:
    data[:] = 0
    for _ in range(times):
        request = begin_sum(two.comm, data)
        two.wait(lambda: all_done([request]))  # noqa: B023  (waited for in this turn)


def judge_links(
    links: Sequence[Link], fabric: Mapping[str, float], left_out: int = 0
) -> list[Finding]:
    """Judge what links carry.

    Args:
        links: Those that were measured.
        fabric: Bits a second of rank 0's network devices, as they say themselves.
        left_out: Links that were not measured.
    """
    if not links:
        return [ok("links", "one rank, no link")]
    found = [_judge_link(link) for link in links]
    if left_out:
        found.append(ok("links", f"{left_out} more of rank 0's links were not measured"))
    return [*found, *_judge_even(links), *_judge_fabric(links, fabric)]


def _judge_link(link: Link) -> Finding:
    rates = {"pull": link.pull, "push": link.push, "allreduce": link.allreduce}
    told = f"{link.name}: send {human_bytes(link.send)}/s"
    told += "".join(f", {name} {human_bytes(rate)}/s" for name, rate in rates.items())
    figures = {f"{k}_mb_s": v / 1e6 for k, v in {"send": link.send, **rates}.items()}
    share = FAST_SHARE if link.send > FAST else SHARE
    slow = [name for name, rate in rates.items() if rate < share * link.send]
    if slow:
        remedy = f"{' and '.join(slow)} should reach {share:g} of a send: try --far-read reply, "
        remedy += "or another transport (MPICH: UCX_TLS; Open MPI: --mca pml, --mca btl)"
        return warn("link", told, remedy, **figures)
    return ok("link", told, **figures)


def _judge_even(links: Sequence[Link]) -> list[Finding]:
    middle = statistics.median(link.send for link in links)
    slow = [link for link in links if link.real and link.send < EVEN * middle]
    return [
        warn(
            "link", f"{link.name} carries {link.send / middle:.2f} of what the others do",
            "leave that node out (srun --exclude), and tell the administrator",
        )
        for link in slow
    ]  # fmt: skip


def _judge_fabric(links: Sequence[Link], fabric: Mapping[str, float]) -> list[Finding]:
    real = [link.send for link in links if link.real]
    if not real or not fabric:
        return []
    name = max(fabric, key=lambda device: fabric[device])
    reached, said = max(real), fabric[name] / 8
    told = f"{name} is for {human_bytes(said)}/s, a send reaches {human_bytes(reached)}/s"
    if reached < FABRIC * said:
        remedy = f"have MPI use {name} (UCX_NET_DEVICES, --mca btl_tcp_if_include), or the "
        remedy += "site's own MPI: mpi4py built against it, instead of a wheel"
        return [warn("network", told, remedy)]
    return [ok("network", told)]
