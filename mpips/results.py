"""Runs side by side: ``python -m mpips.results [--csv] FOLDER...``; starts no MPI."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.errors import UserError, complain
from mpips.session.results import find_runs, results, table

USAGE = """usage: python -m mpips.results [--csv] FOLDER...

A line for each run in the folders and directly below them: its state, what came of it, and the
options in which the runs differ; also for a row of a sweep that has failed and left no run. --csv
gives the same as comma-separated values.
"""


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    words = [word for word in argv if word != "--csv"]
    if not words or any(word.startswith("-") for word in words):
        print(USAGE, end="", file=sys.stdout if "--help" in argv else sys.stderr)
        return 0 if "--help" in argv else 2
    try:
        rows = results(find_runs([Path(word) for word in words]))
        if len(words) < len(argv):
            writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        else:
            print(table(rows), end="")
    except UserError as error:
        complain(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
