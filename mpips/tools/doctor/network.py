"""Judgement of windows, remote reads, links and clocks."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpips.errors import human_bytes
from mpips.mpi.segments import SHARED_MEMORY
from mpips.tools.doctor.report import Finding, fail, ok, per_host, warn, warn_if

SLOW_MAKING_S = 2.0
BUSY_S = 0.3
LATE_S = 0.05
SLOW_READ_S = 2e-3
LINKS_MAX = 8
FAST = 300e6  # bytes/s of a send, above which processors are the limit
SHARE, FAST_SHARE = 0.5, 0.1  # smallest share of a send's rate for a pull or push; on a fast link
LOCAL_SHARE = 0.02  # the same within a host, whose ranks may share cores
EVEN = 0.5  # smallest share of the median rate of all links
ALLREDUCE = 0.5  # factor of these shares for Allreduce, which moves a vector in both directions
FABRIC = 0.2  # smallest share of the rate that the fastest device reports
SKEW_S = 1.0


class Need(NamedTuple):
    """Size of the windows of a host's ranks, and the memory for them.

    Attributes:
        needed: Bytes of the windows of an asynchronous run with Adam.
        free: Free bytes of shared memory.
        limit: Bytes of memory of the host, or of its control group, which include shared memory.
        memory: Error, if the model is too large for the host's memory; else empty.
    """

    needed: int
    free: int
    limit: float
    memory: str


def judge_needs(needs: Mapping[str, Need], parameters: int) -> list[Finding]:
    """Judge the shared memory of each host, by host name."""
    return per_host(needs, lambda need: _judge_need(need, parameters))


def _judge_need(need: Need, parameters: int) -> Iterator[Finding]:
    free, needed = (human_bytes(size) for size in (need.free, need.needed))
    figures = {"free_bytes": float(need.free), "needed_bytes": float(need.needed)}
    if need.memory:
        remedy = "use a smaller model, or more nodes with fewer ranks each"
        yield fail("memory", need.memory, remedy, **figures)
        return
    text = f"{free} free in {SHARED_MEMORY}, windows for {parameters:,} parameters take {needed}"
    if need.free < need.needed:
        remedy = "enlarge it (docker: --shm-size, or mount -o remount,size=), use more nodes, or "
        yield fail("memory", text, f"{remedy}--window private", **figures)
    else:
        yield ok("memory", text, **figures)
    if need.limit < need.needed:
        text = f"{human_bytes(need.limit)} of memory, for windows of {needed}"
        yield fail("memory", text, "ask for more memory (--mem, docker --memory)")


def judge_window(ranks: Sequence[tuple[Sequence[int], float]]) -> Finding:
    """Judge the results of `trials.try_window`: wrong reads, and the time to create a window."""
    for reader, (wrong, _) in enumerate(ranks):
        if wrong:
            text = f"rank {reader} does not read what rank {wrong[0]} wrote"
            return fail("window", text, "use another MPI, or another transport (see mpi above)")
    seconds = max(spent for _, spent in ranks)
    text = f"made in {seconds * 1e3:.1f} ms, all ranks read what others wrote"
    remedy = "expect as much at each start; another transport may be faster"
    return warn_if(seconds > SLOW_MAKING_S, "window", text, remedy, making_s=seconds)


class RemoteGet(NamedTuple):
    """Times of a Get of 64 bytes across nodes, in seconds.

    Attributes:
        polling_s: Median time if the owner polls.
        busy_s: Time if the owner computes for `BUSY_S` without calling MPI.
        helped_s: Median time if the owner computes, while a thread of mpips calls MPI.
    """

    polling_s: float
    busy_s: float
    helped_s: float


def judge_remote_get(found: RemoteGet) -> list[Finding]:
    """Judge the times of remote reads."""
    poll = found.polling_s
    text = f"{poll * 1e6:.0f} us from an owner that polls"
    figures = {"polling_us": poll * 1e6, "busy_ms": found.busy_s * 1e3}
    figures["helped_ms"] = found.helped_s * 1e3
    remedy = "give each rank a core (see cores), or use another transport"
    remote_get = warn_if(poll > SLOW_READ_S, "remote get", text, remedy, **figures)
    busy = f"{found.busy_s * 1e3:.0f} ms from one that computes for {BUSY_S * 1e3:.0f} ms"
    helped = f"{found.helped_s * 1e3:.1f} ms with a thread that enters MPI"
    remedy = "leave a core for the thread (fewer ranks on a host), use an MPI with "
    remedy += "MPI_THREAD_MULTIPLE, or servers, which poll (--servers)"
    late = found.helped_s > LATE_S
    return [remote_get, warn_if(late, "busy owner", f"{busy}, {helped}", remedy, **figures)]


@dataclass(frozen=True)
class Link:
    """Measured rates of the link between two ranks, in bytes/s.

    Attributes:
        hosts: Host names of both ranks.
        ranks: Both ranks.
        send: Rate of plain sends.
        pull: Rate of pulls.
        push: Rate of pushes.
        allreduce: Rate of Allreduce, in bytes of the vector.
    """

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    send: float
    pull: float
    push: float
    allreduce: float

    @property
    def name(self) -> str:
        """Text that names both ends."""
        a, b = self.hosts
        ranks = f"ranks {self.ranks[0]} and {self.ranks[1]}"
        return f"{a} to {b}" if a != b else f"{ranks} on {a}"

    @property
    def real(self) -> bool:
        """Whether the ranks are on two hosts."""
        return self.hosts[0] != self.hosts[1]


def pairs(node_of: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure: node 0's first rank with the first rank of each node.

    On one node, the pair is its first two ranks. Of many nodes, at most `LINKS_MAX` are used.
    """
    firsts = [node_of.index(node) for node in sorted(set(node_of))]
    others = firsts[1:] or [r for r in range(len(node_of)) if r != firsts[0]][:1]
    step = max(1, -(-len(others) // LINKS_MAX))
    return [(firsts[0], other) for other in others[::step]]


def judge_links(
    links: Sequence[Link], fabric: Mapping[str, float], left_out: int = 0
) -> list[Finding]:
    """Judge the rates of links.

    Args:
        links: The measured links.
        fabric: Rates that rank 0's network devices report, in bit/s.
        left_out: Number of links that were not measured.
    """
    if not links:
        return [ok("links", "one rank, no link")]
    findings = [_judge_link(link) for link in links]
    if left_out:
        findings.append(ok("links", f"{left_out} more of rank 0's links were not measured"))
    return [*findings, *_judge_even(links), *_judge_fabric(links, fabric)]


def _judge_link(link: Link) -> Finding:
    rates = {"pull": link.pull, "push": link.push, "allreduce": link.allreduce}
    text = f"{link.name}: send {human_bytes(link.send)}/s"
    text += "".join(f", {name} {human_bytes(rate)}/s" for name, rate in rates.items())
    figures = {f"{k}_mb_s": v / 1e6 for k, v in {"send": link.send, **rates}.items()}
    share = SHARE if link.send <= FAST else FAST_SHARE if link.real else LOCAL_SHARE
    aims = {"pull": share, "push": share, "allreduce": share * ALLREDUCE}
    slow = [name for name, rate in rates.items() if rate < aims[name] * link.send]
    wanted = " and ".join(f"{name} {aims[name]:g}" for name in slow)
    remedy = f"of a send's rate {wanted} should be reached: leave a core free, or try another "
    remedy += "transport (MPICH: UCX_TLS; Open MPI: --mca pml, --mca btl)"
    return warn_if(bool(slow), "link", text, remedy, **figures)


def _judge_even(links: Sequence[Link]) -> list[Finding]:
    median = statistics.median(link.send for link in links)
    slow = [link for link in links if link.real and link.send < EVEN * median]
    return [
        warn(
            "link", f"{link.name} carries {link.send / median:.2f} of what the others do",
            "leave that node out (srun --exclude), and tell the administrator",
        )
        for link in slow
    ]  # fmt: skip


def _judge_fabric(links: Sequence[Link], fabric: Mapping[str, float]) -> list[Finding]:
    real = [link.send for link in links if link.real]
    if not real or not fabric:
        return []
    name = max(fabric, key=lambda device: fabric[device])
    reached, nominal = max(real), fabric[name] / 8
    text = f"{name} is for {human_bytes(nominal)}/s, a send reaches {human_bytes(reached)}/s"
    remedy = f"have MPI use {name} (UCX_NET_DEVICES, --mca btl_tcp_if_include), or the "
    remedy += "site's own MPI: mpi4py built against it, instead of a wheel"
    return [warn_if(reached < FABRIC * nominal, "network", text, remedy)]


def judge_clocks(skews: Mapping[str, float]) -> Finding:
    """Judge the differences of the hosts' clocks from rank 0's, in seconds by host."""
    if not skews:
        return ok("clocks", "one host, one clock")
    host = max(skews, key=lambda name: abs(skews[name]))
    most = abs(skews[host])
    text = f"at most {most:.1f} s apart" if most >= 1 else f"at most {most * 1e3:.2f} ms apart"
    text += f", on {host}"
    remedy = "have its clock set by NTP: dates in logs and of files mislead"
    return warn_if(most > SKEW_S, "clocks", text, remedy, skew_s=skews[host])
