"""Fragments of a model: how they are cut; what is done with them, tests/strategies/ has."""

from hypothesis import given
from hypothesis import strategies as st

from mpips.layout import Shard, cut
from mpips.rounds.streaming import fragment_shards


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


def test_an_owner_without_parameters_has_no_fragments() -> None:
    assert fragment_shards([Shard(0, 32), Shard(32, 32)], 2, 4) == [
        [Shard(0, 16), Shard(32, 32)],
        [Shard(16, 32), Shard(32, 32)],
    ]
