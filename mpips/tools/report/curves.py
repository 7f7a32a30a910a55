"""Curves of measured values: means, and bands of several curves."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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


DTYPE = [(name, "f8") for name in Point._fields]


class Curve:
    """The points of a curve, 40 bytes each."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def add(self, point: Point) -> None:
        """Add a point, behind all others."""
        self._numbers.extend(point)

    @property
    def count(self) -> int:
        """How many were added."""
        return len(self._numbers) // len(Point._fields)

    @property
    def last(self) -> Point | None:
        """The newest one; None without any."""
        return Point(*self._numbers[-len(Point._fields) :]) if self._numbers else None

    @property
    def points(self) -> Any:
        """A copy of all points, a record array with the fields of `Point`, shape (n,)."""
        return np.array(self._numbers).view(DTYPE).view(np.recarray)

    @property
    def is_long(self) -> bool:
        """Whether a line through all points would be a blot."""
        return self.count > 2 * GRID

    @property
    def smooth(self) -> Any:
        """What a line is drawn through: of a long curve `means`, else all points."""
        return self.means() if self.is_long else self.points

    def means(self, most: int = GRID) -> Any:
        """Return the mean of each of at most so many equally long stretches; NaN without any."""
        points, span = self.points, max(1, -(-self.count // most))
        begins, finite = np.arange(0, self.count, span), np.isfinite(points.value)
        found = points[np.minimum(begins + span // 2, self.count - 1)]
        with np.errstate(invalid="ignore", over="ignore"):
            sums = np.add.reduceat(np.where(finite, points.value, 0.0), begins)
            found.value = sums / np.add.reduceat(finite, begins, dtype="i8")
        return found


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
