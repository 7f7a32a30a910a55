"""Figures of a report, with their texts and numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SECONDS = ((10_800.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


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
        alt: What those read who do not see it.
        draw: Draws it into axes.
        table: Its numbers.
        note: What has to be known beside it; may be empty.
        keyed: Whether its colours are those of the runs.
        against: The abscissa that the reader has to choose for it to be seen; empty if always.
    """

    name: str
    title: str
    alt: str
    draw: Callable[["Axes"], None]
    table: Table
    note: str = ""
    keyed: bool = False
    against: str = ""


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
