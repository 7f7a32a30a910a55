"""What a server has counted."""

from mpips.ps.shard import STALENESS_BINS, Tally


def test_the_mean_staleness_since_it_was_last_asked() -> None:
    tally = Tally()
    assert tally.recent() is None
    for staleness in (0, 1, STALENESS_BINS + 4):
        tally.count(staleness)
    assert tally.recent() == (STALENESS_BINS + 5) / 3
    assert tally.recent() is None
    tally.count(2)
    tally.count(1)
    assert tally.recent() == 1.5
