"""View of running jobs in a terminal: ``python -m mpips watch RUN [RUN ...]``.

Each RUN is the folder of a run, of a sweep, or of several runs, on a file system of this host. The
view has a line for each run, its curves, and for a single run on this host the phase of each rank.
It is updated every second until Ctrl-C, and includes new runs. If each RUN is the folder of one
run, the command ends when all are done. If the output is no terminal, it prints the view once. It
does not start MPI.
"""

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpips import extras
from mpips.checkpoint.run_folder import CONFIG, DONE, is_claimed
from mpips.config.jobfile import verbatim
from mpips.errors import UserError, perform
from mpips.launch.ranks import ranks_table
from mpips.tools.report.curves import Curve
from mpips.tools.report.figures import engineered, shown
from mpips.tools.report.record import MEASURES, RATE, RUNNING, Lines, Record, shortest_names
from mpips.tools.results import find_runs

if TYPE_CHECKING:
    from rich.console import Group

EVERY_S = 1.0
LEVELS = "▁▂▃▄▅▆▇█"
LATEST = 4  # number of runs with curves
OTHER_LINES = 26  # lines of the screen below the table of runs
WIDE = 100  # a screen of so many columns has room for all columns of the table
NAME_WIDTH = 20
NAMES = (*MEASURES.values(), RATE)
HEADS = ("run", "state", "epoch", "update", "loss", "held-out", "accuracy", "stale", RATE)
MORE_HEADS = ("saved", "time")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips watch", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several"
    )
    return parser


class Watched:
    """A run whose files are read repeatedly.

    Args:
        path: Folder of the run.
        name: Name of the run.

    Attributes:
        record: Data read so far.
        done: Whether the run is complete.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.record, self.done = Record(name, path), False
        self._lines = Lines(self.record)

    def update(self) -> None:
        """Read the lines that were added since the last call."""
        path = self.record.path
        self.done, self.record.running = (path / DONE).exists(), is_claimed(path)
        with contextlib.suppress(OSError):  # the file does not exist yet, or no longer
            if not self._lines.read():  # another run has replaced this one in the folder
                self.record = Record(self.record.name, path, running=self.record.running)
                self._lines = Lines(self.record)
                self._lines.read()

    @property
    def state(self) -> str:
        """State of the run as text: done, running or not running."""
        if self.done:
            return "done"
        return RUNNING if self.record.running else "not running"


def spark(curve: Curve, width: int, logarithmic: bool = False) -> str:
    """Return a curve as a line of block characters, scaled from the lowest to the highest value.

    Args:
        curve: A curve of at least one point.
        width: Largest number of characters.
        logarithmic: Whether to draw logarithms, if all values are positive.
    """
    points = curve.points
    values = np.where(np.isfinite(points.value), points.value, np.nan)
    if logarithmic and np.fmin.reduce(values) > 0:
        values = np.log(values)
    seconds = points.seconds - points.seconds[0]
    cells = np.minimum(width - 1, (seconds / (seconds[-1] or 1) * width).astype(int))
    known = np.isfinite(values)
    if not known.any():
        return ""
    counts = np.bincount(cells[known])
    means = np.bincount(cells[known], values[known])[counts > 0] / counts[counts > 0]
    levels = (means - means.min()) / (np.ptp(means) or 1) * (len(LEVELS) - 1) + 0.5
    text = np.array(list(LEVELS))[levels.astype(int)]
    return "".join(text[np.maximum(0, np.cumsum(counts > 0) - 1)])  # fills gaps from the left


def screen(runs: Sequence[Watched], width: int, height: int) -> "Group":
    """Return the view: a table of runs, curves, and ranks. Running runs come first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ordered = sorted(runs, key=lambda run: (not run.record.running, run.done))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in (*HEADS, *MORE_HEADS) if width >= WIDE else HEADS:
        left = head in HEADS[:2]
        table.add_column(head, justify="left" if left else "right", max_width=NAME_WIDTH)
    rows = max(LATEST, height - OTHER_LINES)
    for run in ordered[:rows]:
        table.add_row(*map(Text, _row(run)[: len(table.columns)]))
    more = f"and {len(runs) - rows} more" if len(runs) > rows else "" if runs else "no run yet"
    curves = Table(box=None, pad_edge=False, show_header=False)
    curves.add_column(max_width=NAME_WIDTH)
    for run in [run for run in ordered if run.record.curves][:LATEST]:
        names = [name for name in NAMES if name in run.record.curves]
        for k, name in enumerate(names):
            line = spark(run.record.curves[name], max(10, width - 50), "loss" in name)
            last = run.record.last(name)
            label = Text(run.record.name if k == 0 else "", overflow="ellipsis", no_wrap=True)
            curves.add_row(label, name, Text(line, style="cyan", no_wrap=True), shown(last))
    ranks = ""
    if len(runs) == 1 and runs[0].record.running:
        with contextlib.suppress(UserError):  # the ranks are on another host, or just starting
            ranks = ranks_table(runs[0].record.path)
    return Group(table, more, curves, Text(f"\n{ranks}", no_wrap=True) if ranks else "")


def _row(run: Watched) -> list[str]:
    """Return the cells of a run's row in the table."""
    record = run.record
    train = record.curves.get("training loss")
    point, saved = train.last if train else None, record.checkpoints.last
    last = (record.last(name) for name in NAMES)
    return [
        record.name,
        run.state,
        f"{point.epoch:.2f}" if point else "-",
        f"{point.updates:.0f}" if point else "-",
        *(
            engineered(float(f"{v:.4g}")) if v is not None and v >= 1 else shown(v) for v in last
        ),
        f"{saved.updates:.0f}" if saved else "-",
        _clock(record.jobs[-1][1]) if record.jobs else "-",
    ]  # fmt: skip


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _update(folders: Sequence[Path], known: dict[Path, Watched]) -> list[Watched]:
    """Add new runs to `known`, read all runs' new lines, and return the runs."""
    with contextlib.suppress(UserError):  # no run yet
        for path in find_runs(folders):
            known.setdefault(path, Watched(path, ""))
    names = shortest_names(list(known)) if known else []
    for run, name in zip(known.values(), names, strict=True):
        run.record.name = name
        run.update()
    return list(known.values())


def watch(argv: Sequence[str]) -> None:
    """Show runs until they are done.

    Raises:
        UserError: If a folder does not exist, rich is not installed, or the output is no terminal
            and there is no run.
    """
    args = make_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may lack the blocks of curves
        sys.stdout.reconfigure(errors="replace")
    for folder in args.runs:
        if not folder.is_dir():
            find_runs([folder])  # raises the error
    live = extras.load("rich.live", "rich", "watch", "draws the screen")
    console = extras.load("rich.console", "rich", "watch", "draws the screen").Console()
    known: dict[Path, Watched] = {}
    if not console.is_terminal:
        find_runs(args.runs)
        console.print(screen(_update(args.runs, known), *console.size))
        return
    with contextlib.suppress(KeyboardInterrupt), live.Live(console=console) as view:
        while True:
            runs = _update(args.runs, known)
            view.update(screen(runs, *console.size), refresh=True)
            single = all((folder / CONFIG).exists() for folder in args.runs)
            if single and all(run.done and not run.record.running for run in runs):
                return
            time.sleep(EVERY_S)


def main(argv: Sequence[str]) -> int:
    """Show the runs, and return the exit code."""
    return perform(watch, argv)
