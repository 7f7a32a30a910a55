"""Sums of reports, and fragments of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.layout import cut, fragment_shards
from mpips.rounds.base import DIGIT, SIGNALS, first_reported, report_one


@given(size=st.integers(0, 5000), owners=st.integers(1, 5), fragments=st.integers(1, 6))
def test_fragments_are_equal_parts_of_every_shard(size: int, owners: int, fragments: int) -> None:
    shards = cut(size, owners)
    found = fragment_shards(shards, fragments, 4)
    assert len(found) == fragments
    for owner, shard in enumerate(shards):
        parts = [fragment[owner] for fragment in found]
        ends = [shard.begin, *(part.end for part in parts)]
        assert [part.begin for part in parts] == ends[:-1]
        assert ends[-1] == shard.end
        sizes = [part.size for part in parts]
        assert max(sizes) - min(sizes) <= 32  # lines of 16, the last one perhaps a part of one


@pytest.mark.parametrize("ranks", [1, 2, DIGIT - 1])
def test_the_first_signal_that_came_is_read_off_the_sum(ranks: int) -> None:
    for k, name in enumerate(SIGNALS):
        later = sum(ranks * report_one(SIGNALS, other) for other in SIGNALS[k:])
        assert float(int(later)) == later
        assert first_reported(SIGNALS, later) == name
        assert first_reported(SIGNALS, ranks * report_one(SIGNALS, name)) == name
    assert first_reported(SIGNALS, 0.0) == ""
