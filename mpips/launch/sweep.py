"""Sweeps: a table with a line of options for each run, and the rows that are to be run."""

import re
import shlex
from pathlib import Path

from mpips.checkpoint.run_folder import DONE
from mpips.errors import UserError

ARRAY = re.compile(r"(?P<rows>\d+(-\d+)?(,\d+(-\d+)?)*)?(?P<at_once>%[1-9]\d*)?")


def read_table(path: str) -> list[list[str]]:
    """Return the rows of a sweep's table, as words; those in quotes may have spaces.

    Raises:
        UserError: If it cannot be read, has an open quote, or no row.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--sweep {path}: {problem}", "a text file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            rows.append(shlex.split(line))
        except ValueError as problem:
            got = f"{path}, line {number}: {str(problem).lower()}"
            raise UserError(got, "options of mpips.train") from None
    if not rows:
        raise UserError(f"--sweep {path} without a row", "options of mpips.train on each line")
    return rows


def read_row(table: str, number: int) -> list[str]:
    """Return a row of a table, the first of which is 1."""
    rows = read_table(table)
    if number > len(rows):
        raise UserError(f"row {number} of {table}, which has {len(rows)}", f"1 to {len(rows)}")
    return rows[number - 1]


def rows_to_run(array: str, rows: int, out: str | None) -> str:
    """Return the rows to run, as SLURM writes them: those asked for, or all that are not done.

    Args:
        array: What is asked for, such as ``1-6%2``; empty for all.
        rows: Of the table.
        out: Folder of the sweep's runs, if it is known.

    Raises:
        UserError: If the table has no such rows, or all are done.
    """
    match = ARRAY.fullmatch(array)
    if match is None:
        raise UserError(f"--array {array}", "rows such as 1-6, 2,5 or 1-6%2")
    asked = [int(number) for number in re.findall(r"\d+", match["rows"] or "")]
    if asked and not 1 <= min(asked) <= max(asked) <= rows:
        raise UserError(f"--array {array} of a table of {rows} rows", f"1 to {rows}")
    left = [k for k in range(1, rows + 1) if not (out and (Path(out) / f"{k}" / DONE).exists())]
    if not left:
        raise UserError(f"--out {out}, where all {rows} rows are done", "one that is not")
    every = f"1-{rows}" if len(left) == rows else ",".join(map(str, left))
    return (match["rows"] or every) + (match["at_once"] or "")
