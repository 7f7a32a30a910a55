"""The picture of `benchmarks.convergence`: accuracy over time, and over bytes between nodes."""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpips.errors import UserError
from mpips.tools.report.figures import COLOURS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[np.ndarray]]  # by name: a curve for each seed, shape (2, points)
COLUMNS = 2
KINDS = (".svg", ".png")
METADATA = {".svg": {"Date": None, "Creator": None}}
INCHES = 4.8, 2.9  # size of a panel, with its legend
POINTS = 400
SHOWN = 20.0  # upper end of the axis in percent of errors, or twice the best's if that is more
TICKS = 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 2, 1, 0.5, 0.2, 0.1
LEAST = 0.05  # smallest errors in percent on the logarithmic axis


def check(path: Path) -> None:
    """Check that a picture can be drawn to a file.

    Raises:
        UserError: If not.
    """
    if path.suffix not in KINDS:
        raise UserError(f"--plot {path}", f"a name that ends in {' or '.join(KINDS)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}", "a file in a folder that is there")
    if importlib.util.find_spec("matplotlib") is None:
        remedy = "pip install 'mpips[report]'"
        raise UserError("--plot without matplotlib", "matplotlib to draw with", remedy)


@contextlib.contextmanager
def drawing(path: Path, rows: int, columns: int = COLUMNS) -> Iterator[list["Axes"]]:
    """Yield panels, by default in rows of two, and save the picture at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inches = INCHES[0] * COLUMNS, INCHES[1] * rows  # a single panel is as wide as two
    with matplotlib.rc_context({"svg.hashsalt": "mpips"}, STYLE):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=inches, squeeze=False, layout="constrained"
        )
        try:
            yield list(axes.flat)
            figure.savefig(path, dpi=150, metadata=METADATA.get(path.suffix))
        finally:
            pyplot.close(figure)


def mean(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of curves, each of shape (2, n), in the range of x that all curves have.

    Returns:
        The mean at x in geometric steps, by linear interpolation, shape (2, POINTS).
    """
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    at = np.geomspace(begin, max(begin, end), POINTS)
    return np.stack([at, np.mean([np.interp(at, x, y) for x, y in curves], axis=0)])


def draw(panels: Sequence[tuple[str, str, Curves]], path: Path) -> None:
    """Draw panels in rows of two.

    A curve is the mean over the seeds of the best accuracy so far. Both axes are logarithmic; the
    vertical one in errors, so 98 and 99 percent are as far apart as 90 and 95.

    Args:
        panels: Title, label of the x axis and curves of each panel, at least one panel. Accuracies
            are in percent, and all x are above 0.
        path: File of the picture; its suffix selects the format.
    """
    rows = -(-len(panels) // COLUMNS)
    with drawing(path, rows) as found:
        for axes, panel in zip(found, panels, strict=False):
            _panel(axes, *panel)
        for axes in found[len(panels) :]:
            axes.set_axis_off()


def _panel(axes: "Axes", title: str, label: str, curves: Curves) -> None:
    least = 100.0
    for k, (name, each) in enumerate(curves.items()):
        x, y = mean([np.stack([x, np.maximum.accumulate(y)]) for x, y in each])
        errors = np.maximum(100 - y, LEAST)
        least = min(least, float(errors.min()))
        dash = "-" if k < len(COLOURS) else "--"
        axes.plot(x, errors, dash, color=COLOURS[k % len(COLOURS)], label=name, linewidth=1.1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    most = min(100.0, max(SHOWN, 2 * least))
    shown = [tick for tick in TICKS if least <= tick <= most]
    axes.set_yticks(shown, [f"{100 - tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)
    axes.set_ylim(most, 0.9 * least)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(label)
    axes.set_ylabel("held-out accuracy, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
