"""Figures of measured values and events over the course of runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpips.tools.report.curves import band
from mpips.tools.report.figures import Figure, Group, Table, engineered, time_unit, tip
from mpips.tools.report.record import MEASURES, RATE, Event, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line: TypeAlias = tuple[np.ndarray, np.ndarray]
AXES = ("time", "samples", "updates")
DECADES = 50.0  # a logarithmic axis with a smaller ratio labels more than the powers of ten
LANES, CHECKPOINTS = 12, 400  # most runs in the figure of events, and most checkpoints of a run
MARKS: dict[str, tuple[str, str]] = {  # marker and colour of each kind of event
    "checkpoint": ("|", "#000000"),
    "resumed": (">", "#009e73"),
    "stop": ("s", "#e69f00"),
    "warning": ("^", "#cc79a7"),
    "death": ("X", "#d55e00"),
    "failure": ("D", "#d55e00"),
}
ON_CURVES = ("resumed", "stop", "death", "failure")
NOTES = {
    "training loss": "Mean over the batches since the line before.",
    "staleness": "Updates that a gradient came too late by at server 0: mean since the line "
    "before.",
    RATE: "Trained on between two lines of a job.",
}
BY_TIME = (RATE, "staleness")


def curves(groups: Sequence[Group]) -> list[Figure]:
    """Return the figures of measured values, one for each abscissa."""
    runs = [run for group in groups for run in group.runs]
    names = [name for name in (*MEASURES.values(), RATE) if any(name in r.curves for r in runs)]
    return [
        _Plot(groups, name, axis).figure("" if name in BY_TIME else axis, len(groups) > 1)
        for name in names
        for axis in (AXES if name not in BY_TIME else ("time",))
    ]


def _unit(groups: Sequence[Group], axis: str) -> tuple[float, str]:
    """Return the unit of an abscissa, in seconds for times, and its label."""
    if axis != "time":
        return 1.0, axis
    last = max((job[1] for g in groups for run in g.runs for job in run.jobs), default=0.0)
    return time_unit(last)


class _Plot:
    """Plot of one measure against one abscissa.

    Args:
        groups: All groups. Groups without the measure are left out.
        measure: Name of the curves.
        axis: Abscissa, one of `AXES`.
    """

    def __init__(self, groups: Sequence[Group], measure: str, axis: str) -> None:
        self._groups = [g for g in groups if any(measure in run.curves for run in g.runs)]
        self._runs = [r for g in self._groups for r in g.runs if measure in r.curves]
        self._measure, self._axis = measure, axis
        self._unit, self._label = _unit(self._groups, axis)

    def figure(self, against: str, several: bool) -> Figure:
        """Return the figure.

        Args:
            against: See `Figure.against`.
            several: Whether the report has several groups.
        """
        word = self._measure[0].upper() + self._measure[1:]
        name = f"{self._measure}-{self._axis}".replace(" ", "-").replace("/", "-per-")
        note = NOTES.get(self._measure, "")
        return Figure(name, word, self._draw, self._table(), note, several, against)

    def _table(self) -> Table:
        """Return the first, lowest, highest and last value of each run."""
        rows = []
        for run in self._runs:
            points = run.curves[self._measure].points
            values, last = points.value, points[-1]
            ends = float(np.fmin.reduce(values)), float(np.fmax.reduce(values))
            rows.append((run.name, len(values), float(values[0]), *ends, last.value, last.seconds,
                         last.updates))  # fmt: skip
        heads = ("run", "lines", "first", "lowest", "highest", "last", "at s", "at update")
        return Table(heads, rows)

    def _line(self, run: Record, points: Any, gaps: bool = False) -> Line:
        """Return abscissae and values of points with a known abscissa, shapes (n,).

        With `gaps`, a NaN separates the points of two jobs.
        """
        abscissae = {"time": points.seconds, "samples": run.samples_at(points)}
        x = abscissae.get(self._axis, points.updates) / self._unit
        known = np.isfinite(x)
        x, y, seconds = x[known], points.value[known], points.seconds[known]
        begins = [begin for begin, _ in run.jobs[1:]] if gaps else []
        at = np.searchsorted(seconds, begins, "right")
        return np.insert(x, at, np.nan), np.insert(y, at, np.nan)

    def _draw(self, axes: "Axes") -> None:
        for group in sorted(self._groups, key=lambda group: group.shown):  # coloured groups on top
            style: dict[str, Any] = {"color": group.colour, "linestyle": group.dash}
            style |= {"label": group.label} if group.shown else {"linewidth": 0.7, "alpha": 0.5}
            runs = [run for run in group.runs if self._measure in run.curves]
            if len(runs) > 1:
                lines = [self._line(run, run.curves[self._measure].smooth) for run in runs]
                line = _draw_band(axes, group, lines, style)
            else:
                line = self._draw_run(axes, group, runs[0], style)
            tip(line, group.label)
        values = [run.curves[self._measure].points.value for run in self._runs]
        lowest = np.fmin.reduce(np.concatenate(values))
        if "loss" in self._measure and lowest > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(partial(_between, axes))
        else:
            axes.yaxis.set_major_formatter(engineered)
        _finish(axes, self._label)

    def _draw_run(self, axes: "Axes", group: Group, run: Record, style: dict[str, Any]) -> Any:
        """Draw a run, and return its line, for a long curve through means over all faint points."""
        curve = run.curves[self._measure]
        if group.shown and curve.is_long:
            faint = self._line(run, curve.points, gaps=True)
            axes.plot(*faint, color=group.colour, alpha=0.3, linewidth=0.5)
        marker, smooth = "." if curve.count == 1 else "", curve.smooth
        (line,) = axes.plot(*self._line(run, smooth, gaps=True), marker=marker, **style)
        if self._axis == "time" and group.shown:
            _mark_curve(axes, run, *self._line(run, smooth), self._unit)
        return line


def _draw_band(axes: "Axes", group: Group, lines: Sequence[Line], style: dict[str, Any]) -> Any:
    """Draw the lowest to highest values of several seeds; returns the line of their median."""
    x, low, mid, high = band([(x, y) for x, y in lines if x.size] or [(np.zeros(1), np.zeros(1))])
    if group.shown:
        axes.fill_between(x, low, high, color=group.colour, alpha=0.18, linewidth=0)
    (line,) = axes.plot(x, mid, **style)
    return line


def _mark_curve(axes: "Axes", run: Record, x: np.ndarray, y: np.ndarray, unit: float) -> None:
    """Mark the events of a run on its curve."""
    for event in run.events if x.size else ():
        if event.kind in ON_CURVES:
            k = max(0, int(np.searchsorted(x, event.seconds / unit, "right")) - 1)
            _mark(
                axes, event, event.seconds / unit, y[k], run.name, markersize=5, markeredgewidth=0
            )


def _mark(axes: "Axes", event: Event, x: float, y: float, name: str, **style: Any) -> None:
    marker, colour = MARKS[event.kind]
    (point,) = axes.plot(x, y, marker, color=colour, linestyle="none", **style)
    tip(point, f"{name}: {event.text}")


def _between(axes: "Axes", value: float, _: object) -> str:
    """Return the label of a tick between powers of ten; empty on an axis of many decades."""
    low, high = axes.get_ylim()
    labelled = high < DECADES * low and f"{value:e}"[0] in "25"
    return f"{value:g}" if labelled else ""


def _finish(axes: "Axes", label: str) -> None:
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    if label in AXES:
        axes.xaxis.set_major_formatter(engineered)


def events(groups: Sequence[Group]) -> Figure:
    """Return the figure of jobs and events, with a lane for each run."""
    runs = [run for group in groups if group.shown for run in group.runs][:LANES]
    rows = [
        (run.name, e.kind, e.seconds, e.updates, e.text)
        for run in runs
        for e in (*run.events, *_checkpoints(run)[-1:])
    ]
    note = "Bars are jobs, one after the other, without pauses and without the start of ranks."
    table = Table(("run", "what", "at s", "at update", "text"), rows)
    draw: Callable[[Axes], None] = partial(_draw_events, runs, *_unit(groups, "time"))
    return Figure("events", "Jobs, and what happened to them", draw, table, note)


def _checkpoints(run: Record) -> list[Event]:
    """Return the newest checkpoint of a run, and at most `CHECKPOINTS` of the older ones."""
    count, points = run.checkpoints.count, run.checkpoints.points
    return [
        Event("checkpoint", p.seconds, p.updates, f"update {p.updates:.0f}, of {count} checkpoints")
        for p in points[:: -(1 + count // CHECKPOINTS)][::-1]
    ]


def _draw_events(runs: Sequence[Record], unit: float, label: str, axes: "Axes") -> None:
    named = set[str]()
    for lane, run in enumerate(runs):
        for begin, end in run.jobs:
            bar = axes.barh(
                lane, (end - begin) / unit, left=begin / unit, height=0.5, color="#56b4e9",
                alpha=0.45, edgecolor="none",
            )[0]  # fmt: skip
            tip(bar, f"{run.name}: {end - begin:.1f} s")
        for event in (*run.events, *_checkpoints(run)):
            if event.kind in MARKS:
                entry = "_" if event.kind in named else event.kind  # in the legend
                at = event.seconds / unit
                _mark(axes, event, at, lane, event.kind, markersize=7, label=entry)
                named.add(event.kind)
    axes.set_yticks(range(len(runs)), [run.name[-16:] for run in runs])
    axes.set_ylim(max(3, len(runs)) - 0.4, -0.6)
    axes.grid(False, axis="y")
    _finish(axes, label)
    if named:
        axes.figure.legend(loc="outside upper left", ncols=3)
