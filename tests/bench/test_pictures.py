"""The picture of the bench of convergence."""

import re
from pathlib import Path

import numpy as np

from benchmarks import curves


def curve(*accuracies: float) -> np.ndarray:
    return np.array([np.linspace(1, 9, len(accuracies)), accuracies])


def test_each_panel_shows_its_own_best(tmp_path: Path) -> None:
    """A problem that is hard leaves the curves of an easy one in view, and the other way round."""
    easy = {"serial": [curve(20, 90, 97), curve(30, 92, 97)], "async": [curve(10, 85, 96)]}
    hard = {"none": [curve(30, 35, 36)]}
    panels = [("digits: modes", "seconds", easy), ("spirals: codecs", "MB", hard)]
    curves.draw(panels, tmp_path / "found.svg")
    texts = re.findall(r">([^<]+)</text>", (tmp_path / "found.svg").read_text())
    assert {"digits: modes", "spirals: codecs", "seconds", "MB", "serial", "none"} <= set(texts)
    shown = {int(text) for text in texts if text.isdigit()}
    assert any(90 < number <= 97 for number in shown)
    assert 30 in shown


def test_a_mean_is_as_long_as_its_shortest_curve() -> None:
    x, y = curves.mean([curve(0, 80), np.array([[2.0, 5.0], [40.0, 40.0]])])
    assert (x[0], x[-1]) == (2.0, 5.0)
    np.testing.assert_allclose([y[0], y[-1]], [25, 40])
