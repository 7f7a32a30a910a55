"""The picture of `mpips.bench.convergence`: accuracy over time, and over what crossed nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpips.report.drawing import COLOURS, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[np.ndarray]]  # by name: of each seed, shape (2, points)
INCHES = 3.6, 2.9  # a panel
POINTS = 200
SHOWN = 15.0  # of accuracy, below the best: what comes before is much the same


def mean(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of curves, each of shape (2, n), as far as all of them reach.

    Returns:
        Shape (2, POINTS); between two points a curve is a straight line.
    """
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    at = np.linspace(begin, max(begin, end), POINTS)
    return np.stack([at, np.mean([np.interp(at, x, y) for x, y in curves], axis=0)])


def draw(panels: Sequence[tuple[str, str, Curves]], path: Path) -> None:
    """Draw panels beside each other: a title, what the x axis is, and the curves.

    Args:
        panels: At least one; an x axis that ends with ``MB`` is logarithmic.
        path: Of the picture; its ending says of which kind.
    """
    inches = INCHES[0] * len(panels), INCHES[1]
    with drawing(path, len(panels), inches, alike=False) as found:
        for axes, panel in zip(found, panels, strict=True):
            _panel(axes, *panel)
        found[0].set_ylabel("held-out accuracy, %")


def _panel(axes: "Axes", title: str, label: str, curves: Curves) -> None:
    best = 0.0
    for k, (name, each) in enumerate(curves.items()):
        x, y = mean(each)
        best = max(best, float(y.max()))
        dash = "-" if k < len(COLOURS) else "--"
        axes.plot(x, y, dash, color=COLOURS[k % len(COLOURS)], label=name, linewidth=1.1)
    axes.set_ylim(best - SHOWN, best + 0.5)
    if label.endswith("MB"):
        axes.set_xscale("log")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(label)
    axes.legend(loc="lower right", frameon=True, framealpha=0.9)
