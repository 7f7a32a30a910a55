"""The order of samples: each once an epoch, by seed and epoch alone, block by block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.datasets.order import Order, shuffled


@settings(deadline=None, max_examples=80)
@given(
    n=st.integers(1, 400),
    batch=st.integers(1, 30),
    batches=st.integers(0, 6),
    step=st.integers(1, 60),
    epoch=st.integers(0, 5),
)
def test_every_sample_exactly_once(n: int, batch: int, batches: int, step: int, epoch: int) -> None:
    order = Order(n, batch, batch * batches, seed=3)
    parts = [order.sample_ids(epoch, b, min(b + step, n)) for b in range(0, n, step)]
    ids = order.sample_ids(epoch, 0, n)
    assert ids.dtype == np.int64
    assert np.array_equal(ids, np.concatenate(parts))
    assert np.array_equal(np.sort(ids), np.arange(n))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n", [1, 40, 43, 103])
def test_blocks_and_their_places(n: int, shuffle: bool) -> None:
    order, seen = Order(n, 2, 10, seed=4, shuffle=shuffle), list[list[int]]()
    for epoch in range(2):
        places = [order.place(epoch, position) for position in range(n)]
        assert sorted(set(places)) == list(range(order.count))
        found = [order.block_at(epoch * order.count + place) for place in places]
        assert np.array_equal(found, order.sample_ids(epoch, 0, n) // 10)
        assert np.count_nonzero(np.diff(found)) == order.count - 1  # one after another
        seen.append(list(dict.fromkeys(found)))
    assert (seen[0] != seen[1]) == (shuffle and n > 1), "of each epoch another order"


@pytest.mark.parametrize("block", [0, 8, 10, 1000])
def test_depends_on_seed_and_epoch_only(block: int) -> None:
    orders = [Order(103, 2, block, seed) for seed in (5, 5, 6)]
    first, second = (orders[0].sample_ids(epoch, 0, 103) for epoch in (0, 1))
    for _ in range(3):  # through the caches, and from another object
        orders[0].sample_ids(7, 0, 103)
        assert np.array_equal(orders[0].sample_ids(0, 0, 103), first)
    assert np.array_equal(orders[1].sample_ids(1, 0, 103), second)
    for other in (second, orders[2].sample_ids(0, 0, 103), np.arange(103)):
        assert not np.array_equal(first, other)


def test_the_same_on_every_machine() -> None:
    # Numbers written down once: a resumed run relies on them under another NumPy.
    assert shuffled(8, 0, 1, 2).tolist() == [5, 1, 4, 6, 3, 2, 0, 7]
    assert Order(10, 2, 4, seed=1).sample_ids(0, 0, 10).tolist() == [8, 9, 0, 2, 3, 1, 4, 6, 5, 7]
    assert Order(5, 2, 1, seed=1).sample_ids(0, 0, 5).tolist() == [2, 0, 4, 3, 1]


def test_shuffled_is_even() -> None:
    counts = np.zeros((4, 4), int)
    for key in range(4000):
        counts[np.arange(4), shuffled(4, key)] += 1
    assert np.all(np.abs(counts - 1000) < 140)  # five standard deviations
    keys = [(1,), (1, 0), (2**32,), (2**32 + 1,), (0, 1)]
    assert len({tuple(shuffled(50, *key)) for key in keys}) == 5, "large keys are told apart"


@pytest.mark.parametrize("block", [0, 4])
def test_edges(block: int) -> None:
    for position in (0, 4, 9):
        assert Order(9, 4, block, seed=0).sample_ids(0, position, position).shape == (0,)
    assert Order(1, 4, block, seed=0).sample_ids(3, 0, 1).tolist() == [0]
    assert Order(0, 4, block, seed=0).sample_ids(3, 0, 0).shape == (0,)
    for outside in ((0, -1, 3), (0, 3, 2), (0, 0, 11), (-1, 0, 1)):
        with pytest.raises(ValueError, match="positions"):
            Order(10, 2, block, seed=0).sample_ids(*outside)
