"""Curves that few points are drawn of, and bands."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.tools.report.curves import Curve, Point, band

NUMBERS = st.lists(st.floats(allow_nan=True, width=32), min_size=1, max_size=300)


def curve(values: list[float], most: int) -> Curve:
    made = Curve(most)
    for k, value in enumerate(values):
        made.add(Point(float(k), k, k, k, value))
    return made


@settings(deadline=None)
@given(NUMBERS)
def test_what_stays(values: list[float]) -> None:
    """The ends, the lowest and the highest, in order, and no more than is allowed."""
    made = curve(values, 20)
    kept = made.points
    at = [int(point.seconds) for point in kept]
    assert made.count == len(values)
    assert at == sorted(set(at))
    assert (at[0], at[-1], len(at) <= 22) == (0, len(values) - 1, True)
    assert all(p.value == values[k] or math.isnan(values[k]) for k, p in zip(at, kept, strict=True))
    if not any(map(math.isnan, values)):
        found = [point.value for point in kept]
        assert (min(found), max(found)) == (min(values), max(values))
    if len(values) <= 10:
        assert len(kept) == len(values)


def test_means() -> None:
    """Of equally long stretches, of what is finite."""
    made = curve([float(k % 10) if k % 4 else math.nan for k in range(10_000)], 2_000)
    found = made.means(100)
    assert 60 <= len(found) <= 100
    assert all(4.5 < point.value < 5.5 for point in found)
    assert [p.seconds for p in found] == sorted({p.seconds for p in found})
    assert math.isnan(curve([math.nan], 20).means()[0].value)
    few = curve([1.0, 5.0, 2.0], 20)
    assert [p.value for p in few.smooth] == [1.0, 5.0, 2.0]


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
