"""What the sum of reports says of signals."""

import pytest

from mpips.rounds.base import DIGIT, SIGNALS, of_signal, signal_of


@pytest.mark.parametrize("ranks", [1, 2, DIGIT - 1])
def test_the_first_signal_that_came_is_read_off_the_sum(ranks: int) -> None:
    for k, name in enumerate(SIGNALS):
        later = sum(ranks * of_signal(other) for other in SIGNALS[k:])
        assert float(int(later)) == later
        assert signal_of(later) == name
        assert signal_of(ranks * of_signal(name)) == name
    assert signal_of(0.0) == ""
