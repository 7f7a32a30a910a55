"""Runs side by side: ``python -m mpips results [--csv] FOLDER...``.

The table has a line for each run in the folders and directly below them: its state, its results,
and the options in which the runs differ. A failed row of a sweep has a line even without a run. The
command reads files only, so use it at any time. It does not start MPI.
"""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpips.checkpoint.run_folder import CONFIG, DONE, SUMMARY
from mpips.config import OPTIONS
from mpips.config.jobfile import Parser, read_toml, verbatim
from mpips.config.names import SESSION_FIELDS
from mpips.config.option import HELP_WIDTH
from mpips.config.validation import applies
from mpips.errors import UserError, answer
from mpips.session.metrics import LONG_LOSS

FAILED = ".failed"  # suffix of a file in a sweep's folder: the reason why a row has failed
LOSS = "{:.4f}"
RESULTS = {  # fields of summary.json, with their formats
    "global_step": "{:d}",
    "epochs": "{:.2f}",
    "loss": LOSS,
    "eval_loss": LOSS,
    "accuracy": "{:.4f}",
    "samples_per_s": "{:.0f}",
    "wall_s": "{:.1f}",
}
HEADS = {"global_step": "step", "epochs": "epoch", "samples_per_s": "samples/s"}  # not in --csv
GAP = "  "
WORD_WIDTH = 45


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the runs in some folders and directly below them, each once, in natural order.

    Raises:
        UserError: If there is none.
    """
    runs = {
        path.parent
        for folder in folders
        for path in (*folder.glob(CONFIG), *folder.glob(f"*/{CONFIG}"))
    }
    runs |= {path.with_suffix("") for folder in folders for path in folder.glob(f"*{FAILED}")}
    if not runs:
        names = ", ".join(map(str, folders))
        raise UserError(f"no run in {names}", f"folders with {CONFIG}", "give a run or a sweep")
    return sorted({run.absolute(): run for run in runs}.values(), key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return the sort key of a path, which orders ``run-2`` before ``run-10``."""
    return [(int(w), "") if w.isdecimal() else (-1, w) for w in re.split(r"(\d+)", str(path))]


def results(runs: Sequence[Path]) -> list[dict[str, str]]:
    """Return a row for each run: its name, its state, its results, and the options that differ.

    Raises:
        UserError: If a run's files cannot be read.
    """
    jobs = [read_toml(run / CONFIG) if (run / CONFIG).exists() else {} for run in runs]
    return rows(runs, jobs, list(map(read_summary, runs)))


def rows(
    runs: Sequence[Path], jobs: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return the rows of `results` from the content of files.

    An option without effect in a run, such as an option of another mode, is ``-``.

    Args:
        runs: Folders of the runs.
        jobs: Options of each run; empty if unknown.
        summaries: Summary of each run; empty if it has none.
    """
    differ = differing(jobs)
    table = []
    for run, job, summary in zip(runs, jobs, summaries, strict=True):
        values = {k: job.get(k) if applies(k, job) else None for k in differ}
        varied = {f"--{k}" if k in RESULTS else k: plain(value) for k, value in values.items()}
        results = {k: _number(form, summary.get(k)) for k, form in RESULTS.items()}
        table.append({"run": run.name, "state": _state(run, summary), **results, **varied})
    return table


def differing(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options in which jobs differ; empty jobs are ignored."""
    names = [k for k in OPTIONS if k not in SESSION_FIELDS]
    known = [job for job in jobs if job]
    return [k for k in names if any(job.get(k) != known[0].get(k) for job in known)]


def _state(run: Path, summary: Mapping[str, Any]) -> str:
    """Return the state of a run as text, with the reason if it is not done."""
    if (run / DONE).exists():
        return "done"
    failed = run.with_name(run.name + FAILED)
    if failed.exists() and not summary:
        return f"failed ({failed.read_text().strip()})"
    return f"not done ({summary.get('stop_reason', 'not ended')})"


def plain(value: Any) -> str:
    """Return an option's value as on a command line, ``-`` for None or an empty text."""
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return "-" if value in (None, "") else str(value)


def read_summary(run: Path) -> Mapping[str, Any]:
    """Read a run's ``summary.json``; empty for a run that has not ended.

    Raises:
        UserError: If it is damaged.
        OSError: If it cannot be read.
    """
    try:
        summary = json.loads((run / SUMMARY).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as problem:
        raise UserError(f"{run / SUMMARY}: {problem}", "the summary of a run") from None
    if not isinstance(summary, dict):
        raise UserError(f"{run / SUMMARY}: no table", "the summary of a run")
    return summary


def _number(form: str, value: Any) -> str:
    """Return a result as text; in a summary, NaN and infinities are texts already."""
    try:
        return f"{value:.3g}" if form == LOSS and abs(value) >= LONG_LOSS else form.format(value)
    except (TypeError, ValueError):
        return plain(value)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of the same keys as a table of text, with the keys as heads.

    Columns beyond `HELP_WIDTH` follow in further tables, each with the first column.
    """
    lines = [[HEADS.get(key, key) for key in rows[0]], *(list(row.values()) for row in rows)]
    first, *others = zip(*([_shortened(word) for word in line] for line in lines), strict=True)
    blocks = [[first]]
    for column in others:
        if _width([*blocks[-1], column]) > HELP_WIDTH and len(blocks[-1]) > 1:
            blocks.append([first])
        blocks[-1].append(column)
    return "\n".join(map(_block, blocks))


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + len(GAP) for column in columns) - len(GAP)


def _block(columns: Sequence[Sequence[str]]) -> str:
    """Return columns side by side, as lines of text."""
    padded = [[word.ljust(max(map(len, column))) for word in column] for column in columns]
    return "".join(GAP.join(line).rstrip() + "\n" for line in zip(*padded, strict=True))


def _shortened(word: str) -> str:
    """Return a word, without its middle if it is longer than `WORD_WIDTH`."""
    if len(word) <= WORD_WIDTH:
        return word
    half = (WORD_WIDTH - 3) // 2
    return f"{word[:half]}...{word[-half:]}"


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips results", __doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of several"
    )
    parser.add_argument("--csv", action="store_true", help="write comma-separated values")
    return parser


def show(argv: Sequence[str]) -> str:
    """Return the table for a command line.

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
    """Print the table, and return the exit code."""
    return answer(show, argv)
