"""The picture of the scaling table: time of a step over the size, with the fits."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpips.bench.fit import fit_line
from mpips.bench.measure import bytes_text
from mpips.bench.points import Points, Series, by_series
from mpips.report.drawing import COLOURS, MARKERS, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "async": "asynchronous: pull, compute, push; 1 server",
    "sync": "synchronous: one round",
}
TICKS = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
BENDS = 24  # of a line that is straight on linear axes only


def draw(points: Points, path: Path) -> None:
    """Draw the times of the worlds with one server, and of all rounds, each mode beside the other.

    Args:
        points: At least one.
        path: Of the picture; its ending says of which kind.
    """
    found = {s: t for s, t in by_series(points.times).items() if s.servers <= 1}
    ranks = sorted({series.ranks for series in found})
    modes = [mode for mode in TITLES if any(s.mode == mode for s in found)]
    with drawing(path, len(modes), (0.8 + 4.2 * len(modes), 3.9)) as panels:
        for axes, mode in zip(panels, modes, strict=True):
            _panel(axes, {s: t for s, t in found.items() if s.mode == mode}, ranks)
            axes.set_title(TITLES[mode], fontsize=9)
        panels[0].set_ylabel("time per step, ms")


def _panel(axes: "Axes", found: Mapping[Series, Mapping[int, float]], ranks: list[int]) -> None:
    several = len({series.hosts for series in found}) > 1
    for series, times in found.items():
        k = ranks.index(series.ranks)
        colour, marker = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
        label = f"{series.ranks} rank{'s' * (series.ranks > 1)}"
        if several:
            label += f", {series.hosts} host{'s' * (series.hosts > 1)}"
        face = colour if series.hosts == 1 else "none"
        sizes, ms = list(times), [1e3 * t for t in times.values()]
        axes.plot(
            sizes, ms, marker, color=colour, markerfacecolor=face, markersize=4, label=label
        )  # fmt: skip
        line = fit_line(sizes, list(times.values()))
        if line:
            steps = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / BENDS) for i in range(BENDS + 1)]
            dashes = "-" if series.hosts == 1 else (0, (2 * series.hosts, 2))
            axes.plot(
                steps, [1e3 * line.at(x) for x in steps], color=colour, linewidth=0.8, ls=dashes
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(TICKS, [bytes_text(size) for size in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("size of the parameters")
    axes.legend()
