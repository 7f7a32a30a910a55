"""Judgement of links between hosts, and of their clocks."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpips.errors import human_bytes
from mpips.tools.doctor.finding import Finding, ok, warn, warn_if

LINKS_MAX = 8
FAST = 300e6  # bytes a second of a send, above which processors are the limit
SHARE, FAST_SHARE = 0.5, 0.1  # of a send's rate; of that of a fast one
LOCAL_SHARE = 0.02  # of one within a host, where ranks may have to share cores
EVEN = 0.5  # of the median of all links
ALLREDUCE = 0.5  # of these shares: a vector goes both ways, often one after the other
FABRIC = 0.2  # of what the fastest device says of itself
SKEW_S = 1.0


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
    text = f"{name} is for {human_bytes(said)}/s, a send reaches {human_bytes(reached)}/s"
    remedy = f"have MPI use {name} (UCX_NET_DEVICES, --mca btl_tcp_if_include), or the "
    remedy += "site's own MPI: mpi4py built against it, instead of a wheel"
    return [warn_if(reached < FABRIC * said, "network", text, remedy)]


def judge_clocks(skews: Mapping[str, float]) -> Finding:
    """Judge the seconds by which the clocks of other hosts are ahead of rank 0's."""
    if not skews:
        return ok("clocks", "one host, one clock")
    host = max(skews, key=lambda name: abs(skews[name]))
    most = abs(skews[host])
    text = f"at most {most:.1f} s apart" if most >= 1 else f"at most {most * 1e3:.2f} ms apart"
    text += f", on {host}"
    remedy = "have its clock set by NTP: dates in logs and of files mislead"
    return warn_if(most > SKEW_S, "clocks", text, remedy, skew_s=skews[host])
