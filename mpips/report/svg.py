"""A figure as SVG that stands in a page: small, in the page's colours and fonts."""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpips.report.drawing import COLOURS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def tip(artist: Any, text: str) -> None:
    """Have a text shown where the pointer is over an artist, in a page."""
    artist.set_gid(TIP + text)


def draw_svg(name: str, draw: Callable[["Axes"], None]) -> str:
    """Return a figure as an SVG element, without the names that would load anything.

    Args:
        name: Of the figure; no other one in the page has it.
        draw: Draws it.
    """
    text = _draw(draw, {**PAGE, "svg.hashsalt": name}).decode()
    for pattern, word in WORDS:
        text = pattern.sub(word, text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return PLACES.sub(lambda found: NUMBER.sub(_short, found[0]), text)


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _draw(draw: Callable[["Axes"], None], style: dict[Any, Any]) -> bytes:
    import matplotlib
    from matplotlib import figure as figures

    out = io.BytesIO()
    metadata = {"Date": None, "Creator": None}
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=INCHES, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(out, format="svg", metadata=metadata, transparent=True)
    return out.getvalue()
