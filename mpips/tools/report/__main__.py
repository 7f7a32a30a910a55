"""Report of runs in one page: ``python -m mpips report RUN [RUN ...]``.

Each RUN is the folder of a run, of a sweep, or of several runs. The page loads no other files, so a
browser opens it from any file system. The command also reads runs that are still running or were
killed. It does not start MPI.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mpips import __version__, extras
from mpips.config import OPTIONS
from mpips.config.jobfile import verbatim
from mpips.config.names import SESSION_FIELDS
from mpips.errors import UserError, answer, counted, human_bytes
from mpips.tools.report import loads, progress
from mpips.tools.report.figures import (
    VARIABLES,
    Figure,
    Group,
    Table,
    draw_svg,
    groups,
    number,
    shown,
)
from mpips.tools.report.record import RUNNING, Record, read, shortest_names
from mpips.tools.results import HEADS, find_runs, plain, rows

TEMPLATE = Path(__file__).with_name("page.html")
BEST: Mapping[str, Callable[..., float]] = {"eval_loss": min, "accuracy": max}
PAGE = Path("report.html")


def sections(groups: Sequence[Group]) -> dict[str, list[Figure]]:
    """Return the figures that have data by the title of their section."""
    course = progress.curves(groups)
    if any(run.jobs for group in groups for run in group.runs):
        course.append(progress.events(groups))
    found = {"Progress": course, "Where it went": loads.loads(groups)}
    return {title: figures for title, figures in found.items() if figures}


def render(runs: Sequence[Record]) -> str:
    """Return the HTML page of at least one run.

    Raises:
        UserError: If Jinja2 is not installed.
    """
    jinja = extras.load("jinja2", "Jinja2", "report", "makes the page")
    environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                    undefined=jinja.StrictUndefined)  # fmt: skip
    environment.filters.update(shown=shown, css=VARIABLES.__getitem__)
    grouped = groups(runs)
    parts = sections(grouped)
    figures = [figure for part in parts.values() for figure in part]
    table, best = run_table(runs)
    alone = runs[0] if len(runs) == 1 else None
    drawn = {
        figure.name: jinja.utils.markupsafe.Markup(draw_svg(figure.name, figure.draw))
        for figure in figures
    }
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=alone.name if alone else f"{len(runs)} runs",
        runs=runs, groups=grouped, sections=parts, drawn=drawn, table=table, best=best,
        tiles=[("state", table.rows[0][1]), *tiles(alone)] if alone else [],
        chosen=changed(alone) if alone else None,
        against=progress.AXES, choices=[figure.against for figure in figures if figure.against],
        version=__version__, made=time.strftime("%Y-%m-%d %H:%M %Z"),
    )  # fmt: skip


def run_table(runs: Sequence[Record]) -> tuple[Table, set[tuple[int, int]]]:
    """Return the table of `mpips results`, and the (row, column) of each best value."""
    cells = rows([run.path for run in runs], [run.config for run in runs],
                 [run.outcome for run in runs])  # fmt: skip
    for row, run in zip(cells, runs, strict=True):
        row["run"] = run.name
        if run.running:
            row["state"] = RUNNING
    best = set[tuple[int, int]]()
    for column, key in enumerate(cells[0]):
        values = {k: v for k, r in enumerate(runs) if (v := number(r.outcome.get(key))) is not None}
        for k, value in values.items() if "loss" in key else ():
            cells[k][key] = f"{value:.4g}"
        if key in BEST and len(set(values.values())) > 1:
            first = BEST[key](values.values())
            best |= {(k, column) for k, value in values.items() if value == first}
    heads = [HEADS.get(key, key) for key in cells[0]]
    return Table(heads, [list(row.values()) for row in cells]), best


def tiles(run: Record) -> list[tuple[str, str]]:
    """Return the main results of a run, as names and texts."""
    outcome, stale = run.outcome, run.outcome.get("staleness")
    accuracy = number(outcome.get("accuracy"))
    values = {
        "held-out loss": number(outcome.get("eval_loss")),
        "accuracy": None if accuracy is None else f"{100 * accuracy:.2f} %",
        "training loss": number(outcome.get("loss")),
        "samples/s": number(outcome.get("samples_per_s")),
        "updates": outcome.get("global_step"),
        "epochs": number(outcome.get("epochs")),
        "seconds": number(outcome.get("wall_s")),
        "mean staleness": number(stale.get("mean")) if isinstance(stale, dict) else None,
    }
    return [(name, shown(value)) for name, value in values.items() if value is not None]


def changed(run: Record) -> Table:
    """Return the table of a run's options that differ from the defaults."""
    options = [
        (OPTIONS[name].flag, plain(value), plain(OPTIONS[name].default))
        for name, value in run.config.items()
        if name not in SESSION_FIELDS and value != OPTIONS[name].default
    ]
    return Table(("option", "here", "default"), options)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips report", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    add("-o", "--out", type=Path, default=PAGE, metavar="FILE", help=f"the page [default: {PAGE}]")
    return parser


def make(argv: Sequence[str]) -> str:
    """Write the page for a command line; returns a message about the file.

    Raises:
        UserError: If a folder has no run, the file cannot be written, or a package is missing.
    """
    args = make_parser().parse_args(argv)
    for folder in args.runs:
        find_runs([folder])  # raises for a folder without a run
    paths = find_runs(args.runs)
    extras.load("matplotlib", "Matplotlib", "report", "draws the figures")
    extras.load("jinja2", "Jinja2", "report", "makes the page")
    runs = list(map(read, paths, shortest_names(paths)))
    page = render(runs)
    try:
        args.out.write_text(page, "utf-8", "replace")  # names may not be text in any encoding
    except OSError as problem:
        got = f"{args.out}: {problem.strerror}"
        raise UserError(got, "a place that can be written") from None
    return f"{args.out}: {counted(len(runs), 'run')}, {human_bytes(args.out.stat().st_size)}\n"


def main(argv: Sequence[str]) -> int:
    """Write the report, and return the exit code."""
    return answer(make, argv)
