"""What the sum of reports says of signals."""

import pytest

from mpips.rounds.base import DIGIT, SIGNALS, first_reported, report_one


@pytest.mark.parametrize("ranks", [1, 2, DIGIT - 1])
def test_the_first_signal_that_came_is_read_off_the_sum(ranks: int) -> None:
    for k, name in enumerate(SIGNALS):
        later = sum(ranks * report_one(SIGNALS, other) for other in SIGNALS[k:])
        assert float(int(later)) == later
        assert first_reported(SIGNALS, later) == name
        assert first_reported(SIGNALS, ranks * report_one(SIGNALS, name)) == name
    assert first_reported(SIGNALS, 0.0) == ""
