"""Points of curves, their means, and bands."""

import math

import numpy as np
import pytest

from mpips.tools.report.curves import GRID, Curve, Point, band


def curve(values: list[float]) -> Curve:
    made = Curve()
    for k, value in enumerate(values):
        made.add(Point(float(k), k, k, k, value))
    return made


def test_points_and_means() -> None:
    """Means are of equally long stretches, of what is finite; few points stay as they are."""
    made = curve([float(k % 10) if k % 4 else math.nan for k in range(10_000)])
    found = made.means(100)
    assert (made.count, 60 <= len(found) <= 100) == (10_000, True)
    assert (found.value > 4.5).all()
    assert (found.value < 5.5).all()
    assert found.seconds.tolist() == list(range(50, 10_000, 100)), "the middle of each"
    assert len(made.smooth) == GRID
    assert math.isnan(curve([math.nan]).means()[0].value)
    few = curve([1.0, 5.0, 2.0])
    assert [p.value for p in few.smooth] == [1.0, 5.0, 2.0]
    assert few.last == few.points[-1].tolist() == (2.0, 2.0, 2.0, 2.0, 2.0)
    assert curve([]).last is None


def test_a_band() -> None:
    """Where two of three curves are, in any order of their points."""
    one = np.array([0.0, 10.0]), np.array([0.0, 10.0])
    two = np.array([10.0, 0.0]), np.array([11.0, 1.0])
    three = np.array([0.0, 5.0]), np.array([5.0, 10.0])
    x, low, mid, high = band([one, two, three])
    assert (x[0], x[-1]) == (0, 10)
    assert np.allclose(low, x)
    assert np.allclose(mid[x > 5], x[x > 5] + 0.5)
    assert np.allclose(mid[x < 5], x[x < 5] + 1)
    assert np.allclose(high[x < 5], x[x < 5] + 5)


@pytest.mark.filterwarnings("error")
def test_a_band_of_curves_that_do_not_meet() -> None:
    one = np.array([0.0, 1.0]), np.array([1.0, 1.0])
    two = np.array([9.0, 10.0]), np.array([2.0, 2.0])
    x, low, _, high = band([one, two])
    assert np.isnan(low[(x > 1) & (x < 9)]).all()
    assert (low[0], high[-1]) == (1.0, 2.0)
    meets = np.array([0.9, 10.0]), np.array([2.0, 2.0])  # a hundredth of the way
    _, low, _, high = band([one, meets])
    assert (low[0], high[-1]) == (1.0, 2.0)
    assert np.isfinite(low).all()
    assert np.allclose(band([one])[2], 1.0)
