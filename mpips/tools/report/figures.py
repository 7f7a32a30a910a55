"""Figures of a report: tables, groups of runs, and SVG."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mpips.config.names import SESSION_FIELDS
from mpips.tools.report.record import Record
from mpips.tools.results import differing, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers distinguish too.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
GRID = "#dddddd"  # the same as in STYLE
STYLE = Path(__file__).with_suffix(".mplstyle")
INCHES = (4.6, 2.9)
# The page replaces these colours by its own, which depend on the reader's choice of light or dark.
VARIABLES = {
    COLOURS[0]: "var(--ink)",
    **{colour: f"var(--c{k})" for k, colour in enumerate(COLOURS) if k},
    GRID: "var(--grid)",
}
PLACES = re.compile(r' (d|x|y|transform)="[^"]*"')
NUMBER = re.compile(r"-?\d+\.\d+")
WORDS = (  # patterns in Matplotlib's SVG, and their replacements
    (r"<\?xml.*?(?=<svg)", ""),
    (r' xmlns(:xlink)?="[^"]*"', ""),
    (r'(?<=<svg) width="[^"]*" height="[^"]*"', ""),
    (r"xlink:href", "href"),
    (r'<g id="tip:([^"]*)">', r"<g><title>\1</title>"),
    (r'<g id="[^"]*"', "<g"),
    (r"font-family: [^;\"]*(; )?", ""),
)
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
SECONDS = ((10_800.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
LINES = (*COLOURS[1:7], COLOURS[0])
OTHERS = COLOURS[7]
DASHES = ("-", "-", "-", "-", (0, (4, 1.5)), (0, (4, 1.5)), (0, (1, 1)))


def tip(artist: Any, text: str) -> None:
    """Give an artist a tooltip, which the page shows under the pointer."""
    artist.set_gid(f"tip:{text}")


def draw_svg(name: str, draw: Callable[["Axes"], None]) -> str:
    """Return a figure as an SVG element, without references to other files.

    Args:
        name: Name of the figure, unique in the page.
        draw: Function that draws the figure into axes.
    """
    import matplotlib
    from matplotlib import figure as figures

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}, STYLE):
        figure = figures.Figure(figsize=INCHES, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(out, format="svg", metadata=NO_METADATA, transparent=True)
    text = out.getvalue()
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return PLACES.sub(lambda match: NUMBER.sub(_short, match[0]), text)


def _short(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Table:
    """A table: names of columns, and rows with a cell for each column, text or number."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        name: Name of the figure's anchor in the page.
        title: Title above the figure.
        draw: Function that draws the figure into axes.
        table: Data of the figure.
        note: Explanation below the figure; may be empty.
        keyed: Whether the colours are those of the groups.
        against: Abscissa at whose choice the page shows the figure; empty for always.
    """

    name: str
    title: str
    draw: Callable[["Axes"], None]
    table: Table
    note: str = ""
    keyed: bool = False
    against: str = ""


def shown(value: Any) -> str:
    """Return a cell of a table as text: numbers with few digits, ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit of a time axis, in seconds, and its name."""
    return next((unit, name) for least, unit, name in SECONDS if longest_s >= least)


def engineered(value: float, _: object = None) -> str:
    """Return a number as a short text, such as 20k or 1.5M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.4g}{unit}"


@dataclass
class Group:
    """Runs that differ only in their seeds, or a single run.

    Attributes:
        label: Name of the group.
        runs: At least one run.
        colour, dash: Colour and dash pattern of the group's curves.
        rank: Number of groups with a lower loss.
    """

    label: str
    runs: list[Record]
    colour: str = OTHERS
    dash: Any = "-"
    rank: int = 0

    @property
    def shown(self) -> bool:
        """Whether the group has its own colour."""
        return self.rank < len(LINES)

    @property
    def pattern(self) -> str:
        """Dash pattern for the key of the page, in thirds of the line width; empty for none."""
        return "" if self.dash == "-" else " ".join(f"{3 * length}" for length in self.dash[1])


def groups(runs: Sequence[Record]) -> list[Group]:
    """Return the groups of some runs, in the order of each group's first run.

    Runs of the same options and the same seed are groups of their own.
    """
    by_options: dict[Any, list[Record]] = {}
    for k, run in enumerate(runs):
        key = repr(_without_seed(run.config)) if run.config else k
        by_options.setdefault(key, []).append(run)
    parts: list[list[Record]] = []
    for same in by_options.values():
        seeds = {run.config.get("seed") for run in same}
        parts += [same] if len(seeds) == len(same) else [[run] for run in same]
    differ = differing([_without_seed(run.config) for run in runs])
    grouped = [Group(_label(part, differ), part) for part in parts]
    order = sorted(grouped, key=lambda group: fmean(map(loss_of, group.runs)))
    for rank, group in enumerate(order):
        group.rank = rank
    for k, group in enumerate([group for group in grouped if group.shown]):
        group.colour, group.dash = LINES[k], DASHES[k]
    return grouped


def loss_of(run: Record) -> float:
    """Return the loss by which runs are ranked: held-out, else training, else infinity."""
    for name in ("eval_loss", "loss"):
        value = number(run.outcome.get(name))
        if value is not None:
            return value
    return math.inf


def number(value: Any) -> float | None:
    """Return a value of a summary if it is a finite number, else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    ignored = {*SESSION_FIELDS, "seed"}
    return {name: value for name, value in config.items() if name not in ignored}


def _label(runs: Sequence[Record], differ: Sequence[str]) -> str:
    if len(runs) == 1:
        return runs[0].name
    config = runs[0].config
    words = ", ".join(f"{name} {plain(config.get(name))}" for name in differ)
    return f"{words}: {len(runs)} seeds" if words else f"{len(runs)} seeds"
