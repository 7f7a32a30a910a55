"""Runs side by side: ``python -m mpips results [--csv] FOLDER...``.

A line for each run in the folders and directly below them: its state, what came of it, and the
options in which the runs differ; also for a row of a sweep that has failed and left no run. Starts
no MPI.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from mpips.config.jobfile import Parser, verbatim
from mpips.errors import answer
from mpips.session.results import find_runs, results, table


def make_parser() -> Parser:
    """Build the parser of this command."""
    parser = verbatim("python -m mpips results", __doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of several"
    )
    parser.add_argument("--csv", action="store_true", help="write comma-separated values")
    return parser


def show(argv: Sequence[str]) -> str:
    """Return the table that a command line asks for.

    Raises:
        UserError: If there is no run, or a run's files cannot be read.
    """
    args = make_parser().parse_args(argv)
    rows = results(find_runs(args.folders))
    if not args.csv:
        return table(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    return answer(show, argv)
