"""A part of a timeline as a picture: a lane for each rank. Needs Matplotlib."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpips.cluster import words
from mpips.cluster.trace import Traced
from mpips.report.drawing import drawing
from mpips.report.timeline import Span, reach, slices

STEPS = 4  # of the slowest worker, that are shown
WIDTH, LANE, MARGIN = 7.2, 0.32, 1.1  # inches
COLOURS = {
    words.COMPUTING: "#0072b2", words.PULLING: "#56b4e9", words.PUSHING: "#009e73",
    words.APPLYING: "#d55e00", words.SUMMING: "#cc79a7", words.READING: "#000000",
}  # fmt: skip
WAIT = "waits", "#e69f00"
OTHER = "other work", "#999999"


def middle(ranks: Sequence[Traced]) -> Span:
    """Return a few steps in the middle of a job."""
    start, end = reach(ranks)
    computes = [found.begins[found.whats == words.COMPUTING] for found in map(slices, ranks)]
    computes = [begins for begins in computes if len(begins) > 1]
    if not computes:
        return 0.0, end - start
    centre = (min(b[0] for b in computes) + max(b[-1] for b in computes)) / 2 - start
    half = STEPS / 2 * max(float(np.median(np.diff(begins))) for begins in computes)
    return max(0.0, centre - half), min(end - start, centre + half)


def draw(ranks: Sequence[Traced], span: Span, path: Path) -> None:
    """Draw what ranks did in a part of a job.

    Args:
        ranks: Their traces.
        span: Which part, from the beginning of the job.
        path: Of the picture; its ending says of which kind.
    """
    from matplotlib.patches import Patch

    start = reach(ranks)[0]
    shown = dict[tuple[str, str], None]()
    with drawing(path, 1, (WIDTH, MARGIN + LANE * len(ranks))) as (axes,):
        for lane, each in enumerate(ranks):
            for kind, bars in _bars(each, start, span).items():
                axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=kind[1])
                shown[kind] = None
        names = [f"rank {each.about['rank']}: {each.about['name']}" for each in ranks]
        axes.set_yticks(range(len(ranks)), names)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_xlim(0, 1e3 * (span[1] - span[0]))
        axes.set_xlabel(f"ms after {span[0]:.3f} s")
        axes.grid(axis="y", visible=False)
        handles = [Patch(color=colour, label=name) for name, colour in shown]
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)


def _bars(each: Traced, start: float, span: Span) -> dict[tuple[str, str], list[Span]]:
    """Return the (begin, duration) of what a rank did, in ms of the picture, by name and colour."""
    found, bars = slices(each), defaultdict[tuple[str, str], list[Span]](list)
    begins = np.maximum(found.begins - start, span[0])
    ends = np.minimum(found.ends - start, span[1])
    for k in np.flatnonzero(ends > begins).tolist():
        what = int(found.whats[k])
        if what == words.SERVING:
            continue  # a server that has nothing to do
        if what in COLOURS:
            kind = words.PHASES[what], COLOURS[what]
        else:
            kind = WAIT if what >= words.WAITING else OTHER
        bars[kind].append((1e3 * (begins[k] - span[0]), 1e3 * (ends[k] - begins[k])))
    return bars
