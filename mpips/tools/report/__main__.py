"""Runs as pictures and tables in one file: ``python -m mpips report RUN [RUN ...]``.

Each RUN is the folder of a run, of a sweep, or of several runs. The page loads nothing, so that a
browser opens it from any file system; it may be made while a run goes on, and of what is left of
one that was killed. Starts no MPI.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpips import __version__, extras
from mpips.config import OPTIONS, SESSION_FIELDS
from mpips.config.arguments import verbatim
from mpips.errors import UserError, answer, human_bytes
from mpips.session.results import HEADS, RESULTS, find_runs, plain, rows
from mpips.tools.report import loads, progress
from mpips.tools.report.curves import MOST
from mpips.tools.report.figures import (
    VARIABLES,
    Group,
    Section,
    Table,
    draw_svg,
    groups,
    number,
    shown,
)
from mpips.tools.report.record import RUNNING, Record, read, shortest_names

TEMPLATE = Path(__file__).with_name("page.html")
BEST: Mapping[str, Callable[..., float]] = {"eval_loss": min, "accuracy": max}
PAGE = Path("report.html")
ALL, LEAST = 40_000, 200  # points of a figure, and of each curve in it


@dataclass(frozen=True)
class Cell:
    """A cell of the table of runs: its text, by what it is sorted, whether it is the best."""

    text: str
    order: str
    best: bool = False


def sections(runs: Sequence[Record]) -> tuple[list[Group], list[Section]]:
    """Return the groups of some runs, and the figures that there are numbers for."""
    found = groups(runs)
    went_on = progress.curves(found)
    if any(run.jobs for run in runs):
        went_on.figures.append(progress.events(found))
    return found, [section for section in (went_on, loads.loads(found)) if section.figures]


def render(runs: Sequence[Record]) -> str:
    """Return the page of some runs, at least one.

    Raises:
        UserError: If Jinja2 is not installed.
    """
    jinja = extras.load("jinja2", "Jinja2", "report", "makes the page")
    environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                    undefined=jinja.StrictUndefined)  # fmt: skip
    environment.filters.update(shown=shown, css=VARIABLES.__getitem__)
    found, parts = sections(runs)
    heads, cells = run_table(runs)
    drawn = {
        figure.name: jinja.utils.markupsafe.Markup(draw_svg(figure.name, figure.draw))
        for section in parts
        for figure in section.figures
    }
    text: str = environment.from_string(TEMPLATE.read_text()).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs, groups=found, sections=parts, drawn=drawn, heads=heads, cells=cells,
        tiles=[("state", cells[0][1].text), *tiles(runs[0])] if len(runs) == 1 else [],
        chosen=[changed(run) for run in runs] if len(runs) == 1 else [],
        against=progress.AXES, choices=[f.against for p in parts for f in p.figures if f.against],
        version=__version__, made=time.strftime("%Y-%m-%d %H:%M %Z"),
    )  # fmt: skip
    return text


def run_table(runs: Sequence[Record]) -> tuple[list[str], list[list[Cell]]]:
    """Return the table of `mpips results` as heads and cells, the best ones marked."""
    table = rows([run.path for run in runs], [run.config for run in runs],
                 [run.outcome for run in runs])  # fmt: skip
    for row, run in zip(table, runs, strict=True):
        row["run"] = run.name
        if run.running:
            row["state"] = RUNNING
    values = {key: [number(run.outcome.get(key)) for run in runs] for key in RESULTS}
    best: dict[str, float] = {}
    for key, pick in BEST.items():
        known = [value for value in values[key] if value is not None]
        if len(set(known)) > 1:
            best[key] = pick(known)
    cells = []
    for k, row in enumerate(table):
        line = []
        for key, word in row.items():
            value = values[key][k] if key in values else None
            if value is not None and "loss" in key:
                word = f"{value:.4g}"
            order = word if value is None else repr(value)
            line.append(Cell(word, order, value is not None and best.get(key) == value))
        cells.append(line)
    return [HEADS.get(key, key) for key in table[0]], cells


def tiles(run: Record) -> list[tuple[str, str]]:
    """Return what to see of a run at a glance: names and values."""
    came = run.outcome
    stale = came.get("staleness")
    mean = number(stale.get("mean")) if isinstance(stale, dict) else None
    accuracy = number(came.get("accuracy"))
    found = {
        "held-out loss": number(came.get("eval_loss")),
        "accuracy": None if accuracy is None else f"{100 * accuracy:.2f} %",
        "training loss": number(came.get("loss")),
        "samples/s": number(came.get("samples_per_s")),
        "updates": came.get("global_step"),
        "epochs": number(came.get("epochs")),
        "seconds": number(came.get("wall_s")),
        "mean staleness": mean,
    }
    return [(name, shown(value)) for name, value in found.items() if value is not None]


def changed(run: Record) -> Table:
    """Return the options of a run that are not the defaults."""
    found = [
        (f"--{name.replace('_', '-')}", plain(value), plain(OPTIONS[name].default))
        for name, value in run.config.items()
        if name in OPTIONS and name not in SESSION_FIELDS and value != _default(name)
    ]
    return Table(("option", "here", "default"), found)


def _default(name: str) -> Any:
    value = OPTIONS[name].default
    return list(value) if isinstance(value, tuple) else value


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = verbatim("python -m mpips report", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    add("-o", "--out", type=Path, default=PAGE, metavar="FILE", help=f"the page [default: {PAGE}]")
    return parser


def make(argv: Sequence[str]) -> str:
    """Write what a command line asks for; returns what to tell of it.

    Raises:
        UserError: If a folder holds no run, a file cannot be written, or a package is missing.
    """
    args = make_parser().parse_args(argv)
    for folder in args.runs:
        find_runs([folder])  # each has one
    paths = find_runs(args.runs)
    extras.load("matplotlib", "Matplotlib", "report", "draws the figures")
    extras.load("jinja2", "Jinja2", "report", "makes the page")
    most = max(LEAST, min(MOST, ALL // len(paths)))
    names = shortest_names(paths)
    runs = [read(path, name, most) for path, name in zip(paths, names, strict=True)]
    try:
        text = render(runs)
        args.out.write_text(text)
    except OSError as problem:
        got = f"{problem.filename}: {problem.strerror}"
        raise UserError(got, "a place that can be written") from None
    many, size = f"{len(runs)} run{'s' * (len(runs) > 1)}", human_bytes(len(text.encode()))
    return f"{args.out}: {many}, {size}\n"


def main(argv: Sequence[str]) -> int:
    """Make the report; returns the exit code."""
    return answer(make, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
