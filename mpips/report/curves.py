"""Curves of any length in bounded memory, and several of them as a band."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

MOST = 2_000  # points of a curve that are kept
GRID = 200  # points of a band, or of means


class Point(NamedTuple):
    """A value, and how far the run was.

    Attributes:
        seconds: That jobs of the run had taken, one after the other, without pauses between them
            and without their start until ranks are ready.
        updates: Applied.
        epoch: Passes over the data.
        samples: Trained on; NaN where a line does not tell.
        value: Of what is measured; may be NaN or infinite.
    """

    seconds: float
    updates: float
    epoch: float
    samples: float
    value: float


class Curve:
    """The points of a curve, some of which are left out where there are many.

    Of equally long stretches the lowest and the highest stay, so that no spike is lost; the first
    and the last one stay in any case.

    Args:
        most: How many points stay at the most, beside the first and the last; a multiple of 4.

    Attributes:
        count: How many were added.
    """

    def __init__(self, most: int = MOST) -> None:
        self.count = 0
        self._most, self._span = most // 2, 1
        self._stretches: list[tuple[Point, ...]] = []
        self._sums: list[list[float]] = []  # of each stretch: its finite values, how many, and all
        self._first: Point | None = None
        self._last: Point | None = None

    def add(self, point: Point) -> None:
        """Add a point, behind all others."""
        self.count += 1
        self._first, self._last = self._first or point, point
        if not self._sums or self._sums[-1][2] == self._span:
            self._begin()
        self._stretches[-1] = _with(self._stretches[-1], point)
        sums = self._sums[-1]
        sums[2] += 1
        if math.isfinite(point.value):
            sums[0] += point.value
            sums[1] += 1

    def _begin(self) -> None:
        """Begin a stretch; where there are too many, make one of each two."""
        if len(self._stretches) == self._most:
            two = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [reduce(_with, b, a) for a, b in two]
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [[x + y for x, y in zip(*pair, strict=True)] for pair in pairs]
            self._span *= 2
        self._stretches.append(())
        self._sums.append([0.0, 0, 0])

    @property
    def points(self) -> list[Point]:
        """Those that stay, in their order."""
        found = [point for stretch in self._stretches for point in stretch]
        if self._first is not None and found[0] != self._first:
            found.insert(0, self._first)
        if self._last is not None and found[-1] != self._last:
            found.append(self._last)
        return found

    @property
    def smooth(self) -> list[Point]:
        """Through what a line is drawn: all points where they are few, means where they are not."""
        return self.points if len(self._sums) <= 2 * GRID else self.means()

    def means(self, most: int = GRID) -> list[Point]:
        """Return the mean of each of at most so many equally long stretches; NaN without any."""
        step = max(1, math.ceil(len(self._sums) / most))
        found = []
        for k in range(0, len(self._sums), step):
            total, n = (sum(sums[i] for sums in self._sums[k : k + step]) for i in (0, 1))
            points = [point for stretch in self._stretches[k : k + step] for point in stretch]
            middle = points[len(points) // 2]
            found.append(middle._replace(value=total / n if n else math.nan))
        return found


def _height(point: Point) -> float:
    """Return the value; what is not a number counts as highest."""
    return math.inf if math.isnan(point.value) else point.value


def _with(stretch: tuple[Point, ...], point: Point) -> tuple[Point, ...]:
    """Return the lowest and the highest of a stretch and the point behind it, in their order."""
    if len(stretch) < 2:
        return (*stretch, point)
    first, second = stretch
    low, high = (first, second) if _height(first) <= _height(second) else (second, first)
    if _height(point) > _height(high):
        return (low, point)
    return (high, point) if _height(point) < _height(low) else stretch


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Return where several curves lie, at the places where most of them are.

    Where that is less than a quarter of all places, as by time where one job took much longer, it
    is at all of them.

    Args:
        curves: Of each the abscissae and the values, shapes (n,), at least one point.

    Returns:
        Abscissae, and the lowest, the median and the highest value at each, NaN where there are
        fewer curves; shapes (m,).
    """
    grid = np.linspace(min(x.min() for x, _ in curves), max(x.max() for x, _ in curves), GRID)
    rows = []
    for x, y in curves:
        order = np.argsort(x, kind="stable")  # a job that was resumed may have gone back
        rows.append(np.interp(grid, x[order], y[order], left=np.nan, right=np.nan))
    found = np.full((3, GRID), np.nan)
    there = np.isfinite(rows).sum(axis=0)
    known = there > len(curves) // 2
    if 4 * known.sum() < (there > 0).sum():
        known = there > 0
    found[:, known] = np.nanpercentile(np.array(rows)[:, known], [0, 50, 100], axis=0)
    return grid, *found
