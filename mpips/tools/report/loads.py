"""Figures of time, bytes and staleness, from the summaries of runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import human_bytes
from mpips.tools.report.figures import Figure, Group, Table, number, time_unit, tip
from mpips.tools.report.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bars = Mapping[str, np.ndarray]  # by run: values of bars and their parts, shape (bars, parts)
PARTS = {  # parts of a rank's time, with their colours
    "compute": "#0072b2",
    "pull": "#56b4e9",
    "push": "#009e73",
    "wait": "#e69f00",
    "apply": "#d55e00",
    "rest": "#999999",
}
WAYS = {"sent": "#0072b2", "received": "#e69f00", "pulled": "#56b4e9", "pushed": "#009e73"}
FEW = 6  # with fewer bars, the axis is widened
SHARE = 0.999  # share of updates that the histogram shows


def loads(groups: Sequence[Group]) -> list[Figure]:
    """Return the figures for which the summaries have data."""
    runs = [min(g.runs, key=lambda r: not r.summary) for g in groups if g.shown]
    runs = [run for run in runs if run.summary]
    stale = [group for group in groups if any(_histogram(run).any() for run in group.runs)]
    figures = [_staleness(stale, len(groups) > 1)] if stale else []
    return [*figures, *filter(None, (make(runs) for make in (_workers, _servers, _bytes)))]


def _histogram(run: Record) -> np.ndarray:
    """Return the number of updates by staleness; empty for a run without it, such as in mode sync.

    Shape (longest staleness + 1,).
    """
    staleness = run.summary.get("staleness")
    counts = staleness.get("histogram") if isinstance(staleness, dict) else None
    if not isinstance(counts, list) or run.summary.get("servers") == 0:
        return np.zeros(0)
    return np.array([number(count) or 0.0 for count in counts])


def _staleness(groups: Sequence[Group], several: bool) -> Figure:
    rows, sums = [], []
    for group in groups:
        histograms = [_histogram(run) for run in group.runs]
        longest = max(map(len, histograms))
        total = sum(np.pad(counts, (0, longest - len(counts))) for counts in histograms)
        sums.append(total / max(1.0, np.sum(total)))
        for run, counts in zip(group.runs, histograms, strict=True):
            known: Mapping[str, Any] = run.summary.get("staleness", {}) if counts.any() else {}
            values = [number(known.get(k)) for k in ("mean", "p50", "p99", "max")]
            rows.append((run.name, *values, " ".join(f"{count:.0f}" for count in counts[:32])))
    note = "Of all servers, in the last job of each run. Synchronous updates are never stale."
    heads = ("run", "mean", "median", "p99", "largest", "updates with 0, 1, 2, ...")
    draw = partial(_draw_staleness, groups, sums)
    table = Table(heads, rows)
    return Figure("staleness-histogram", "Staleness of updates", draw, table, note, several)


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


def _rank_times(run: Record) -> Iterator[tuple[str, int | None, list[float]]]:
    """Yield the label, the steps and the seconds by part of each worker, then of each server.

    The parts are in the order of `PARTS`. For a rank that died all are 0.
    """
    whole = number(run.summary.get("train_s")) or 0.0
    for k, row in enumerate(run.part("per_worker")):
        known = [number(row.get(f"{part}_s")) or 0.0 for part in PARTS if part != "rest"]
        rest = max(0.0, whole - sum(known)) if any(known) else 0.0
        yield _label(run, row, "worker", k), row.get("steps"), [*known, rest]
    for k, row in enumerate(run.part("per_server") if number(run.summary.get("servers")) else ()):
        busy = number(row.get("busy_s")) or 0.0
        last = [0.0, 0.0] if row.get("lost") else [busy, max(0.0, whole - busy)]
        yield _label(run, row, "server", k), None, [0.0] * (len(PARTS) - 2) + last


def _workers(runs: Sequence[Record]) -> Figure | None:
    by_run = {run.name: ranks for run in runs if (ranks := list(_rank_times(run)))}
    if not by_run:
        return None
    rows = [(name, rank, n, *t) for name, ranks in by_run.items() for rank, n, t in ranks]
    bars = {name: np.array([times for *_, times in ranks]) for name, ranks in by_run.items()}
    note = "Of training in the last job, a bar a worker, and behind them a bar a server. The rest \
of a worker is evaluation, checkpoints, and the beginning and the end, that of a server all but \
applying. A rank without a bar has died."
    heads = ("run", "rank", "steps", *(f"{part} s" for part in PARTS))
    unit, label = time_unit(max(times.sum(axis=1).max() for times in bars.values()))
    drawn = {name: times / unit for name, times in bars.items()}
    draw = partial(_draw_bars, drawn, PARTS, "workers, then servers", label)
    return Figure("workers", "Where each rank's time went", draw, Table(heads, rows), note)


def _draw_bars(bars: Bars, parts: Mapping[str, str], kind: str, unit: str, axes: "Axes") -> None:
    """Draw a stacked bar for each rank, with the runs side by side.

    One path draws a part of all bars of a run, which keeps the page small.

    Args:
        bars: Values by run.
        parts: Colour of each part, by name.
        kind: Label of the abscissa.
        unit: Unit of the values.
        axes: Axes to draw into.
    """
    from matplotlib.ticker import FixedLocator

    begin, middles = 0, list[float]()
    for name, ranks in bars.items():
        n = len(ranks)
        values = ranks.repeat(2, axis=0)
        values[1::2] = 0  # a gap after each bar
        tops, half = np.cumsum(values, axis=1), 0.43 if n <= 64 else 0.5
        edges = begin + np.append(np.add.outer(np.arange(n), [-half, half]).ravel(), n - half)
        for k, (part, colour) in enumerate(parts.items()):
            filled = axes.stairs(
                tops[:, k], edges, baseline=tops[:, k] - values[:, k], fill=True, color=colour,
                label="_" if begin else part, linewidth=0,
            )  # fmt: skip
            tip(filled, f"{name}: {part} {values[:, k].sum():.3g} {unit}")
        middles.append(begin + (n - 1) / 2)
        begin += n + 1
    margin = max(0.0, FEW - begin) / 2  # keeps a single bar narrow
    axes.set_xlim(-0.7 - margin, begin - 1.3 + margin)
    axes.set_ylabel(unit)
    axes.grid(False, axis="x")
    if len(bars) == 1:
        axes.xaxis.set_major_locator(FixedLocator(range(begin - 1), nbins=8))
        axes.set_xlabel(kind)
    else:
        most = 44 // len(bars)
        named = [name if len(name) <= most else f"...{name[-most:]}" for name in bars]
        axes.set_xticks(middles, named, fontsize=8)
        axes.tick_params(axis="x", length=0)
    if len(parts) > 1:
        axes.figure.legend(loc="outside upper left", ncols=len(parts))


def _servers(runs: Sequence[Record]) -> Figure | None:
    rows = []
    for run in runs:
        whole = number(run.summary.get("train_s")) or math.inf
        for k, row in enumerate(run.part("per_server")):
            busy = number(row.get("busy_s")) or 0.0
            rows.append((run.name, _label(run, row, "owner", k), row.get("bytes"),
                         row.get("applied"), row.get("pushes_dropped"), busy, 100 * busy / whole,
                         number(row.get("staleness_mean"))))  # fmt: skip
    if not rows:
        return None
    note = "Servers; in synchronous modes every rank owns a slice. An owner that is busy for most \
of the time is the bottleneck."
    heads = ("run", "owner", "bytes owned", "applied", "dropped", "busy s", "busy %", "staleness")
    bars = {name: np.array([[row[6]] for row in rows if row[0] == name]) for name, *_ in rows}
    draw = partial(_draw_bars, bars, {"busy": "#0072b2"}, "server", "% of the time")
    return Figure("servers", "Load of each server", draw, Table(heads, rows), note)


def _links(run: Record) -> np.ndarray:
    """Return the bytes that each node sent and received, shape (nodes, 2).

    Only workers count bytes. They exchange them with servers, or in rounds with the owners of
    slices. So each worker's bytes are divided among the owners' nodes by the bytes that they own.
    """
    nodes = run.part("nodes")
    node_of = {rank: k for k, node in enumerate(nodes) for rank in node.get("ranks") or ()}
    owned, moved = np.zeros(len(nodes)), np.zeros((len(nodes), 2))
    for row in run.part("per_server"):
        if (k := node_of.get(row.get("rank", -1))) is not None:
            owned[k] += number(row.get("bytes")) or 0.0
    for row in run.part("per_worker"):
        if (k := node_of.get(row.get("rank", -1))) is not None:
            own = np.array([number(row.get(f"bytes_{w}")) or 0.0 for w in ("sent", "received")])
            others = np.where(np.arange(len(nodes)) == k, 0.0, owned)
            moved[k] += own
            moved += np.outer(others / max(1.0, others.sum()), own[::-1])
    return moved


def _bytes(runs: Sequence[Record]) -> Figure | None:
    """Return the figure of bytes on each node's link, or in memory if no run counts links."""
    rows = list[tuple[Any, ...]]()
    linked, local = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for run in runs:
        whole = [int(number(run.summary.get(f"bytes_{way}")) or 0) for way in WAYS]
        rows.append((run.name, "all", *whole))
        local[run.name] = np.array([[0, 0, *whole[2:]]])
        hosts = [node.get("host", "?") for node in run.part("nodes")]
        if len(hosts) > 1 and any("bytes_sent" in row for row in run.part("per_worker")):
            linked[run.name] = np.pad(_links(run), ((0, 0), (0, 2)))
            for k, (host, moved) in enumerate(zip(hosts, linked[run.name], strict=True)):
                ends = map(int, moved[:2])
                rows.append((run.name, f"link of node {k} ({host})", *ends, None, None))
    title, bars = ("Bytes by link", linked) if linked else ("Bytes moved", local)
    used = [k for k in range(len(WAYS)) if any(each[:, k].any() for each in bars.values())]
    if not used:
        return None
    note = "Whole gradients and replicas, in the last job; no link was crossed that is known of."
    if linked:
        note = "What each node sent to others and had from them, in the last job. Workers count \
it: what they exchange with owners is shared among the nodes of these by what they own."
    colours = dict(list(WAYS.items())[k] for k in used)
    drawn = {name: each[:, used] for name, each in bars.items()}
    draw, table = partial(_draw_bytes, drawn, colours), Table(("run", "where", *WAYS), rows)
    return Figure("bytes", title, draw, table, note)


def _draw_bytes(bars: Bars, parts: Mapping[str, str], axes: "Axes") -> None:
    _draw_bars(bars, parts, "node", "bytes", axes)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.set_ylabel("")
