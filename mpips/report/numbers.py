"""The numbers of a report as comma-separated values."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpips.report.figures import Figure
from mpips.report.page import run_table
from mpips.report.record import Record

CURVES = ("run", "measure", "seconds", "samples", "updates", "value")


def write_numbers(runs: Sequence[Record], figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write the table of runs, all points of the curves, and the numbers of other figures.

    Returns:
        The files, which are replaced where they are there.

    Raises:
        OSError: If one cannot be written.
    """
    heads, cells = run_table(runs)
    rows = ([cell.text for cell in row] for row in cells)
    files = [_write(folder / "runs.csv", heads, rows)]
    files.append(_write(folder / "curves.csv", CURVES, _points(runs)))
    for figure in figures:
        if not figure.measure:
            files.append(
                _write(folder / f"{figure.name}.csv", figure.table.heads, figure.table.rows)
            )
    return files


def _points(runs: Sequence[Record]) -> Iterable[Sequence[Any]]:
    for run in runs:
        for measure, curve in run.curves.items():
            for point in curve.points:
                samples = run.samples_at(point)
                yield (run.name, measure, point.seconds, samples, point.updates, point.value)


def _write(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows(rows)
    return path
