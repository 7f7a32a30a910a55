"""Groups of runs that differ only in their seeds, with colours."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mpips.config import SESSION_FIELDS
from mpips.session.results import differing, plain
from mpips.tools.report.drawing import COLOURS
from mpips.tools.report.record import Record

LINES = (*COLOURS[1:7], COLOURS[0])
OTHERS = COLOURS[7]
DASHES = ("-", "-", "-", "-", (0, (4, 1.5)), (0, (4, 1.5)), (0, (1, 1)))


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
