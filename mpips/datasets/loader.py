"""Batches ahead of the step, read by a background thread; augmented images.

Images are mirrored and moved at random, other ones each epoch. What is done to one depends on the
seed, the epoch and its number alone: not on its batch, its worker, or a stop in between.
"""

import math
import sys
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from mpips.config import Config
from mpips.datasets.base import Batch, DataInfo, Source
from mpips.datasets.csr import Csr, join
from mpips.datasets.order import Order, bits_of
from mpips.errors import UserError
from mpips.kernels.vectors import take_rows

CACHED_BLOCKS = 4
CACHE_BYTES = 32 << 20
CHANNELS = (1, 3)
WORD = 16  # bits of a sample's number that one draw takes
SWITCH_S = 1e-3  # after which a thread that computes lets one go on that has just read


class Blocks:
    """The blocks of a file that were read last, checked and, but for bytes, converted.

    Args:
        source: Samples in a file.
        block: Samples of a block.
        dtype: Of the inputs and of real-valued targets.

    At most four blocks are kept, and no more than 32 MB of them if there are two or more. A thread
    reads them, one at a time: also one more, which is asked for before it is wanted.
    """

    def __init__(self, source: Source, block: int, dtype: np.dtype) -> None:
        self._source = source
        self._block = block
        self._dtype = dtype
        self._kept: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._ahead: tuple[int, Future[tuple[np.ndarray, np.ndarray]]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are kept."""
        return sum(x.nbytes + y.nbytes for x, y in self._kept.values())

    def gather(self, ids: np.ndarray, epoch: int = 0, then: int | None = None) -> Batch:
        """Return the samples `ids`, shape (n,), int64, in that order.

        Args:
            ids: Which samples.
            epoch: Of the batch.
            then: A block to read while they are taken out of theirs; what is wrong with it is
                raised when it is wanted.

        Raises:
            UserError: As `Source.load`.
        """
        info = self._source.info
        x: np.ndarray | None = None
        y = np.empty((len(ids), *info.y_shape), self._dtype if info.classes is None else np.int64)
        numbers = ids // self._block
        places, parts = list[np.ndarray](), list[Csr]()
        # In order of appearance, so that the block that the next batch begins in is read last.
        wanted = list(dict.fromkeys(numbers.tolist()))
        for number in wanted:
            here = np.flatnonzero(numbers == number)
            block_x, block_y = self._get(number)
            if number == wanted[-1] and then is not None:
                self._begin(then)
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

    def close(self) -> None:
        """End the thread, after the read that it may be in."""
        self._thread.shutdown(cancel_futures=True)

    def _get(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self._kept:
            self._make_room()
            reading = self._reading(number)
            if self._ahead is not None and self._ahead[0] == number:
                self._ahead = None
            self._kept[number] = reading.result()
        self._kept.move_to_end(number)
        return self._kept[number]

    def _begin(self, number: int) -> None:
        """Have a block read in place of the one before, unless it is there."""
        if number not in self._kept:
            reading = self._reading(number)
            if self._ahead is not None and self._ahead[0] != number:
                self._ahead[1].cancel()
            self._ahead = number, reading

    def _reading(self, number: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """Return the read of a block, begun now or before."""
        if self._ahead is not None and self._ahead[0] == number:
            return self._ahead[1]
        begin = number * self._block
        end = min(begin + self._block, self._source.n)
        return self._thread.submit(self._source.load_stored, begin, end, self._dtype)

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

    Memory: `depth` + 1 batches, about 32 MB of blocks, and one block that is read ahead. Samples in
    memory need no thread: `take` gathers them. One thread calls `submit` and `take`. Use as a
    context manager or call `close`. Where there is a thread, Python's threads take turns each
    millisecond from then on.

    Raises:
        ValueError: If `order` was not made for `source`.
    """

    def __init__(
        self, source: Source, order: Order, dtype: np.dtype | str, *, depth: int = 2,
        augment: "Augment | None" = None,
    ) -> None:  # fmt: skip
        if order.n != source.n or source.in_memory != (order.block == 0) or depth < 1:
            raise ValueError(
                f"order of {order.n} samples with block {order.block} and {depth=} "
                f"for a source of {source.n}, in_memory={source.in_memory}"
            )
        self._source, self._order, self._depth = source, order, depth
        self._dtype, self._augment = np.dtype(dtype), augment
        self._asked: deque[tuple[int, int, int]] = deque()
        self._begun: deque[Future[Batch]] = deque()
        self._places: deque[int] = deque(maxlen=3)  # of the blocks that were begun last
        self._closed = False
        self.blocks: Blocks | None = None
        self._thread: ThreadPoolExecutor | None = None
        if not source.in_memory:
            if not source.scattered:
                self.blocks = Blocks(source, order.block, self._dtype)
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")

    @property
    def pending(self) -> int:
        """Number of batches submitted and not yet taken."""
        return len(self._asked) + len(self._begun)

    def submit(self, epoch: int, begin: int, end: int) -> None:
        """Ask for the samples at positions ``[begin, end)`` of `epoch`; never blocks.

        Raises:
            RuntimeError: If the loader is closed.
        """
        self._refuse_if_closed()
        if self._source.ahead:
            self._source.ask(self._order.sample_ids(epoch, begin, end), epoch)
        self._asked.append((epoch, begin, end))
        if self._thread is not None:
            self._begin()

    def take(self) -> Batch:
        """Return the next batch, in the order of submission; waits for the file if it must.

        Signal handlers run while it waits; if one raises, the batch can be taken later.

        Raises:
            RuntimeError: If nothing was submitted, or the loader is closed.
            UserError: If the samples are not as expected, or the file cannot be read; the batch
                is gone, and the next call goes on with the one after it.
        """
        self._refuse_if_closed()
        if not self.pending:
            raise RuntimeError("take() without a submit()")
        self._begin()
        self._begun[0].exception()  # waits
        made = self._begun.popleft()
        if self._thread is not None:
            self._begin()
        return made.result()

    def peek(self) -> Batch | None:
        """Return the batch that the next `take` returns, or None where that is not here yet.

        Blocks: no; samples in memory are gathered now, and not again.
        """
        self._begin()
        here = self._begun and self._begun[0].done() and self._begun[0].exception() is None
        return self._begun[0].result() if here else None

    def close(self) -> None:
        """End the thread, after the read that it may be in; batches not taken are lost."""
        self._closed = True
        self._asked.clear()
        self._begun.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self.blocks is not None:
            self.blocks.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the loader is closed")

    def _begin(self) -> None:
        """Have batches made: up to `depth` by the thread, or one of samples in memory at once."""
        while self._asked and len(self._begun) < (self._depth if self._thread else 1):
            request = self._asked.popleft()
            if self._thread is not None:
                self._begun.append(self._thread.submit(self._make, *request))
                continue
            made = Future[Batch]()
            self._begun.append(made)
            try:
                made.set_result(self._make(*request))
            except BaseException as error:  # whatever it is, the caller of take() must get it
                made.set_exception(error)

    def _make(self, epoch: int, begin: int, end: int) -> Batch:
        batch = self._read(epoch, begin, end)
        if self._augment is None:
            return batch
        return replace(batch, x=self._augment.apply(batch.x, batch.ids, epoch))

    def _read(self, epoch: int, begin: int, end: int) -> Batch:
        ids = self._order.sample_ids(epoch, begin, end)
        if self.blocks is not None:
            return self.blocks.gather(ids, epoch, self._likely(epoch, end) if begin < end else None)
        return Batch(*self._source.convert(*self._source.read(ids), self._dtype), ids, epoch)

    def _likely(self, epoch: int, end: int) -> int | None:
        """Return the block that is likely to be wanted next, where a batch ends in a new one.

        One worker is given block after block, each of several every so many-th, as long as they are
        equally fast: the likely one is as far on again as it was twice before.
        """
        place = epoch * self._order.count + self._order.place(epoch, end - 1)
        if self._places and place == self._places[-1]:
            return None
        self._places.append(place)
        if len(self._places) < 3:
            return None
        first, second, _ = self._places
        step = place - second
        return self._order.block_at(place + step) if 0 < step == second - first else None


# Augmented images -------------------------------------------------------------------------------


class Augment:
    """Changes batches of images.

    Args:
        shape: Of an image: (height, width), with channels behind or before them.
        seed: Of what is drawn.
        flip: Whether a half of the images is mirrored left to right.
        shift: Pixels by which an image is moved at most, up or down, left or right; what comes in
            at the border is zero.

    Raises:
        UserError: If `shape` is not that of an image, or it has no pixel left.
    """

    def __init__(self, shape: tuple[int, ...], seed: int, flip: bool, shift: int) -> None:
        self._rows = _rows_axis(shape)
        self._seed, self._flip, self._shift = seed, flip, shift
        sides = shape[self._rows : self._rows + 2]
        if shift >= min(sides):
            got = f"shift {shift} of images of {sides[0]} x {sides[1]}"
            raise UserError(got, f"at most {min(sides) - 1}")

    def apply(self, x: np.ndarray, ids: np.ndarray, epoch: int) -> np.ndarray:
        """Return the images `x` of the samples `ids` as they are in an epoch.

        Args:
            x: Shape (n, *shape); not written.
            ids: Numbers of the samples, shape (n,), int64.
            epoch: Counted from 0.

        Returns:
            A new array like `x`.
        """
        drawn = bits_of(ids, self._seed, epoch)
        out = np.zeros_like(x)
        for image, to, bits in zip(x, out, drawn.tolist(), strict=True):
            seen = np.flip(image, self._rows + 1) if self._flip and bits & 1 else image
            down, right = (self._draw(bits >> WORD), self._draw(bits >> 2 * WORD))
            lead = (slice(None),) * self._rows
            source = *lead, _cut(-down), _cut(-right)
            to[*lead, _cut(down), _cut(right)] = seen[source]
        return out

    def _draw(self, bits: int) -> int:
        """Return a number of pixels between ``-shift`` and ``shift``."""
        return (bits & ((1 << WORD) - 1)) * (2 * self._shift + 1) // (1 << WORD) - self._shift


def augment_of(config: Config, info: DataInfo) -> Augment | None:
    """Return what a job does to its training images; None for nothing.

    Raises:
        UserError: If they are none.
    """
    if not (config.flip or config.shift):
        return None
    return Augment(info.x_shape, config.seed, config.flip, config.shift)


def _rows_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of an image's rows, behind which is that of its columns."""
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in CHANNELS):
        return 0
    if len(shape) == 3 and shape[0] in CHANNELS:
        return 1
    got = f"flip or shift of inputs of shape {shape}"
    expected = "images: height x width, with 1 or 3 channels behind or before them"
    raise UserError(got, expected, "leave them out, or store the inputs in that shape")


def _cut(moved: int) -> slice:
    """Return what of an axis is there when something has moved along it."""
    return slice(max(moved, 0), min(moved, 0) or None)
