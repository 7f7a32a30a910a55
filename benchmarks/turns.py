"""Sides of a comparison that take turns, and rates of whole runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mpips.tools.bench.jobs import Failed
from mpips.tools.bench.measure import Ratio, compare

T = TypeVar("T")


def take_turns(sides: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call each side `repeats` times, in turn, and return the results by side."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            found[name].append(side())
    return found


def compare_rates(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, Ratio]:
    """Return the medians of two series of rates taken in turn, and of the ratios mine / other."""
    theirs, ours, ratio = compare(other, mine)
    return ours, theirs, ratio


def steady_rate(path: Path) -> float:
    """Return the rate between a run's first progress line and its last but one, in samples/s.

    So the rate excludes the start and the first step. The last line is after the last checkpoint.

    Raises:
        Failed: If there are too few lines.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"][:-1]
    if len(train) < 2 or train[-1]["time_s"] <= train[0]["time_s"]:
        raise Failed(f"{path.parent} was too short to be measured: {len(train) + 1} lines")
    samples = train[-1]["samples"] - train[0]["samples"]
    seconds = train[-1]["time_s"] - train[0]["time_s"]
    return float(samples / seconds)
