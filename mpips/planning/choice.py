"""Choice of codecs by the predicted time of messages.

An **exchange** is a push and a pull of every worker. With g and p for the codecs of pushes and of
pulls it takes ``max(link, pull) + 2 l + work``: the busiest link and the longest pull follow from
`mpips.planning.traffic` (dedicated servers: max(M, n M / k) bytes each way over the link's rate), l
is the latency of a message, and ``work`` is packing and unpacking. A rank that packs drives no
messages, so that work is not hidden. It is the longest of

- a worker's: its remote parameters over the rates of packing by g and of unpacking by p,
- a server's: its shard for each push that comes from other nodes and each reply that it sends
  there,
- a node's: that of all its ranks over its cores.

In a round (`Case.rounds`) the sums of a node are pushed and the results are pulled, each once a
node and by its ranks together; the times of `traffic` add up there.

Computing is not counted: it is not known at the start, and hides messages at best.

Only codecs that do no more than round are chosen: what leaves parts of a gradient for later
(int4, topk, onebit) changes how training converges.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpips.codecs import AUTO
from mpips.config import Config
from mpips.config.names import PULL_CODECS
from mpips.planning import traffic
from mpips.planning.traffic import Case

GAIN = 0.8  # messages have to be so much shorter with codecs for any to be chosen
SHOWN = 3  # predictions that are told


@dataclass(frozen=True)
class Candidate:
    """A codec, as it may be chosen.

    Attributes:
        name: Its name.
        ratio: Bytes on the wire over bytes in memory.
        pack: Bytes in memory that a core packs a second.
        unpack: Likewise, that it unpacks.
    """

    name: str = "none"
    ratio: float = 1.0
    pack: float = math.inf
    unpack: float = math.inf

    def __str__(self) -> str:
        """Return the name and the rates."""
        return f"{self.name} {self.pack / 1e9:.1f}/{self.unpack / 1e9:.1f}"


RAW = Candidate()


@dataclass(frozen=True)
class Speeds:
    """What was measured.

    Attributes:
        bytes_per_s: Of a node's link, each way, both in use.
        latency_s: Of a message between nodes.
        cores: Of each node.
    """

    bytes_per_s: float
    latency_s: float
    cores: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """The codecs of a job, and why.

    Attributes:
        push: Name of the codec of pushes.
        pull: Name of the codec of pulls.
        predicted: Seconds of an exchange by the names of both, the least first.
        lines: What to tell the user.
    """

    push: str
    pull: str
    predicted: dict[tuple[str, str], float]
    lines: tuple[str, ...]

    def applied(self, config: Config) -> Config:
        """Return the configuration with these codecs."""
        return dataclasses.replace(config, codec=self.push, pull_codec=self.pull)


def names(given: str, packable: bool = True) -> tuple[str, ...]:
    """Return the codecs that an option allows, those that lose least first.

    Args:
        given: The option's value.
        packable: Whether what it is about may be packed; else "auto" is none.
    """
    if given != AUTO:
        return (given,)
    return tuple(name for name in PULL_CODECS if name != AUTO) if packable else ("none",)


def packable_pulls(config: Config) -> bool:
    """Return whether pulls may be packed: only an owner packs, and a Get does without it."""
    return config.far_read != "get"


def work_s(case: Case, speeds: Speeds, push: Candidate, pull: Candidate) -> float:
    """Return the seconds of packing and unpacking in an exchange (see the module)."""
    pushes, pulls, node_of = case.pushes, case.pulls, np.array(case.node_of)
    workers, owners = list(case.roles.workers), list(case.roles.owners)
    totals = case.remote * (pushes / push.pack + pulls / pull.unpack)  # of each node
    busy = np.zeros(len(node_of))  # of each rank
    each = case.remote * (1 / push.pack + 1 / pull.unpack)
    each = each / np.maximum(1, case.workers) if case.rounds else each
    busy[workers] = each[node_of[workers]]
    come, go = ((sums.sum() - sums)[node_of[owners]] for sums in (pushes, pulls))
    own = case.shards * (come / push.unpack + go / pull.pack)
    busy[owners] += own
    np.add.at(totals, node_of[owners], own)
    return float(max(busy.max(), (totals / speeds.cores).max()))


def predict(case: Case, speeds: Speeds, push: Candidate, pull: Candidate) -> float:
    """Return the seconds of an exchange.

    Args:
        case: The job, without codecs: what `grads` has beyond 1 goes unpacked behind a gradient.
        speeds: Of its links and cores.
        push: What pushes are packed by.
        pull: What pulls are packed by.
    """
    packed = dataclasses.replace(
        case, grads=push.ratio + case.grads - 1, params=pull.ratio, every=1
    )
    moving = traffic.step_s(packed, speeds.bytes_per_s)
    return moving + 2 * speeds.latency_s + work_s(case, speeds, push, pull)


def choose(
    case: Case, speeds: Speeds, pushes: Sequence[Candidate], pulls: Sequence[Candidate]
) -> Choice:
    """Return the pair that is predicted to be fastest; the first one unless that gains enough.

    Args:
        case: The job, without codecs.
        speeds: Of its links and cores.
        pushes: Codecs of pushes to choose from, those that lose least first.
        pulls: Likewise, of pulls.
    """
    found = {(g.name, p.name): predict(case, speeds, g, p) for g in pushes for p in pulls}
    first = (pushes[0].name, pulls[0].name)
    best = min(found, key=lambda pair: found[pair])  # in a tie, the one that loses least
    taken = best if found[best] < GAIN * found[first] else first
    ordered = dict(sorted(found.items(), key=lambda item: item[1]))
    return Choice(*taken, ordered, _lines(taken, first, ordered, speeds, (*pushes, *pulls)))


def _lines(
    taken: tuple[str, str],
    first: tuple[str, str],
    found: dict[tuple[str, str], float],
    speeds: Speeds,
    candidates: Sequence[Candidate],
) -> tuple[str, ...]:
    rates = ", ".join(dict.fromkeys(str(c) for c in candidates if c.name != "none"))
    mb_s, us = speeds.bytes_per_s / 1e6, 1e6 * speeds.latency_s
    rate = f"{mb_s:,.0f}" if mb_s >= 100 else f"{mb_s:.3g}"
    shown = dict.fromkeys([taken, first, *found])
    times = [f"{1e3 * found[pair]:.3g} by {'/'.join(pair)}" for pair in list(shown)[:SHOWN]]
    why = f"no other is {1 / GAIN - 1:.0%} faster"
    if taken != first:
        why = f"{found[first] / found[taken]:.2g} times as fast as {'/'.join(first)}"
    return (
        f"a node's link carries {rate} MB/s each way, a message takes {us:.0f} us",
        f"a core packs/unpacks GB/s: {rates}",
        f"ms for a push and a pull each, computing apart: {', '.join(times)}",
        f"{chosen(*taken)}: {why}",
    )


def chosen(push: str, pull: str) -> str:
    """Return what was chosen, in words."""
    return f"codecs chosen: pushes {push}, pulls {pull}"


def without(config: Config, why: str) -> Choice:
    """Return the choice where nothing crosses nodes that could be packed."""
    push, pull = (names(given, False)[0] for given in (config.codec, config.pull_codec))
    return Choice(push, pull, {}, (f"{chosen(push, pull)}: {why}",))
