"""Jobs that measures start: worlds of this command, runs of ``mpips.train``."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mpips.bench.catalogue import Measure
from mpips.bench.measure import Options, Row
from mpips.launch.mpirun import Running

T = TypeVar("T")

LIMIT_S = 900.0
TAIL = 2000  # characters of a failed job's output that are shown
TRAIN = ("-m", "mpips.train", "--quiet")


class Failed(Exception):
    """A job that a measure needs has failed, with the end of what it printed."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="mpips-bench-") as name:
        yield Path(name)


def run(
    ranks: int,
    args: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> tuple[float, str]:
    """Run ``mpirun -n ranks python *args`` in `cwd`; returns its seconds and what it printed.

    Raises:
        Failed: If it does not end in time with exit code 0.
    """
    start = time.perf_counter()
    with Running(ranks, args, cwd, env, wrapper) as job:
        try:
            done = job.wait(LIMIT_S)
        except TimeoutError as error:
            raise Failed(str(error)[-TAIL:]) from None
        spent = time.perf_counter() - start
    if done.code:
        raise Failed(f"exit code {done.code} of {' '.join(args)}:\n{done.output[-TAIL:]}")
    return spent, done.output


def world(measure: Measure, ranks: int, options: Options) -> list[Row]:
    """Take a measure in a world of its own.

    Raises:
        Failed: If the world fails.
    """
    args = ["-m", measure.package, measure.name, *words(options)]
    with temporary_folder() as folder:
        run(ranks, [*args, "--json", "rows.json"], folder)
        found = json.loads((folder / "rows.json").read_text())["rows"]
    return [Row.from_json(row) for row in found]


def words(options: Options) -> list[str]:
    """Return the options as a world of this command takes them."""
    found = ["--repeats", str(options.repeats), *["--quick"] * options.quick]
    return found + ["--sizes", ",".join(map(str, options.sizes))] * bool(options.sizes)


def take_turns(sides: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call each side `repeats` times, in turn; returns what they gave."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            found[name].append(side())
    return found


def compare_rates(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the medians of two series of rates taken in turn, and of mine over other."""
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    return statistics.median(mine), statistics.median(other), statistics.median(ratios)


def steady_rate(path: Path) -> float:
    """Return the samples per second between a run's first progress line and its last but one.

    Before the first there is the start, and the first step; the last is written after the last
    checkpoint.

    Raises:
        Failed: If there are fewer lines.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"][:-1]
    if len(train) < 2 or train[-1]["time_s"] <= train[0]["time_s"]:
        raise Failed(f"{path.parent} was too short to be measured: {len(train) + 1} lines")
    samples = train[-1]["samples"] - train[0]["samples"]
    seconds = train[-1]["time_s"] - train[0]["time_s"]
    return float(samples / seconds)
