"""How pictures are drawn: colours, style, and a file of one kind or another. Needs Matplotlib."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpips.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".svg", ".png")
# Okabe and Ito's colours, which those who see no red or no green tell apart as well.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MARKERS = "osD^vPX*"
METADATA = {".svg": {"Date": None, "Creator": None}}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text as text
    "svg.hashsalt": "mpips",  # the same picture from the same points
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}


def check(path: Path) -> None:
    """Check that a picture can be drawn into a file.

    Raises:
        UserError: If it cannot.
    """
    if path.suffix not in KINDS:
        raise UserError(f"--plot {path}", f"a name that ends in {' or '.join(KINDS)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}", "a file in a folder that is there")
    if importlib.util.find_spec("matplotlib") is None:
        remedy = "pip install 'mpips[report]'"
        raise UserError("--plot without matplotlib", "matplotlib to draw with", remedy)


@contextlib.contextmanager
def drawing(
    path: Path, columns: int, inches: tuple[float, float], alike: bool = True, rows: int = 1
) -> Iterator[list["Axes"]]:
    """Yield panels that stand beside each other; what is drawn into them is saved in the end.

    Args:
        path: Of the picture; its ending says of which kind.
        columns: How many panels, or how many a row.
        inches: Width and height.
        alike: Whether they have one y axis.
        rows: Of panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=inches, sharey=alike, squeeze=False, layout="constrained"
        )
        try:
            yield list(axes.flat)
            figure.savefig(path, dpi=150, metadata=METADATA.get(path.suffix))
        finally:
            pyplot.close(figure)
