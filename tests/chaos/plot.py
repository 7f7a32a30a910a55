"""The picture of disturbed runs: loss over time, beside a run that nothing was done to."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpips.report.drawing import COLOURS, drawing
from tests.chaos.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = (6.4, 3.6)


def draw(undisturbed: Result, results: Sequence[Result], path: Path) -> None:
    """Draw the losses, with a mark and the name where a fault came.

    Args:
        undisturbed: The run that nothing was done to.
        results: The others.
        path: Of the picture; its ending says of which kind.
    """
    with drawing(path, 1, INCHES) as (axes,):
        for k, result in enumerate((undisturbed, *results)):
            label = f"seed {result.seed}" if result.plan else "no fault"
            colour = COLOURS[k % len(COLOURS)]
            seconds = [at - result.begun for at, _ in result.curve]
            axes.plot(
                seconds, [loss for _, loss in result.curve], color=colour, label=label, linewidth=1
            )  # fmt: skip
            _mark(axes, result, colour)
        axes.set_yscale("log")
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("training loss")
        axes.legend()


def _mark(axes: "Axes", result: Result, colour: str) -> None:
    for struck in result.struck:
        before = [loss for at, loss in result.curve if at <= struck.at.time]
        if not before:
            continue  # it came while ranks started for the first time
        point = struck.at.time - result.begun, before[-1]
        axes.plot(*point, "X", color=colour, markersize=6)
        axes.annotate(
            struck.fault.name, point, xytext=(3, 5), textcoords="offset points", fontsize=8
        )  # fmt: skip
