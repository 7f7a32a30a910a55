"""Choice of codecs by the predicted time of messages.

An **exchange** is a push and a pull by every worker. Let g be the codec of pushes, and p the codec
of pulls. Then an exchange takes ``max(link, pull) + 2 l + work``. `mpips.planning.traffic` yields
the times of the busiest link and of the longest pull. With dedicated servers, a link carries max(M,
n M / k) bytes each way. l is the latency of a message, and ``work`` the time for packing and
unpacking. A rank that packs makes no progress on messages, so nothing hides this time. ``work`` is
the longest of

- a worker's work: its remote parameters, divided by the rates of packing by g and of unpacking by
  p,
- a server's work: its shard, for each push from other nodes and for each response to them,
- a node's work: the work of all its ranks, divided by its cores.

In a round (`Case.rounds`), each node pushes its sum once and pulls the results once; its ranks
share this work. The times of `traffic` add up.

Computing does not count: it is unknown at the start, and can only hide messages.

Only codecs that round numbers are chosen. Codecs that defer parts of a gradient (int4, topk,
onebit) change convergence.
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

GAIN = 0.8  # a codec is chosen only if messages take at most this share of their time without
SHOWN = 3  # number of predictions shown


@dataclass(frozen=True)
class Candidate:
    """A codec to choose from.

    Attributes:
        name: Name of the codec.
        ratio: Bytes on the wire, divided by bytes in memory.
        pack: Bytes in memory that a core packs per second.
        unpack: Bytes in memory that a core unpacks per second.
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
    """Measured speeds of links and nodes.

    Attributes:
        bytes_per_s: Rate of a node's link each way, if both directions are busy.
        latency_s: Latency of a message between nodes.
        cores: Number of cores of each node.
    """

    bytes_per_s: float
    latency_s: float
    cores: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """Chosen codecs of a job, and the reason.

    Attributes:
        push: Name of the codec of pushes.
        pull: Name of the codec of pulls.
        predicted: Seconds of an exchange for each pair of names, in increasing order.
        lines: Lines for the user.
    """

    push: str
    pull: str
    predicted: dict[tuple[str, str], float]
    lines: tuple[str, ...]

    def applied(self, config: Config) -> Config:
        """Return the configuration with these codecs."""
        return dataclasses.replace(config, codec=self.push, pull_codec=self.pull)


def names(given: str, packable: bool = True) -> tuple[str, ...]:
    """Return the codecs that an option allows, in order of increasing error.

    Args:
        given: Value of the option.
        packable: Whether these messages can be packed; if not, "auto" means "none".
    """
    if given != AUTO:
        return (given,)
    return tuple(name for name in PULL_CODECS if name != AUTO) if packable else ("none",)


def packable_pulls(config: Config) -> bool:
    """Return whether pulls can be packed: an owner packs them, but MPI_Get does not involve it."""
    return config.far_read != "get"


def work_s(case: Case, speeds: Speeds, push: Candidate, pull: Candidate) -> float:
    """Return the seconds for packing and unpacking in an exchange; see the module."""
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
    """Return the predicted seconds of an exchange.

    Args:
        case: The job without codecs. If `grads` exceeds 1, that part follows a gradient unpacked.
        speeds: Speeds of links and nodes.
        push: Codec of pushes.
        pull: Codec of pulls.
    """
    packed = dataclasses.replace(
        case, grads=push.ratio + case.grads - 1, params=pull.ratio, every=1
    )
    moving = traffic.step_s(packed, speeds.bytes_per_s)
    return moving + 2 * speeds.latency_s + work_s(case, speeds, push, pull)


def choose(
    case: Case, speeds: Speeds, pushes: Sequence[Candidate], pulls: Sequence[Candidate]
) -> Choice:
    """Return the pair of codecs with the shortest predicted time.

    If the gain is too small, return the first pair.

    Args:
        case: The job without codecs.
        speeds: Speeds of links and nodes.
        pushes: Codecs of pushes to choose from, in order of increasing error.
        pulls: Codecs of pulls, in the same order.
    """
    times = {(g.name, p.name): predict(case, speeds, g, p) for g in pushes for p in pulls}
    first = (pushes[0].name, pulls[0].name)
    best = min(times, key=lambda pair: times[pair])  # if equal, the smaller error
    best_pair = best if times[best] < GAIN * times[first] else first
    ordered = dict(sorted(times.items(), key=lambda item: item[1]))
    return Choice(*best_pair, ordered, _lines(best_pair, first, ordered, speeds, (*pushes, *pulls)))


def _lines(
    chosen_pair: tuple[str, str],
    first: tuple[str, str],
    times_s: dict[tuple[str, str], float],
    speeds: Speeds,
    candidates: Sequence[Candidate],
) -> tuple[str, ...]:
    rates = ", ".join(dict.fromkeys(str(c) for c in candidates if c.name != "none"))
    mb_s, us = speeds.bytes_per_s / 1e6, 1e6 * speeds.latency_s
    rate = f"{mb_s:,.0f}" if mb_s >= 100 else f"{mb_s:.3g}"
    shown = dict.fromkeys([chosen_pair, first, *times_s])
    times = [f"{1e3 * times_s[pair]:.3g} by {'/'.join(pair)}" for pair in list(shown)[:SHOWN]]
    why = f"no other is {1 / GAIN - 1:.0%} faster"
    if chosen_pair != first:
        why = f"{times_s[first] / times_s[chosen_pair]:.2g} times as fast as {'/'.join(first)}"
    return (
        f"a node's link carries {rate} MB/s each way, a message takes {us:.0f} us",
        f"a core packs/unpacks GB/s: {rates}",
        f"ms for a push and a pull each, computing apart: {', '.join(times)}",
        f"{chosen(*chosen_pair)}: {why}",
    )


def chosen(push: str, pull: str) -> str:
    """Return the choice as text."""
    return f"codecs chosen: pushes {push}, pulls {pull}"


def without(config: Config, why: str) -> Choice:
    """Return the choice for a job without messages that can be packed.

    Args:
        config: The job.
        why: Reason, for the user.
    """
    push, pull = (names(given, False)[0] for given in (config.codec, config.pull_codec))
    return Choice(push, pull, {}, (f"{chosen(push, pull)}: {why}",))
