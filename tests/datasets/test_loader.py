"""Batches as they are read: blocks, threads and errors; the order of samples; augmented images."""

import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import until
from test_datasets import WRITE, opened, write_h5

from mpips.config import Config
from mpips.datasets import Dataset
from mpips.datasets.base import Source
from mpips.datasets.loader import CACHE_BYTES, CACHED_BLOCKS, Augment, Blocks, Loader, augment_of
from mpips.datasets.order import Order, shuffled
from mpips.errors import UserError

N = 103
BLOCK = 20


@pytest.fixture
def file_data(tmp_path: Path) -> Dataset:
    """Sample k is [k, -k], its label k % 10."""
    k = np.arange(N)
    return write(tmp_path / "a.h5", np.stack([k, -k], axis=1).astype("f8"), k % 10)


@pytest.fixture(params=["in memory", "in a file"])
def source(request: pytest.FixtureRequest, file_data: Dataset) -> Source:
    found = opened("digits").train if request.param == "in memory" else file_data.train
    assert found.in_memory == (request.param == "in memory")
    return found


def write(path: Path, x: Any, y: Any) -> Dataset:
    return opened(write_h5(path, x, y), test_fraction=0)


def loader_of(source: Source) -> Loader:
    order = Order(source.n, 0 if source.in_memory else BLOCK, seed=1)
    return Loader(source, order, "float32")


def submit(loader: Loader, n: int, size: int = 5, epoch: int = 0) -> None:
    for begin in range(0, n, size):
        loader.submit(epoch, begin, min(begin + size, n))


def has_threads() -> bool:
    return any(thread.name.startswith(("loader", "blocks")) for thread in threading.enumerate())


class Spy:
    """Notes the blocks of a source that are read; each read waits while `go` is not set."""

    def __init__(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, load = list[int](), threading.Event(), source.load_stored
        self.go.set()

        def note(begin: int, *args: Any) -> Any:
            self.begun.append(begin // BLOCK)
            assert self.go.wait(30)
            return load(begin, *args)

        monkeypatch.setattr(source, "load_stored", note)


@pytest.fixture
def spy(file_data: Dataset, monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(file_data.train, monkeypatch)


def test_batches_hold_the_samples_of_the_order(file_data: Dataset) -> None:
    order = Order(N, BLOCK, seed=1)
    with Loader(file_data.train, order, "float32") as loader:
        for epoch in range(3):
            submit(loader, N, epoch=epoch)
        for epoch in range(3):
            for begin in range(0, N, 5):
                batch = loader.take()
                ids = order.sample_ids(epoch, begin, min(begin + 5, N))
                assert np.array_equal(batch.ids, ids)
                assert np.array_equal(batch.x, np.stack([ids, -ids], axis=1))
                assert np.array_equal(batch.y, ids % 10)
                assert (batch.x.dtype, batch.y.dtype) == (np.float32, np.int64)
        assert loader.pending == 0


def test_memory_needs_no_thread() -> None:
    data = opened("digits", test_fraction=0.2)
    with loader_of(data.train) as loader:
        assert not has_threads()
        assert loader.blocks is None
        submit(loader, data.train.n, 100)
        batches = [loader.take() for _ in range(loader.pending)]
    assert [len(batch) for batch in batches] == [100] * 14 + [38]
    ids = np.concatenate([batch.ids for batch in batches])
    assert np.array_equal(np.sort(ids), np.arange(data.train.n))
    assert batches[0].x.shape == (100, 8, 8)
    assert batches[0].x.flags.writeable, "a gathered batch is the caller's own"


def test_the_next_batch_may_be_looked_at(source: Source) -> None:
    with loader_of(source) as loader:
        assert loader.peek() is None
        submit(loader, 10)
        until(lambda: loader.peek() is not None, 30)
        seen = loader.peek()
        assert loader.pending == 2
        assert loader.take() is seen is not None
        assert not np.array_equal(loader.take().ids, seen.ids)
        assert loader.pending == 0
        assert loader.peek() is None


def test_the_blocks_that_are_kept_are_bounded(tmp_path: Path) -> None:
    """Few of them, bytes as bytes, and of large ones one at a time."""
    x = np.random.default_rng(0).integers(0, 256, (1000, 25, 4), dtype=np.uint8)
    ids = np.arange(0, 1000, 3)
    for stored, bytes_of in ((x.astype("f4") / 255, 408), (x, 108)):
        data = write(tmp_path / f"{bytes_of}.h5", stored, np.arange(1000) % 3)
        blocks = Blocks(data.train, 10, np.dtype("f4"))
        np.testing.assert_allclose(blocks.gather(ids).x, x[ids] / 255, rtol=1e-6)
        assert blocks.nbytes == CACHED_BLOCKS * 10 * bytes_of
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(40, 1 << 20), dtype="f4", chunks=(1, 1 << 20))
        file["y"] = np.zeros(40)
    data = opened(tmp_path / "a.h5", test_fraction=0)
    assert data.train.block(5) == 5  # 20 MB in float32
    blocks = Blocks(data.train, 5, np.dtype("float32"))
    for begin in range(0, 20, 5):
        blocks.gather(np.arange(begin, begin + 1))
        assert 5 << 22 < blocks.nbytes <= CACHE_BYTES, "one block"


def test_the_next_block_is_read_ahead(file_data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(80, BLOCK, 1)  # four blocks
    for asked, ahead in (
        ([0, 1], []),
        ([0, 1, 2], [3]),
        ([0, 1, 2, 3], [4]),
        ([0, 2, 4], [6]),  # of two workers, and on into the next epoch
        ([0, 2, 5], []),
        ([4, 2, 0], []),
    ):
        source = Source(file_data.train.table, file_data.info, range(80))
        spy = Spy(source, monkeypatch)
        with Loader(source, order, "float32") as loader:
            for place in asked:
                loader.submit(place // 4, place % 4 * BLOCK + 5, place % 4 * BLOCK + 10)
                loader.take()
            wanted = list(dict.fromkeys(order.block_at(place) for place in [*asked, *ahead]))
            until(lambda spy=spy, wanted=wanted: len(spy.begun) >= len(wanted), 10)
            time.sleep(0.05)
            assert spy.begun == wanted


def test_each_block_is_read_once_an_epoch(file_data: Dataset, spy: Spy) -> None:
    with loader_of(file_data.train) as loader:
        submit(loader, N, epoch=4)
        for _ in range(loader.pending):
            loader.take()
    assert sorted(spy.begun) == list(range(-(-N // BLOCK)))


def test_the_thread_stays_no_more_than_depth_ahead(
    file_data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, made = Order(N, BLOCK, seed=1), list[int]()
    find = order.sample_ids
    monkeypatch.setattr(order, "sample_ids", lambda *args: made.append(args[1]) or find(*args))
    with Loader(file_data.train, order, "float32") as loader:
        submit(loader, 100)
        until(lambda: len(made) >= 2, 10)
        time.sleep(0.1)
        assert made == [0, 5]
        for pending in (20, 19):
            assert loader.pending == pending
            loader.take()


def test_close_while_a_read_is_under_way(file_data: Dataset, spy: Spy) -> None:
    spy.go.clear()
    loader = loader_of(file_data.train)
    loader.submit(0, 0, 5)
    until(lambda: bool(spy.begun), 10)
    threading.Timer(0.2, spy.go.set).start()
    loader.close()
    assert not has_threads()
    file_data.close()  # the read has ended, so the file may go


def test_a_signal_interrupts_take(file_data: Dataset, spy: Spy) -> None:
    def stop(*_: object) -> None:
        raise InterruptedError("asked to stop")

    spy.go.clear()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with loader_of(file_data.train) as loader:
            loader.submit(0, 0, 5)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(InterruptedError):  # else the read would fail, held for too long
                loader.take()
            spy.go.set()
            assert len(loader.take()) == 5  # nothing was lost
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("bad", [13, 33])
def test_errors_come_out_of_take_in_their_place(tmp_path: Path, bad: int) -> None:
    """Also one of a block that is read ahead; none can be looked at."""
    x = np.ones((60, 2))
    x[bad, 1] = np.nan
    data, good = write(tmp_path / "a.h5", x, np.zeros(60)), 0
    with Loader(data.train, Order(60, 10, seed=0, shuffle=False), "float32") as loader:
        for begin in range(0, 60, 5):
            loader.submit(0, begin, begin + 5)
            if begin // 10 != bad // 10:
                good += len(loader.take())
                continue
            time.sleep(0.02)
            assert loader.peek() is None
            with pytest.raises(UserError, match=rf"sample {bad}, element .1,. is nan"):
                loader.take()
    assert good == 50, "all but both batches of the bad block"


def test_wrong_use(source: Source) -> None:
    """A range outside comes out of `take`; a loader that is closed has no thread, and is closed."""
    loader = loader_of(source)
    loader.submit(0, 0, source.n + 1)
    submit(loader, 100)
    with pytest.raises(ValueError, match="no positions"):
        loader.take()
    assert len(loader.take()) == 5
    for _ in range(2):
        loader.close()
    assert not has_threads()


# The order


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 400), st.integers(1, 30), st.integers(0, 6), st.integers(1, 60))
def test_every_sample_exactly_once(n: int, batch: int, batches: int, step: int) -> None:
    order = Order(n, batch * batches, seed=3)
    for epoch in (0, 5):
        parts = [order.sample_ids(epoch, b, min(b + step, n)) for b in range(0, n, step)]
        ids = order.sample_ids(epoch, 0, n)
        assert ids.dtype == np.int64
        assert np.array_equal(ids, np.concatenate(parts))
        assert np.array_equal(np.sort(ids), np.arange(n))
        assert order.sample_ids(epoch, n, n).shape == (0,)
        with pytest.raises(ValueError, match="positions"):
            order.sample_ids(epoch, 0, n + 1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n", [1, 40, 43, 103])
def test_blocks_and_their_places(n: int, shuffle: bool) -> None:
    order, seen = Order(n, 10, seed=4, shuffle=shuffle), list[list[int]]()
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
    orders = [Order(103, block, seed) for seed in (5, 5, 6)]
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
    assert Order(10, 4, seed=1).sample_ids(0, 0, 10).tolist() == [8, 9, 0, 2, 3, 1, 4, 6, 5, 7]
    assert Order(5, 1, seed=1).sample_ids(0, 0, 5).tolist() == [2, 0, 4, 3, 1]
    keys = [(1,), (1, 0), (2**32,), (2**32 + 1,), (0, 1)]
    assert len({tuple(shuffled(50, *key)) for key in keys}) == 5, "large keys are told apart"


# Augmented images

SHAPE = (5, 6)
IMAGES, IDS = np.arange(1.0, 12_001, dtype="f4").reshape(400, *SHAPE), np.arange(400)


def moved(image: np.ndarray, flip: bool, down: int, right: int) -> np.ndarray:
    """Return an image, padded by zeros and cut out elsewhere."""
    padded = np.pad(image[:, ::-1] if flip else image, 2)
    return padded[2 - down : 7 - down, 2 - right : 8 - right]


@pytest.mark.parametrize(("flip", "shift"), [(True, 0), (False, 1), (True, 2)])
def test_each_way_is_drawn_as_often(flip: bool, shift: int) -> None:
    steps = range(-shift, shift + 1)
    ways = [(f, d, r) for f in {False, flip} for d in steps for r in steps]
    counts = dict.fromkeys(ways, 0)
    outputs = Augment(SHAPE, 3, flip, shift).apply(IMAGES, IDS, 0)
    for image, out in zip(IMAGES, outputs, strict=True):
        (way,) = [way for way in ways if np.array_equal(moved(image, *way), out)]
        counts[way] += 1
    expected = 400 / len(ways)
    assert min(counts.values()) > 0
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_it_depends_on_seed_epoch_and_sample_alone() -> None:
    augment, some = Augment(SHAPE, 3, True, 2), np.array([7, 399, 0, 20])
    whole = augment.apply(IMAGES, IDS, 1)
    np.testing.assert_array_equal(augment.apply(IMAGES[some], some, 1), whole[some])
    for other in (augment.apply(IMAGES, IDS, 2), Augment(SHAPE, 4, True, 2).apply(IMAGES, IDS, 1)):
        assert (other != whole).any((1, 2)).mean() > 0.8
    assert augment.apply(IMAGES[:0], IDS[:0], 1).shape == (0, *SHAPE)


@pytest.mark.parametrize("axis", [1, 3])
def test_channels_go_together(axis: int) -> None:
    """Behind or before; channels of an image are mirrored and moved alike."""
    x = np.stack([IMAGES, IMAGES + 1e6, IMAGES + 2e6], axis)
    out = Augment(x.shape[1:], 0, True, 2).apply(x, IDS, 0)
    alone = Augment(SHAPE, 0, True, 2).apply(IMAGES, IDS, 0)
    for channel in range(3):
        one = out.take(channel, axis)
        np.testing.assert_array_equal(np.where(one > 0, one - channel * 1e6, 0), alone)


def test_what_cannot_be_is_refused() -> None:
    for shape, shift, expected in (
        ((64,), 1, "inputs of shape (64,), expected images: height x width"),
        ((5, 6, 2), 1, "inputs of shape (5, 6, 2), expected images"),
        ((5, 6), 5, "shift 5 of images of 5 x 6, expected at most 4"),
    ):
        info: Any = SimpleNamespace(x_shape=shape)
        with pytest.raises(UserError, match=re.escape(expected)):
            augment_of(Config(shift=shift), info)
        assert augment_of(Config(), info) is None


@pytest.mark.parametrize("kind", ["h5", "npz"])
def test_a_loader_augments_what_is_trained_on(tmp_path: Path, kind: str) -> None:
    """In memory and from a file, whose samples stay as they are."""
    path = WRITE[kind](tmp_path / f"images.{kind}", (IMAGES % 251).astype("u1"), IDS % 2)
    with opened(path, flip=True, shift=1) as data:
        order = Order(data.train.n, data.train.block(10), 0)
        augment = augment_of(Config(flip=True, shift=1), data.info)
        with Loader(data.train, order, "f4", augment=augment) as loader:
            loader.submit(1, 0, 10)
            batch = loader.take()
        stored, _ = data.train.load(0, data.train.n, np.dtype("f4"))
        assert augment is not None
        np.testing.assert_array_equal(batch.x, augment.apply(stored[batch.ids], batch.ids, 1))
        assert (batch.x != stored[batch.ids]).any()
