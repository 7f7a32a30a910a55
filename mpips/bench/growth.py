"""The scaling table: times with their fits, how they grow, and whether that is within bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mpips.bench.fit import Line, fit_line, power
from mpips.bench.measure import aligned, bytes_text, significant
from mpips.bench.points import Memory, Points, Series, by_series

POWER = 1.25  # of the workers, at most: 1 is linear, the rest is for what scatters
SPARE_BYTES, SPARE = 2_000_000, 1.1  # within which a server's memory counts as the same
MB = 1e6
HEAD = ("mode", "hosts", "ranks", "servers")

Found: TypeAlias = Mapping[Series, Mapping[int, float]]  # seconds by size


def text(points: Points) -> str:
    """Return all tables, and the two verdicts."""
    found = by_series(points.times)
    parts = [
        "ms per step, in which every worker makes one",
        times_table(found),
        "",
        "ms per step as a fixed part and one for each MB, fitted",
        fits_table(found),
        "",
        "growth with the number of workers, w",
        growth_table(grown(found)),
        "",
        "MB in use by a server beyond its shard, 1 server",
        memory_table(points.memory),
        "",
        *(f"left out: {note}" for note in points.left_out),
    ]
    verdicts = ["not judged: small sizes in few repeats"] if points.quick else judge(points)
    return "\n".join([*parts, *verdicts])


def times_table(found: Found) -> str:
    """Return a line for each series: its times at each size."""
    sizes = sorted({size for times in found.values() for size in times})
    rows = [[*HEAD, *map(bytes_text, sizes)]]
    for series, times in found.items():
        shown = (significant(times[size] * 1e3) if size in times else "" for size in sizes)
        rows.append([*_world(series), *shown])
    return aligned(rows, range(1, len(rows[0])))


def fits_table(found: Found) -> str:
    """Return a line for each series of several sizes: its parts, and how far off they are."""
    rows = [[*HEAD, "fixed", "per MB", "per MB and worker", "off by at most"]]
    for series, times in found.items():
        line = fit_line(list(times), list(times.values()))
        if line:
            per_mb = line.per_byte_s * MB * 1e3
            parts = line.fixed_s * 1e3, per_mb, per_mb / series.workers
            rows.append([*_world(series), *map(significant, parts), f"x {line.worst:.2f}"])
    return aligned(rows, range(1, len(rows[0])))


def _world(series: Series) -> list[str]:
    return [series.mode, *map(str, (series.hosts, series.ranks, series.servers))]


@dataclass(frozen=True)
class Growth:
    """How the parts of a step grow with the workers, all else the same.

    Attributes:
        case: What is the same.
        workers: Numbers of workers, increasing.
        fixed: Power of the number of workers by which the fixed part grows, None if it is 0.
        per_byte: The same of the part per byte.
    """

    case: str
    workers: tuple[int, ...]
    fixed: float | None
    per_byte: float | None

    @property
    def most(self) -> float:
        """The larger of the two powers."""
        return max(p for p in (self.fixed, self.per_byte, 0.0) if p is not None)


def grown(found: Found) -> list[Growth]:
    """Return how the parts of a step grow, for all that was measured with several counts.

    Worlds in which ranks share cores are not compared to others: there, a rank that waits gives
    its core away, which has its price whatever their number. Nor is a round of one rank, which
    waits for nobody.
    """
    groups: dict[Series, dict[int, Line]] = {}
    for series, times in found.items():
        line = fit_line(list(times), list(times.values()))
        if line and series.ranks > 1:
            groups.setdefault(series._replace(ranks=0), {})[series.workers] = line
    growths = []
    for group, lines in groups.items():
        counts = sorted(lines)
        if len(counts) > 1:
            fixed = power(counts, [lines[w].fixed_s for w in counts])
            per_byte = power(counts, [lines[w].per_byte_s for w in counts])
            growths.append(Growth(_case(group), tuple(counts), fixed, per_byte))
    return growths


def _case(group: Series) -> str:
    words = [group.mode, _count(group.hosts, "host")]
    words += [_count(group.servers, "server")] * bool(group.servers)
    words += ["ranks share cores"] * group.crowded
    return ", ".join(words)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def growth_table(found: Sequence[Growth]) -> str:
    """Return a line for each."""
    rows = [["case", "workers", "fixed", "per byte"]]
    for one in found:
        powers = ["-" if p is None else f"w^{p:.2f}" for p in (one.fixed, one.per_byte)]
        rows.append([one.case, " ".join(map(str, one.workers)), *powers])
    return aligned(rows, (2, 3))


def memory_table(memory: Sequence[Memory]) -> str:
    """Return a line for each number of hosts and way of pushing, at the largest size."""
    alone = [m for m in memory if m.servers == 1]
    counts = sorted({m.workers for m in alone})
    rows = [["pushes by", "hosts", "parameters", *(_count(w, "worker") for w in counts)]]
    for way, hosts in sorted({(m.way, m.hosts) for m in alone}):
        these = [m for m in alone if (m.way, m.hosts) == (way, hosts)]
        size = max(m.size for m in these)
        used = {m.workers: f"{m.beyond / MB:.1f}" for m in these if m.size == size}
        rows.append([way, str(hosts), bytes_text(size), *(used.get(w, "") for w in counts)])
    return aligned(rows, range(1, len(rows[0])))


def judge(points: Points) -> list[str]:
    """Return a line for each of the two conditions: ok, MISSED, or that nothing was compared."""
    return [_judge_times(grown(by_series(points.times))), _judge_memory(points.memory)]


def _judge_times(found: Sequence[Growth]) -> str:
    what = f"no part of a step grows faster than linearly with the workers (w^{POWER:g} at most)"
    if not found:
        return f"{what}: not checked, for want of worlds to compare"
    worst = max(found, key=lambda one: one.most)
    verdict = "ok" if worst.most <= POWER else "MISSED"
    return f"{what}: {verdict}, w^{worst.most:.2f} in {worst.case}"


def _judge_memory(memory: Sequence[Memory]) -> str:
    spare = f"{SPARE_BYTES / MB:g} MB + {SPARE - 1:.0%}"
    what = f"the memory of a server does not grow with the workers ({spare} at most)"
    pairs = []
    for least in memory:
        same = [m for m in memory if _comparable(m) == _comparable(least)]
        if least.workers == min(m.workers for m in same):
            pairs += [(least, m) for m in same if m.workers > least.workers]
    if not pairs:
        return f"{what}: not checked, for want of worlds to compare"
    least, most = max(pairs, key=lambda pair: pair[1].beyond - _allowed(pair[0]))
    verdict = "ok" if most.beyond <= _allowed(least) else "MISSED"
    figures = f"{least.beyond / MB:.1f} MB beyond its shard with {_count(least.workers, 'worker')}"
    figures += f", {most.beyond / MB:.1f} MB with {most.workers}"
    return f"{what}: {verdict}, {figures} ({bytes_text(most.size)}, pushes by {most.way})"


def _comparable(m: Memory) -> tuple[object, ...]:
    return m.hosts, m.way, m.servers, m.size


def _allowed(least: Memory) -> float:
    return least.beyond * SPARE + SPARE_BYTES
