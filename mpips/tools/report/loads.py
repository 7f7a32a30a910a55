"""Figures of time, bytes and staleness, from the summaries of runs."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import human_bytes
from mpips.tools.report.figures import Figure, Group, Section, Table, number, time_unit, tip
from mpips.tools.report.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bars = Mapping[str, np.ndarray]  # by run: a value for each bar and part, shape (bars, parts)
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
    runs = [min(g.runs, key=lambda r: not r.summary) for g in groups if g.shown]
    runs = [run for run in runs if run.summary]
    stale = [group for group in groups if any(_histogram(run).any() for run in group.runs)]
    figures = [_staleness(stale, len(groups) > 1)] if stale else []
    figures += filter(None, (make(runs) for make in (_workers, _servers, _bytes)))
    return Section("Where it went", figures)


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


def _rank_times(run: Record) -> Iterator[tuple[str, int | None, list[float]]]:
    """Yield the label, the steps and the parts of the time of each worker, then of each server.

    The rest is the last part. All are 0 where the rank has died.
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
    found = {run.name: list(_rank_times(run)) for run in runs}
    rows = [(name, rank, n, *t) for name, ranks in found.items() for rank, n, t in ranks]
    if not rows:
        return None
    bars = {
        name: np.array([times for *_, times in ranks]) for name, ranks in found.items() if ranks
    }
    shares = []
    for name, times in bars.items():
        percents = 100 * times.sum(axis=0) / max(1e-9, times.sum())
        words = zip(PARTS, percents, strict=True)
        shares.append(f"{name}: " + ", ".join(f"{part} {share:.0f} %" for part, share in words))
    note = "Of training in the last job, a bar a worker, and behind them a bar a server. The rest \
of a worker is evaluation, checkpoints, and the beginning and the end, that of a server all but \
applying. A rank without a bar has died."
    heads = ("run", "rank", "steps", *(f"{part} s" for part in PARTS))
    unit, label = time_unit(max(times.sum(axis=1).max() for times in bars.values()))
    drawn = {name: times / unit for name, times in bars.items()}
    draw = partial(_draw_bars, drawn, PARTS, "workers, then servers", label)
    title = "Where each rank's time went"
    return Figure("workers", title, ". ".join(shares), draw, Table(heads, rows), note)


def _draw_bars(bars: Bars, parts: Mapping[str, str], kind: str, unit: str, axes: "Axes") -> None:
    """Draw a stacked bar for each rank, runs beside each other, as one path a part.

    Args:
        bars: Of each run.
        parts: The name and colour of each.
        kind: Of what there is a bar.
        unit: Of the values.
        axes: Where.
    """
    begin, ticks = 0, []
    for number_, (name, ranks) in enumerate(bars.items()):
        values = ranks.repeat(2, axis=0)
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
    bars, rows = dict[str, np.ndarray](), []
    for run in runs:
        whole = number(run.summary.get("train_s")) or 0.0
        shares = list[float]()
        for k, row in enumerate(run.part("per_server")):
            busy = number(row.get("busy_s")) or 0.0
            shares.append(100 * busy / whole if whole else 0.0)
            rows.append((run.name, _label(run, row, "owner", k), row.get("bytes"),
                         row.get("applied"), row.get("pushes_dropped"), busy, shares[-1],
                         number(row.get("staleness_mean"))))  # fmt: skip
        if shares:
            bars[run.name] = np.array(shares)[:, None]
    if not rows:
        return None
    alt = "Share of the training time that each owner of parameters was busy applying. "
    alt += "; ".join(
        f"{name}: {', '.join(f'{share:.0f} %' for share in shares[:8, 0])}"
        for name, shares in bars.items()
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


def _links(run: Record, nodes: Sequence[tuple[str, set[int]]]) -> np.ndarray:
    """Return the bytes that each node sent and received, shape (nodes, 2).

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
    return moved


def _bytes(runs: Sequence[Record]) -> Figure | None:
    """Return the figure of bytes: over each node's link, or in memory where there is one node."""
    rows: list[tuple[Any, ...]] = []
    linked, local = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for run in runs:
        whole = [number(run.summary.get(f"bytes_{way}")) or 0.0 for way in WAYS]
        rows.append((run.name, "all", *map(int, whole)))
        local[run.name] = np.array([[0.0, 0.0, *whole[2:]]])
        nodes = _nodes(run)
        if len(nodes) < 2 or not any("bytes_sent" in row for row in run.part("per_worker")):
            continue
        moved = _links(run, nodes)
        linked[run.name] = np.pad(moved, ((0, 0), (0, 2)))
        names = [f"link of node {name}" for name, _ in nodes]
        rows += [
            (run.name, name, *map(int, m), None, None) for name, m in zip(names, moved, strict=True)
        ]
    bars, title = (linked, "Bytes by link") if linked else (local, "Bytes moved")
    used = [k for k in range(len(WAYS)) if any(each[:, k].any() for each in bars.values())]
    if not used:
        return None
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
    colours = dict(list(WAYS.items())[k] for k in used)
    drawn = {name: each[:, used] for name, each in bars.items()}
    draw, table = partial(_draw_bytes, drawn, colours), Table(("run", "where", *WAYS), rows)
    return Figure("bytes", title, alt, draw, table, note)


def _draw_bytes(bars: Bars, parts: Mapping[str, str], axes: "Axes") -> None:
    _draw_bars(bars, parts, "node", "bytes", axes)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.set_ylabel("")
