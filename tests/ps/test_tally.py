"""What a server has counted."""

import numpy as np

from mpips.ps.shard import STALENESS_BINS, Tally
from mpips.transport.push import Push


def push(version: int, *others: Push) -> Push:
    return Push(0, 1, (0, 0, 1), 1, 0.0, version, np.zeros(0), others=others)


def test_the_mean_staleness_since_it_was_last_asked() -> None:
    tally, most = Tally(), STALENESS_BINS + 4
    assert tally.recent() is None
    for staleness in (0, 1, most):
        tally.count(push(most - staleness), most, staleness, 0.0)
    assert tally.recent() == (most + 1) / 3
    assert tally.recent() is None
    tally.count(push(5, push(6)), 7, 2, 0.0)
    assert tally.recent() == 1.5
    assert (tally.handled, tally.staleness_max) == (5, most)
