"""Drawing with Matplotlib: style, files, and SVG in the page's colours and fonts."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator
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

# Of a figure in a page.
INCHES = (4.6, 2.9)
GRID = "#dddddd"
TIP = "tip:"
PAGE: dict[Any, Any] = {
    **STYLE,
    "text.parse_math": False,  # names of runs may hold a dollar
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "lines.linewidth": 1.3,
}
# What is drawn in these colours has those of the page, which depend on the reader's choice.
VARIABLES = {
    COLOURS[0]: "var(--ink)",
    **{colour: f"var(--c{k})" for k, colour in enumerate(COLOURS) if k},
    GRID: "var(--grid)",
}
PLACES = re.compile(r' (d|x|y|transform)="[^"]*"')
NUMBER = re.compile(r"-?\d+\.\d+")
WORDS = (  # of Matplotlib's output, and what stands in their place
    (re.compile(r"<\?xml.*?(?=<svg)|<metadata>.*?</metadata>", re.S), ""),
    (re.compile(r' xmlns(:xlink)?="[^"]*"'), ""),
    (re.compile(r'(?<=<svg) width="[^"]*" height="[^"]*"'), ""),
    (re.compile(r' version="1.1"'), ""),
    (re.compile(r"xlink:href"), "href"),
    (re.compile(r'<g id="[^"]*"/>'), ""),
    (re.compile(r'<g id="tip:([^"]*)">'), r"<g><title>\1</title>"),
    (re.compile(r'<g id="[^"]*">'), "<g>"),
    (re.compile(r"font-family: [^;\"]*(; )?"), ""),
    (re.compile(r"\s*\n\s*"), "\n"),
)


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


def tip(artist: Any, text: str) -> None:
    """Have a text shown where the pointer is over an artist, in a page."""
    artist.set_gid(TIP + text)


def draw_svg(name: str, draw: Callable[["Axes"], None]) -> str:
    """Return a figure as an SVG element, without the names that would load anything.

    Args:
        name: Of the figure; no other one in the page has it.
        draw: Draws it.
    """
    import matplotlib
    from matplotlib import figure as figures

    out = io.StringIO()
    with matplotlib.rc_context({**PAGE, "svg.hashsalt": name}):
        figure = figures.Figure(figsize=INCHES, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(out, format="svg", metadata=METADATA[".svg"], transparent=True)
    text = out.getvalue()
    for pattern, word in WORDS:
        text = pattern.sub(word, text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return PLACES.sub(lambda found: NUMBER.sub(_short, found[0]), text)


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
