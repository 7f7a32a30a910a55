"""Runs as pictures and tables in one file: ``python -m mpips report RUN [RUN ...]``.

Each RUN is the folder of a run, of a sweep, or of several runs. The page loads nothing, so that a
browser opens it from any file system; it may be made while a run goes on, and of what is left of
one that was killed. Starts no MPI.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips import extras
from mpips.config.arguments import verbatim
from mpips.errors import UserError, answer, human_bytes
from mpips.session.results import find_runs
from mpips.tools.report.curves import MOST
from mpips.tools.report.record import Record, read, shortest_names

PAGE = Path("report.html")
ALL, LEAST = 40_000, 200  # points of a figure, and of each curve in it


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
        return _page(runs, args.out)
    except OSError as problem:
        got = f"{problem.filename}: {problem.strerror}"
        raise UserError(got, "a place that can be written") from None


def _page(runs: Sequence[Record], path: Path) -> str:
    from mpips.tools.report.page import render

    text = render(runs)
    path.write_text(text)
    return f"{path}: {len(runs)} run{'s' * (len(runs) > 1)}, {human_bytes(len(text.encode()))}\n"


def main(argv: Sequence[str]) -> int:
    """Make the report; returns the exit code."""
    return answer(make, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
