"""Runs side by side: ``python -m mpips.results [--csv] FOLDER...``.

A table of the runs in some folders, such as those of a sweep: what came of each, and in what their
jobs differ. It reads what a run leaves and starts no MPI, so it may be asked at any time.
"""

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpips.config import OPTIONS, SESSION_FIELDS
from mpips.errors import UserError
from mpips.folder import CONFIG, DONE, SUMMARY
from mpips.jobfile import read_toml

RESULTS = {  # of summary.json: how each is shown
    "global_step": "{:d}",
    "epochs": "{:.2f}",
    "loss": "{:.4f}",
    "eval_loss": "{:.4f}",
    "accuracy": "{:.4f}",
    "samples_per_s": "{:.0f}",
    "wall_s": "{:.1f}",
}
USAGE = """usage: python -m mpips.results [--csv] FOLDER...

A line for each run in the folders and directly below them: its state, what came of it, and the
options in which the runs differ. --csv gives the same as comma-separated values.
"""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the runs among some folders and directly below them, numbers in their order.

    Raises:
        UserError: If there is none.
    """
    found = {
        path.parent
        for folder in folders
        for path in (*folder.glob(CONFIG), *folder.glob(f"*/{CONFIG}"))
    }
    if not found:
        names = ", ".join(map(str, folders))
        raise UserError(f"no run in {names}", f"folders with {CONFIG}", "give a run or a sweep")
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Order ``run-2`` before ``run-10``."""
    words = re.split(r"(\d+)", str(path))
    return [(int(w), "") if w.isdecimal() else (-1, w) for w in words]


def results(runs: Sequence[Path]) -> list[dict[str, str]]:
    """Return a row for each run: its name, its state, what came of it, the options that differ.

    Raises:
        UserError: If a run's files cannot be read.
    """
    jobs = [read_toml(run / CONFIG) for run in runs]
    names = [k for k in OPTIONS if k not in SESSION_FIELDS]
    differ = [k for k in names if any(job.get(k) != jobs[0].get(k) for job in jobs)]
    rows = []
    for run, job in zip(runs, jobs, strict=True):
        summary = _summary(run / SUMMARY)
        varied = {k: _plain(job.get(k)) for k in differ}
        came = {k: _number(form, summary.get(k)) for k, form in RESULTS.items()}
        reason = str(summary.get("stop_reason", "not ended"))
        state = "done" if (run / DONE).exists() else f"not done ({reason})"
        rows.append({"run": run.name, "state": state, **came, **varied})
    return rows


def _plain(value: Any) -> str:
    """Return an option as it is given on a command line, ``-`` for one that is not."""
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return "-" if value in (None, "") else str(value)


def _summary(path: Path) -> Mapping[str, Any]:
    """Read ``summary.json``; a run that has not ended has none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise UserError(f"{path}: {problem}", "the summary of a run") from None
    return found


def _number(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of the same keys as lines of text, the keys above them, in columns."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for line in lines:
        words = (word.ljust(width) for word, width in zip(line, widths, strict=True))
        text += "  ".join(words).rstrip() + "\n"
    return text


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
        print(f"mpips: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
