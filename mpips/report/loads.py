"""Where the time and the bytes of runs went, and how stale gradients were: from their summaries."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import human_bytes
from mpips.report.figures import Figure, Section, Table, time_unit
from mpips.report.groups import Group, number
from mpips.report.record import Record
from mpips.report.svg import tip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {  # of a rank's time: the colour of each
    "compute": "#0072b2",
    "pull": "#56b4e9",
    "push": "#009e73",
    "wait": "#e69f00",
    "apply": "#d55e00",
    "rest": "#999999",
}
WAYS = {"sent": "#0072b2", "received": "#e69f00", "pulled": "#56b4e9", "pushed": "#009e73"}
FEW = 6  # bars
SHARE = 0.999  # of the updates that the histogram shows


def loads(groups: Sequence[Group]) -> Section:
    """Return the figures that summaries have numbers for."""
    section = Section("Where it went")
    runs = [min(g.runs, key=lambda r: not r.summary) for g in groups if g.shown]
    runs = [run for run in runs if run.summary]
    stale = [group for group in groups if any(_histogram(run).any() for run in group.runs)]
    if stale:
        section.figures.append(_staleness(stale, len(groups) > 1))
    for make in (_workers, _servers, _bytes):
        if figure := make(runs):
            section.figures.append(figure)
    return section


def _histogram(run: Record) -> np.ndarray:
    """Return updates by their staleness; empty where a run knows none, as in synchronous modes."""
    found = run.summary.get("staleness")
    counts = found.get("histogram") if isinstance(found, dict) else None
    if not isinstance(counts, list) or run.summary.get("servers") == 0:
        return np.zeros(0)
    return np.array([number(count) or 0.0 for count in counts])


def _staleness(groups: Sequence[Group], several: bool) -> Figure:
    rows, sums = [], []
    for group in groups:
        found = [_histogram(run) for run in group.runs]
        total = np.zeros(max(map(len, found)))
        for counts in found:
            total[: len(counts)] += counts
        sums.append(total / max(1.0, total.sum()))
        for run, counts in zip(group.runs, found, strict=True):
            told: Mapping[str, Any] = run.summary.get("staleness", {}) if counts.any() else {}
            known = [number(told.get(k)) for k in ("mean", "p50", "p99", "max")]
            rows.append((run.name, *known, " ".join(f"{count:.0f}" for count in counts[:32])))
    alt = "Share of updates by staleness. " + "; ".join(
        f"{row[0]}: mean {row[1] or 0:.3g}, 99 % within {row[3] or 0:.0f}" for row in rows[:7]
    )
    note = "Of all servers, in the last job of each run. Synchronous updates are never stale."
    heads = ("run", "mean", "median", "p99", "largest", "updates with 0, 1, 2, ...")
    draw = partial(_draw_staleness, groups, sums)
    return Figure("staleness-histogram", "Staleness of updates", alt, draw,
                  Table(heads, rows), note, several)  # fmt: skip


def _draw_staleness(groups: Sequence[Group], sums: Sequence[np.ndarray], axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    for group, share in zip(groups, sums, strict=True):
        reach = 1 + int(np.searchsorted(np.cumsum(share), SHARE))
        edges = np.arange(len(share[:reach]) + 1) - 0.5
        label = group.label if group.shown and len(groups) > 1 else None
        step = axes.stairs(
            100 * share[:reach], edges, color=group.colour, linestyle=group.dash, label=label,
            fill=len(groups) == 1, linewidth=1.3,
        )  # fmt: skip
        tip(step, group.label)
    axes.set_xlabel("updates that a gradient came too late by")
    axes.set_ylabel("% of updates")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _label(run: Record, row: Mapping[str, Any], kind: str, k: int) -> str:
    rank = row.get("rank")
    return f"{kind} {k}" if rank is None else f"{kind} {k} (rank {rank})"


def _times(row: Mapping[str, Any], whole: float) -> list[float]:
    """Return the parts of a worker's time, the rest last; all 0 where it has died."""
    known = [number(row.get(f"{part}_s")) or 0.0 for part in PARTS if part != "rest"]
    return [*known, max(0.0, whole - sum(known)) if any(known) else 0.0]


def _served(run: Record, whole: float) -> list[tuple[Any, ...]]:
    """Return the label of each server and the parts of its time, the same; all 0 where it died."""
    found = []
    for k, row in enumerate(run.part("per_server") if number(run.summary.get("servers")) else ()):
        times = [0.0] * len(PARTS)
        if not row.get("lost"):
            times[-2] = number(row.get("busy_s")) or 0.0
            times[-1] = max(0.0, whole - times[-2])
        found.append((_label(run, row, "server", k), times))
    return found


def _workers(runs: Sequence[Record]) -> Figure | None:
    bars: list[tuple[str, list[list[float]]]] = []
    rows = []
    for run in runs:
        whole = number(run.summary.get("train_s")) or 0.0
        workers = run.part("per_worker")
        times = [_times(row, whole) for row in workers]
        served = _served(run, whole)
        if times:
            bars.append((run.name, times + [seconds for _, seconds in served]))
        rows += [
            (run.name, _label(run, row, "worker", k), row.get("steps"), *seconds)
            for k, (row, seconds) in enumerate(zip(workers, times, strict=True))
        ]
        rows += [(run.name, label, None, *seconds) for label, seconds in served]
    if not rows:
        return None
    shares = []
    for name, times in bars:
        sums = np.sum(times, axis=0)
        words = zip(PARTS, 100 * sums / max(1e-9, sums.sum()), strict=True)
        shares.append(f"{name}: " + ", ".join(f"{part} {share:.0f} %" for part, share in words))
    note = "Of training in the last job, a bar a worker, and behind them a bar a server. The rest \
of a worker is evaluation, checkpoints, and the beginning and the end, that of a server all but \
applying. A rank without a bar has died."
    heads = ("run", "rank", "steps", *(f"{part} s" for part in PARTS))
    unit, label = time_unit(max((sum(bar) for _, each in bars for bar in each), default=0.0))
    drawn = [(name, [[s / unit for s in bar] for bar in each]) for name, each in bars]
    draw = partial(_draw_bars, drawn, PARTS, "workers, then servers", label)
    title = "Where each rank's time went"
    return Figure("workers", title, ". ".join(shares), draw, Table(heads, rows), note)


def _draw_bars(
    bars: Sequence[tuple[str, Sequence[Sequence[float]]]],
    parts: Mapping[str, str],
    kind: str,
    unit: str,
    axes: "Axes",
) -> None:
    """Draw a stacked bar for each rank, runs beside each other, as one path a part.

    Args:
        bars: For each run its name, and for each rank a value a part.
        parts: The name and colour of each.
        kind: Of what there is a bar.
        unit: Of the values.
        axes: Where.
    """
    begin, ticks = 0, []
    for number_, (name, ranks) in enumerate(bars):
        values = np.asarray(ranks, float).reshape(-1, len(parts)).repeat(2, axis=0)
        values[1::2] = 0  # a gap behind each bar
        n = len(values) // 2
        width = 0.86 if n <= 64 else 1.0
        edges = begin + np.append(np.add.outer(np.arange(n), [0, width]).ravel(), n)
        below = np.zeros(len(values))
        for k, (part, colour) in enumerate(parts.items()):
            label = "_" if number_ else part
            top = below + values[:, k]
            filled = axes.stairs(
                top, edges, baseline=below, fill=True, color=colour, label=label, linewidth=0
            )  # fmt: skip
            tip(filled, f"{name}: {part} {values[:, k].sum():.3g} {unit}")
            below = top
        ticks.append((begin + n / 2, name, begin, n))
        begin += n + 1
    spare = max(0.0, FEW - begin) / 2  # a single bar is not as wide as the figure
    axes.set_xlim(-0.3 - spare, begin - 0.8 + spare)
    axes.set_ylabel(unit)
    axes.grid(False, axis="x")
    _name_ticks(axes, kind, ticks)
    if len(parts) > 1:
        axes.figure.legend(loc="outside upper left", ncols=len(parts))


def _name_ticks(axes: "Axes", kind: str, ticks: Sequence[tuple[float, str, int, int]]) -> None:
    """Name the runs below their bars; of one run, what there is a bar of."""
    if len(ticks) == 1:
        _, _, begin, n = ticks[0]
        step = 1 + n // (16 if n < 100 else 8)
        axes.set_xticks(
            [begin + k + 0.43 for k in range(0, n, step)], [f"{k}" for k in range(0, n, step)]
        )
        axes.set_xlabel(kind)
        return
    most = 44 // len(ticks)
    named = [name if len(name) <= most else f"...{name[-most:]}" for _, name, _, _ in ticks]
    axes.set_xticks([middle for middle, *_ in ticks], named, fontsize=8)
    axes.tick_params(axis="x", length=0)


def _servers(runs: Sequence[Record]) -> Figure | None:
    bars: list[tuple[str, list[list[float]]]] = []
    rows = []
    for run in runs:
        whole = number(run.summary.get("train_s")) or 0.0
        shares = []
        for k, row in enumerate(run.part("per_server")):
            busy = number(row.get("busy_s")) or 0.0
            shares.append([100 * busy / whole if whole else 0.0])
            rows.append((run.name, _label(run, row, "owner", k), row.get("bytes"),
                         row.get("applied"), row.get("pushes_dropped"), busy, shares[-1][0],
                         number(row.get("staleness_mean"))))  # fmt: skip
        if shares:
            bars.append((run.name, shares))
    if not rows:
        return None
    alt = "Share of the training time that each owner of parameters was busy applying. "
    alt += "; ".join(
        f"{name}: {', '.join(f'{share:.0f} %' for (share,) in shares[:8])}" for name, shares in bars
    )
    note = "Servers; in synchronous modes every rank owns a slice. An owner that is busy for most \
of the time is the bottleneck."
    heads = ("run", "owner", "bytes owned", "applied", "dropped", "busy s", "busy %", "staleness")
    return Figure("servers", "Load of each server", alt,
                  partial(_draw_bars, bars, {"busy": "#0072b2"}, "server", "% of the time"),
                  Table(heads, rows), note)  # fmt: skip


def _nodes(run: Record) -> list[tuple[str, set[int]]]:
    return [
        (f"{k} ({node.get('host', '?')})", set(node.get("ranks") or ()))
        for k, node in enumerate(run.part("nodes"))
    ]


def _links(run: Record, nodes: Sequence[tuple[str, set[int]]]) -> list[list[float]]:
    """Return the bytes that each node sent and received.

    Workers count them. In asynchronous modes the other ends are the servers, which do not.
    """
    node_of = {rank: k for k, (_, ranks) in enumerate(nodes) for rank in ranks}
    owned, moved = np.zeros(len(nodes)), np.zeros((len(nodes), 2))
    for row in run.part("per_server") if number(run.summary.get("servers")) else ():
        if (k := node_of.get(row.get("rank", -1))) is not None:
            owned[k] += number(row.get("bytes")) or 0.0
    for row in run.part("per_worker"):
        if (k := node_of.get(row.get("rank", -1))) is not None:
            mine = np.array([number(row.get(f"bytes_{w}")) or 0.0 for w in ("sent", "received")])
            others = np.where(np.arange(len(nodes)) == k, 0.0, owned)
            moved[k] += mine
            moved += np.outer(others / max(1.0, others.sum()), mine[::-1])
    found: list[list[float]] = moved.tolist()
    return found


def _bytes(runs: Sequence[Record]) -> Figure | None:
    """Return the figure of bytes: over each node's link, or in memory where there is one node."""
    rows: list[tuple[Any, ...]] = []
    linked: list[tuple[str, list[list[float]]]] = []
    local: list[tuple[str, list[list[float]]]] = []
    for run in runs:
        whole = [number(run.summary.get(f"bytes_{way}")) or 0.0 for way in WAYS]
        rows.append((run.name, "all", *map(int, whole)))
        local.append((run.name, [[0.0, 0.0, *whole[2:]]]))
        workers, nodes = run.part("per_worker"), _nodes(run)
        if len(nodes) < 2 or not any("bytes_sent" in row for row in workers):
            continue
        linked.append((run.name, []))
        for (name, _), moved in zip(nodes, _links(run, nodes), strict=True):
            rows.append((run.name, f"link of node {name}", *map(int, moved), None, None))
            linked[-1][1].append([*moved, 0.0, 0.0])
    if not rows:
        return None
    bars, title = (linked, "Bytes by link") if linked else (local, "Bytes moved")
    note = (
        "What each node sent to others and had from them, in the last job. Workers count it: what \
they exchange with servers is shared among the nodes of these by what they own."
        if linked
        else "Whole gradients and replicas, in the last job; no link was crossed that is known of."
    )
    alt = f"{title}. " + "; ".join(
        f"{row[0]}, {row[1]}: sent {human_bytes(row[2])}, received {human_bytes(row[3])}"
        for row in rows[:8]
    )
    used = {w: c for k, (w, c) in enumerate(WAYS.items())
            if any(bar[k] for _, each in bars for bar in each)}  # fmt: skip
    if not used:
        return None
    keep = [k for k, way in enumerate(WAYS) if way in used]
    drawn = [(name, [[bar[k] for k in keep] for bar in each]) for name, each in bars]
    heads = ("run", "where", *WAYS)
    return Figure("bytes", title, alt, partial(_draw_bytes, drawn, used), Table(heads, rows), note)


def _draw_bytes(
    bars: Sequence[tuple[str, Sequence[Sequence[float]]]], parts: Mapping[str, str], axes: "Axes"
) -> None:
    _draw_bars(bars, parts, "node", "bytes", axes)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.set_ylabel("")
