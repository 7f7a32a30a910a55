"""Curves of measured values: means, and bands of several curves."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

GRID = 200  # number of points of a band, or of means


class Point(NamedTuple):
    """A measured value, with the progress of the run.

    Attributes:
        seconds: Time of the run's jobs so far, without pauses between jobs and without the start
            of their ranks.
        updates: Number of applied updates.
        epoch: Passes over the data, with a fraction.
        samples: Number of samples trained on; NaN if unknown.
        value: The measured value; may be NaN or infinite.
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
        """Append a point."""
        self._numbers.extend(point)

    @property
    def count(self) -> int:
        """Number of points."""
        return len(self._numbers) // len(Point._fields)

    @property
    def last(self) -> Point | None:
        """The last point; None without any."""
        return Point(*self._numbers[-len(Point._fields) :]) if self._numbers else None

    @property
    def points(self) -> Any:
        """A copy of all points: a record array with the fields of `Point`, shape (n,)."""
        return np.array(self._numbers).view(DTYPE).view(np.recarray)

    @property
    def is_long(self) -> bool:
        """Whether the curve has too many points for a line through all of them."""
        return self.count > 2 * GRID

    @property
    def smooth(self) -> Any:
        """The points to draw a line through: `means` of a long curve, else all points."""
        return self.means() if self.is_long else self.points

    def means(self, most: int = GRID) -> Any:
        """Return the mean value of each of at most `most` ranges with equally many points.

        A range without a finite value has the mean NaN.
        """
        points, span = self.points, max(1, -(-self.count // most))
        begins, finite = np.arange(0, self.count, span), np.isfinite(points.value)
        means = points[np.minimum(begins + span // 2, self.count - 1)]
        with np.errstate(invalid="ignore", over="ignore"):
            sums = np.add.reduceat(np.where(finite, points.value, 0.0), begins)
            means.value = sums / np.add.reduceat(finite, begins, dtype="i8")
        return means


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Return the lowest, median and highest value of several curves.

    The band covers the abscissae at which more than half of the curves have a value. If that is
    less than a quarter of the range, for example since one run took much longer, it covers all.

    Args:
        curves: Abscissae and values of each curve, shapes (n,), with at least one point.

    Returns:
        Abscissae, and the lowest, the median and the highest value at each, NaN outside the band;
        shapes (m,).
    """
    grid = np.linspace(min(x.min() for x, _ in curves), max(x.max() for x, _ in curves), GRID)
    rows = []
    for x, y in curves:
        order = np.argsort(x, kind="stable")  # a resumed job may have gone back
        rows.append(np.interp(grid, x[order], y[order], left=np.nan, right=np.nan))
    lines = np.full((3, GRID), np.nan)
    counts = np.isfinite(rows).sum(axis=0)
    known = counts > len(curves) // 2
    if 4 * known.sum() < (counts > 0).sum():
        known = counts > 0
    lines[:, known] = np.nanpercentile(np.array(rows)[:, known], [0, 50, 100], axis=0)
    return grid, *lines
