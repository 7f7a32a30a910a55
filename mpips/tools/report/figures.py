"""Figures of a report: tables, groups of runs, and SVG."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mpips.config.names import SESSION_FIELDS
from mpips.tools.report.record import Record
from mpips.tools.results import differing, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which those who see no red or no green tell apart as well.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
GRID = "#dddddd"  # as STYLE has it
STYLE = Path(__file__).with_suffix(".mplstyle")
INCHES = (4.6, 2.9)
# What is drawn in these colours has those of the page, which depend on the reader's choice.
VARIABLES = {
    COLOURS[0]: "var(--ink)",
    **{colour: f"var(--c{k})" for k, colour in enumerate(COLOURS) if k},
    GRID: "var(--grid)",
}
PLACES = re.compile(r' (d|x|y|transform)="[^"]*"')
NUMBER = re.compile(r"-?\d+\.\d+")
WORDS = (  # of Matplotlib's output, and what stands in their place
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
READ = 8  # rows
DASHES = ("-", "-", "-", "-", (0, (4, 1.5)), (0, (4, 1.5)), (0, (1, 1)))


def tip(artist: Any, text: str) -> None:
    """Have a text shown where the pointer is over an artist, in a page."""
    artist.set_gid(f"tip:{text}")


def draw_svg(name: str, draw: Callable[["Axes"], None]) -> str:
    """Return a figure as an SVG element, without the names that would load anything.

    Args:
        name: Of the figure; no other one in the page has it.
        draw: Draws it.
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
    return PLACES.sub(lambda found: NUMBER.sub(_short, found[0]), text)


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Table:
    """Numbers: the names of columns, and rows of as many cells, text or numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        name: Of its file, and of its place in the page.
        title: Above it.
        draw: Draws it into axes.
        table: Its numbers.
        note: What has to be known beside it; may be empty.
        keyed: Whether its colours are those of the runs.
        against: The abscissa that the reader has to choose for it to be seen; empty if always.
    """

    name: str
    title: str
    draw: Callable[["Axes"], None]
    table: Table
    note: str = ""
    keyed: bool = False
    against: str = ""

    @property
    def alt(self) -> str:
        """What those read who do not see it: its title, and the first rows of its numbers."""
        rows = (
            ", ".join(
                f"{head} {shown(cell)}" for head, cell in zip(self.table.heads, row, strict=True)
            )
            for row in self.table.rows[:READ]
        )
        return f"{self.title}. {'; '.join(rows)}"


@dataclass
class Section:
    """Figures that stand together."""

    title: str
    figures: list[Figure] = field(default_factory=list)


def shown(value: Any) -> str:
    """Return a cell of a table as text: few digits, and nothing for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return by what seconds are divided, and what they are called then."""
    return next((unit, name) for least, unit, name in SECONDS if longest_s >= least)


def engineered(value: float, _: object = None) -> str:
    """Return a number of an axis in few characters: 20k, 1.5M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.4g}{unit}"


@dataclass
class Group:
    """Runs of one configuration, with several seeds; or one run.

    Attributes:
        label: By which it is called.
        runs: At least one.
        colour, dash: Of its curves.
        rank: How many groups are better.
    """

    label: str
    runs: list[Record]
    colour: str = OTHERS
    dash: Any = "-"
    rank: int = 0

    @property
    def shown(self) -> bool:
        """Whether it has a colour of its own."""
        return self.rank < len(LINES)

    @property
    def pattern(self) -> str:
        """Its dashes in a key of a page, 1 pixel being a third of a line; empty for none."""
        return "" if self.dash == "-" else " ".join(f"{3 * length}" for length in self.dash[1])


def groups(runs: Sequence[Record]) -> list[Group]:
    """Return the groups of some runs, in the order of their first ones."""
    found: dict[Any, list[Record]] = {}
    for k, run in enumerate(runs):
        key = repr(_but_seed(run.config)) if run.config else k
        found.setdefault(key, []).append(run)
    parts: list[list[Record]] = []
    for same in found.values():
        seeds = {run.config.get("seed") for run in same}
        parts += [same] if len(seeds) == len(same) else [[run] for run in same]
    differ = differing([_but_seed(run.config) for run in runs])
    made = [Group(_label(part, differ), part) for part in parts]
    order = sorted(made, key=lambda group: fmean(map(loss_of, group.runs)))
    for rank, group in enumerate(order):
        group.rank = rank
    for k, group in enumerate([group for group in made if group.shown]):
        group.colour, group.dash = LINES[k], DASHES[k]
    return made


def loss_of(run: Record) -> float:
    """Return by what runs are compared: the held-out loss, or the training loss, or infinity."""
    for name in ("eval_loss", "loss"):
        value = number(run.outcome.get(name))
        if value is not None:
            return value
    return math.inf


def number(value: Any) -> float | None:
    """Return a finite number of a summary; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _but_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    left_out = {*SESSION_FIELDS, "seed"}
    return {name: value for name, value in config.items() if name not in left_out}


def _label(runs: Sequence[Record], differ: Sequence[str]) -> str:
    if len(runs) == 1:
        return runs[0].name
    config = runs[0].config
    words = ", ".join(f"{name} {plain(config.get(name))}" for name in differ)
    return f"{words}: {len(runs)} seeds" if words else f"{len(runs)} seeds"
