"""Batches ahead of the step: a background thread for files, nothing but a gather in memory."""

import math
import threading
from collections import OrderedDict, deque
from dataclasses import replace
from types import TracebackType

import numpy as np

from mpips.datasets.augment import Augment
from mpips.datasets.base import Batch, Source
from mpips.datasets.csr import Csr, join
from mpips.datasets.order import Order
from mpips.kernels.vectors import take_rows

CACHED_BLOCKS = 4
CACHE_BYTES = 32 << 20
WAIT_S = 0.05


class Blocks:
    """The blocks of a file that were read last, checked and, but for bytes, converted.

    Args:
        source: Samples in a file.
        block: Samples of a block.
        dtype: Of the inputs and of real-valued targets.

    At most four blocks are kept, and no more than 32 MB of them if there are two or more.
    """

    def __init__(self, source: Source, block: int, dtype: np.dtype) -> None:
        self._source = source
        self._block = block
        self._dtype = dtype
        self._kept: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are kept."""
        return sum(x.nbytes + y.nbytes for x, y in self._kept.values())

    def gather(self, ids: np.ndarray, epoch: int = 0) -> Batch:
        """Return the samples `ids`, shape (n,), int64, in that order.

        Raises:
            UserError: As `Source.load`.
        """
        info = self._source.info
        x: np.ndarray | None = None
        y = np.empty((len(ids), *info.y_shape), self._dtype if info.classes is None else np.int64)
        numbers = ids // self._block
        places, parts = list[np.ndarray](), list[Csr]()
        _, firsts = np.unique(numbers, return_index=True)
        # In order of appearance, so that the block that the next batch begins in is read last.
        for number in numbers[np.sort(firsts)].tolist():
            here = np.flatnonzero(numbers == number)
            block_x, block_y = self._get(number)
            inner = ids[here] - number * self._block
            y[here] = block_y[inner]
            if isinstance(block_x, Csr):
                places.append(here)
                parts.append(block_x.take(inner))
                continue
            x = np.empty((len(ids), *info.x_shape), self._dtype) if x is None else x
            take_rows(_flat(block_x), inner, here, self._source.factor, _flat(x))
        if parts:
            return Batch(join(parts).take(np.argsort(np.concatenate(places))), y, ids, epoch)
        x = np.empty((0, *info.x_shape), self._dtype) if x is None else x
        return Batch(x, y, ids, epoch)

    def _get(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self._kept:
            begin = number * self._block
            end = min(begin + self._block, self._source.n)
            self._make_room()
            self._kept[number] = self._source.load_stored(begin, end, self._dtype)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _make_room(self) -> None:
        """Drop the oldest blocks until one more fits."""
        largest = max((x.nbytes + y.nbytes for x, y in self._kept.values()), default=0)
        while self._kept and (
            len(self._kept) >= CACHED_BLOCKS or self.nbytes + largest > CACHE_BYTES
        ):
            self._kept.popitem(last=False)


def _flat(samples: np.ndarray) -> np.ndarray:
    """Return samples as rows of numbers, shape (n, width), a view where they lie together."""
    return samples.reshape(len(samples), math.prod(samples.shape[1:]))


class Loader:
    """Turns ranges of positions into batches, in the order in which they were submitted.

    Args:
        source: The samples.
        order: Which sample stands where; made for `source`.
        dtype: Of the inputs and of real-valued targets.
        depth: How many batches the thread makes ahead.
        augment: What is done to their inputs, if anything.

    Memory: `depth` + 1 batches, and about 32 MB of blocks. Samples in memory need no thread:
    `take` gathers them. One thread calls `submit` and `take`. Use as a context manager or call
    `close`.

    Raises:
        ValueError: If `order` was not made for `source`.
    """

    def __init__(
        self, source: Source, order: Order, dtype: np.dtype | str, *, depth: int = 2,
        augment: Augment | None = None,
    ) -> None:  # fmt: skip
        if order.n != source.n or source.in_memory != (order.block == 0) or depth < 1:
            raise ValueError(
                f"order of {order.n} samples with block {order.block} and {depth=} "
                f"for a source of {source.n}, in_memory={source.in_memory}"
            )
        self._source, self._order, self._depth = source, order, depth
        self._dtype, self._augment = np.dtype(dtype), augment
        self._asked: deque[tuple[int, int, int]] = deque()
        self._made: deque[Batch | BaseException] = deque()
        self._pending = 0
        self._closed = False
        self._changed = threading.Condition()
        self.blocks: Blocks | None = None
        self._thread: threading.Thread | None = None
        if not source.in_memory:
            if not source.scattered:
                self.blocks = Blocks(source, order.block, self._dtype)
            self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
            self._thread.start()

    @property
    def pending(self) -> int:
        """Number of batches submitted and not yet taken."""
        return self._pending

    def submit(self, epoch: int, begin: int, end: int) -> None:
        """Ask for the samples at positions ``[begin, end)`` of `epoch`; never blocks.

        Raises:
            RuntimeError: If the loader is closed.
        """
        with self._changed:
            self._refuse_if_closed()
            self._asked.append((epoch, begin, end))
            self._pending += 1
            self._changed.notify_all()
        if self._source.ahead:
            self._source.ask(self._order.sample_ids(epoch, begin, end), epoch)

    def take(self) -> Batch:
        """Return the next batch, in the order of submission; waits for the file if it must.

        Signal handlers run while it waits.

        Raises:
            RuntimeError: If nothing was submitted, or the loader is closed.
            UserError: If the samples are not as expected, or the file cannot be read; the batch
                is gone, and the next call goes on with the one after it.
        """
        self._refuse_if_closed()
        if not self._pending:
            raise RuntimeError("take() without a submit()")
        made = self._make(*self._asked.popleft()) if self._thread is None else self._wait()
        self._pending -= 1
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        """End the thread, after the read that it may be in; batches not taken are lost."""
        with self._changed:
            self._closed = True
            self._asked.clear()
            self._made.clear()
            self._pending = 0
            self._changed.notify_all()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAIT_S)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the loader is closed")

    def _wait(self) -> Batch | BaseException:
        with self._changed:
            while not self._made:
                # A bounded wait lets the signal handlers of the main thread run.
                self._changed.wait(WAIT_S)
                self._refuse_if_closed()
            made = self._made.popleft()
            self._changed.notify_all()
        return made

    def _make(self, epoch: int, begin: int, end: int) -> Batch | BaseException:
        try:
            batch = self._read(self._order.sample_ids(epoch, begin, end), epoch)
            if self._augment is not None:
                return replace(batch, x=self._augment.apply(batch.x, batch.ids, epoch))
            return batch
        except BaseException as error:  # whatever it is, the caller of take() must get it
            return error

    def _read(self, ids: np.ndarray, epoch: int) -> Batch:
        if self.blocks is not None:
            return self.blocks.gather(ids, epoch)
        return Batch(*self._source.convert(*self._source.read(ids), self._dtype), ids, epoch)

    def _work(self) -> None:
        while (request := self._next()) is not None:
            made = self._make(*request)
            with self._changed:
                if not self._closed:
                    self._made.append(made)
                self._changed.notify_all()

    def _next(self) -> tuple[int, int, int] | None:
        """Wait until there is a batch to make and room for it; None when the loader is closed."""
        with self._changed:
            while not self._closed and (not self._asked or len(self._made) >= self._depth):
                self._changed.wait()
            return None if self._closed else self._asked.popleft()
