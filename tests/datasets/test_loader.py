import signal
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_datasets import opened, write_h5

from mpips.datasets import Dataset
from mpips.datasets.base import Source
from mpips.datasets.loader import CACHE_BYTES, CACHED_BLOCKS, Blocks, Loader
from mpips.datasets.order import Order
from mpips.errors import UserError

N = 103
BLOCK = 20


@pytest.fixture
def file_data(tmp_path: Path) -> Dataset:
    """Sample k is [k, -k], its label k % 10."""
    k = np.arange(N)
    return write(tmp_path / "a.h5", np.stack([k, -k], axis=1).astype("f8"), k % 10)


def write(path: Path, x: Any, y: Any) -> Dataset:
    return opened(write_h5(path, x, y), test_fraction=0)


def loader_of(source: Source, block: int = BLOCK, batch: int = 5, **options: Any) -> Loader:
    order = Order(source.n, batch, 0 if source.in_memory else block, seed=1)
    return Loader(source, order, "float32", **options)


def loader_threads() -> list[threading.Thread]:
    names = "loader", "blocks"
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


class Slow:
    """Makes every read of a source wait until it is let go."""

    def __init__(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        load = source.load_stored

        def wait_and_load(*args: Any) -> Any:
            self.started.set()
            assert self.go.wait(30)
            return load(*args)

        monkeypatch.setattr(source, "load_stored", wait_and_load)


def test_batches_hold_the_samples_of_the_order(file_data: Dataset) -> None:
    order = Order(N, 5, BLOCK, seed=1)
    with Loader(file_data.train, order, "float32") as loader:
        for epoch in range(3):
            for begin in range(0, N, 5):
                loader.submit(epoch, begin, min(begin + 5, N))
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
    before = threading.active_count()
    with loader_of(data.train) as loader:
        assert threading.active_count() == before
        assert loader.blocks is None
        for begin in range(0, data.train.n, 100):
            loader.submit(0, begin, min(begin + 100, data.train.n))
        batches = [loader.take() for _ in range(loader.pending)]
    assert [len(batch) for batch in batches] == [100] * 14 + [38]
    ids = np.concatenate([batch.ids for batch in batches])
    assert np.array_equal(np.sort(ids), np.arange(data.train.n))
    assert batches[0].x.shape == (100, 8, 8)
    batches[0].x[:] = 7  # a gathered batch is the caller's own


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_next_batch_may_be_looked_at(in_memory: bool, file_data: Dataset) -> None:
    source = opened("digits").train if in_memory else file_data.train
    assert source.in_memory == in_memory
    with loader_of(source) as loader:
        assert loader.peek() is None
        for begin in (0, 5):
            loader.submit(0, begin, begin + 5)
        deadline = time.monotonic() + 30
        while (seen := loader.peek()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert seen is loader.peek()
        assert loader.pending == 2
        assert loader.take() is seen
        assert not np.array_equal(loader.take().ids, seen.ids)
        assert loader.pending == 0
        assert loader.peek() is None


def test_the_blocks_that_are_kept_are_bounded(tmp_path: Path) -> None:
    """Few of them, bytes as bytes, and of large ones one at a time."""
    x = np.random.default_rng(0).integers(0, 256, (1000, 25, 4), dtype=np.uint8)
    for name, stored, ids, bytes_of in (
        ("numbers", x.astype("f4") / 255, np.arange(0, 1000, 3), 408),
        ("bytes", x, np.arange(0, 1000, 3), 108),
    ):
        data = write(tmp_path / f"{name}.h5", stored, np.arange(1000) % 3)
        blocks = Blocks(data.train, 10, np.dtype("f4"))
        found = blocks.gather(ids)
        np.testing.assert_allclose(found.x, x[ids] / 255, rtol=1e-6)
        assert len(blocks) == CACHED_BLOCKS
        assert blocks.nbytes == CACHED_BLOCKS * 10 * bytes_of
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(40, 1 << 20), dtype="f4", chunks=(1, 1 << 20))
        file["y"] = np.zeros(40)
    data = opened(tmp_path / "a.h5", test_fraction=0)
    assert data.train.block(5) == 5  # 20 MB in float32
    blocks = Blocks(data.train, 5, np.dtype("float32"))
    for begin in range(0, 20, 5):
        blocks.gather(np.arange(begin, begin + 1))
        assert blocks.nbytes <= CACHE_BYTES
        assert len(blocks) == 1


class Reads:
    """Notes the blocks of a source that are read."""

    def __init__(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        load = source.load_stored

        def note(begin: int, *args: Any) -> Any:
            self.begun.append(begin // BLOCK)
            return load(begin, *args)

        monkeypatch.setattr(source, "load_stored", note)

    def wait_for(self, count: int) -> list[int]:
        deadline = time.monotonic() + 10
        while len(self.begun) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return self.begun


@pytest.mark.parametrize(
    ("asked", "ahead"),
    [
        ([0, 1], []),
        ([0, 1, 2], [3]),
        ([0, 1, 2, 3], [4]),
        ([0, 2, 4], [6]),  # of two workers, and on into the next epoch
        ([0, 2, 5], []),
        ([4, 2, 0], []),
    ],
)
def test_the_next_block_is_read_ahead(
    file_data: Dataset, monkeypatch: pytest.MonkeyPatch, asked: list[int], ahead: list[int]
) -> None:
    reads, order = Reads(file_data.train, monkeypatch), Order(80, 5, BLOCK, 1)  # four blocks
    source = Source(file_data.train.table, file_data.info, range(80))
    monkeypatch.setattr(source, "load_stored", file_data.train.load_stored)
    with Loader(source, order, "float32") as loader:
        for place in asked:
            loader.submit(place // 4, place % 4 * BLOCK + 5, place % 4 * BLOCK + 10)
            loader.take()
        wanted = list(dict.fromkeys(order.block_at(place) for place in [*asked, *ahead]))
        assert reads.wait_for(len(wanted)) == wanted


def test_each_block_is_read_once_an_epoch(
    file_data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(file_data.train, monkeypatch)
    with loader_of(file_data.train) as loader:
        for begin in range(0, N, 5):
            loader.submit(4, begin, min(begin + 5, N))
        for _ in range(loader.pending):
            loader.take()
    assert sorted(reads.begun) == list(range(-(-N // BLOCK)))


def test_the_thread_stays_no_more_than_depth_ahead(
    file_data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, made = Order(N, 5, BLOCK, seed=1), list[int]()
    find = order.sample_ids
    monkeypatch.setattr(order, "sample_ids", lambda *args: made.append(args[1]) or find(*args))
    with Loader(file_data.train, order, "float32", depth=3) as loader:
        for begin in range(0, 100, 5):
            loader.submit(0, begin, begin + 5)
        deadline = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert made == [0, 5, 10]
        assert loader.pending == 20
        loader.take()
        assert loader.pending == 19


def test_close_while_a_read_is_under_way(
    file_data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(file_data.train, monkeypatch)
    loader = loader_of(file_data.train)
    loader.submit(0, 0, 5)
    assert slow.started.wait(10)
    threading.Timer(0.2, slow.go.set).start()
    loader.close()
    assert not loader_threads()
    file_data.close()  # the read has ended, so the file may go


def test_a_signal_interrupts_take(file_data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(file_data.train, monkeypatch)

    def stop(*_: object) -> None:
        raise InterruptedError("asked to stop")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with loader_of(file_data.train) as loader:
            loader.submit(0, 0, 5)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(InterruptedError):  # else the read would fail, held for too long
                loader.take()
            slow.go.set()
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
    with Loader(data.train, Order(60, 5, 10, seed=0, shuffle=False), "float32") as loader:
        for begin in range(0, 60, 5):
            loader.submit(0, begin, begin + 5)
            if begin // 10 == bad // 10:  # both batches of the bad block
                time.sleep(0.02)
                assert loader.peek() is None
                with pytest.raises(UserError, match=rf"sample {bad}, element .1,. is nan"):
                    loader.take()
            else:
                good += len(loader.take())
    assert good == 50


@pytest.mark.parametrize("in_memory", [True, False])
def test_wrong_use(in_memory: bool, file_data: Dataset) -> None:
    """A range outside comes out of `take`; a loader that is closed has no thread, and is closed."""
    source = opened("digits").train if in_memory else file_data.train
    loader = loader_of(source)
    loader.submit(0, 0, source.n + 1)
    loader.submit(0, 0, 5)
    with pytest.raises(ValueError, match="no positions"):
        loader.take()
    assert len(loader.take()) == 5
    for begin in range(0, 100, 5):
        loader.submit(0, begin, begin + 5)
    loader.close()
    loader.close()
    assert not loader_threads()
