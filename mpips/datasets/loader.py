"""Batches read ahead by a background thread, and random changes of images.

Images are mirrored and shifted at random, in each epoch anew. The change of an image depends only
on the seed, the epoch and the sample's number: not on its batch, its worker, or a stop in between.
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

DEPTH = 2  # batches that a thread makes ahead
CACHED_BLOCKS = 4
CACHE_BYTES = 32 << 20
CHANNELS = (1, 3)
WORD = 16  # bits of a sample's random number that one draw uses
SWITCH_S = 1e-3  # time after which a computing thread yields to one whose read is complete


class Blocks:
    """Cache of a file's blocks, checked and, except for bytes, converted.

    Args:
        source: Samples in a file.
        block: Number of samples in a block.
        dtype: Dtype of the inputs and of real-valued targets.

    It has at most four blocks, and at most 32 MB if it has two or more. A thread reads the blocks,
    one at a time, and one more block ahead.
    """

    def __init__(self, source: Source, block: int, dtype: np.dtype) -> None:
        self._source = source
        self._block = block
        self._dtype = dtype
        self._kept: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._ahead: dict[int, Future[tuple[np.ndarray, np.ndarray]]] = {}  # at most one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")

    @property
    def nbytes(self) -> int:
        """Bytes of the cached blocks."""
        return sum(x.nbytes + y.nbytes for x, y in self._kept.values())

    def gather(self, ids: np.ndarray, epoch: int = 0, then: int | None = None) -> Batch:
        """Return the samples `ids`, shape (n,), int64, in that order.

        Args:
            ids: Numbers of the samples.
            epoch: Epoch of the batch.
            then: Block to read ahead while the samples are copied; None for none. An error of this
                read is raised when the block is used.

        Raises:
            UserError: As `Source.load`.
        """
        info = self._source.info
        x = np.empty((0 if info.sparse else len(ids), *info.x_shape), self._dtype)
        y = np.empty((len(ids), *info.y_shape), self._dtype if info.classes is None else np.int64)
        numbers = ids // self._block
        rows, parts = list[np.ndarray](), list[Csr]()
        # In order of appearance: the last block is the one in which the next batch begins.
        wanted = list(dict.fromkeys(numbers.tolist()))
        for number in wanted:
            rows_here = np.flatnonzero(numbers == number)
            block_x, block_y = self._get(number)
            if number == wanted[-1] and then is not None:
                self._begin(then)
            inner = ids[rows_here] - number * self._block
            y[rows_here] = block_y[inner]
            if isinstance(block_x, Csr):
                rows.append(rows_here)
                parts.append(block_x.take(inner))
                continue
            take_rows(_flat(block_x), inner, rows_here, self._source.factor, _flat(x))
        if parts:
            return Batch(join(parts).take(np.argsort(np.concatenate(rows))), y, ids, epoch)
        return Batch(x, y, ids, epoch)

    def close(self) -> None:
        """End the thread, after its current read."""
        self._thread.shutdown(cancel_futures=True)

    def _get(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self._kept:
            self._make_room()
            reading = self._ahead.pop(number, None) or self._read(number)
            self._kept[number] = reading.result()
        self._kept.move_to_end(number)
        return self._kept[number]

    def _begin(self, number: int) -> None:
        """Read a block ahead, unless it is cached, in place of the last block read ahead."""
        if number in self._kept or number in self._ahead:
            return
        reading = self._read(number)
        for other in self._ahead.values():
            other.cancel()
        self._ahead = {number: reading}

    def _read(self, number: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        begin = number * self._block
        end = min(begin + self._block, self._source.n)
        return self._thread.submit(self._source.load_stored, begin, end, self._dtype)

    def _make_room(self) -> None:
        """Drop the oldest blocks until there is room for one more."""
        largest = max((x.nbytes + y.nbytes for x, y in self._kept.values()), default=0)
        while self._kept and (
            len(self._kept) >= CACHED_BLOCKS or self.nbytes + largest > CACHE_BYTES
        ):
            self._kept.popitem(last=False)


def _flat(samples: np.ndarray) -> np.ndarray:
    """Return samples as rows of numbers, shape (n, width), a view if they are contiguous."""
    return samples.reshape(len(samples), math.prod(samples.shape[1:]))


class Loader:
    """Turns ranges of positions into batches, in the order in which they were submitted.

    Args:
        source: The samples.
        order: Order of the samples, made for `source`.
        dtype: Dtype of the inputs and of real-valued targets.
        augment: Random changes of the inputs; None for none.

    Memory: `DEPTH` + 1 batches, about 32 MB of blocks, and one block that is read ahead. Samples in
    memory need no thread: `take` copies them. Only one thread may call `submit` and `take`. Use the
    loader as a context manager, or call `close`. If it has a thread, Python switches between its
    threads every millisecond from then on.
    """

    def __init__(
        self, source: Source, order: Order, dtype: np.dtype | str, augment: "Augment | None" = None
    ) -> None:
        assert (order.n, order.block == 0) == (source.n, source.in_memory), "made for this source"
        self._source, self._order = source, order
        self._dtype, self._augment = np.dtype(dtype), augment
        self._asked: deque[tuple[int, int, int]] = deque()
        self._begun: deque[Future[Batch]] = deque()
        self._places: deque[int] = deque(maxlen=3)  # positions of the last blocks that were begun
        self.blocks: Blocks | None = None
        self._thread: ThreadPoolExecutor | None = None
        if not source.in_memory:
            if not source.scattered:
                self.blocks = Blocks(source, order.block, self._dtype)
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")

    @property
    def pending(self) -> int:
        """Number of batches that were submitted, but not taken."""
        return len(self._asked) + len(self._begun)

    def submit(self, epoch: int, begin: int, end: int) -> None:
        """Request the samples at positions ``[begin, end)`` of `epoch`. Blocks: no."""
        if self._source.ahead:
            self._source.ask(self._order.sample_ids(epoch, begin, end), epoch)
        self._asked.append((epoch, begin, end))
        if self._thread is not None:
            self._begin()

    def take(self) -> Batch:
        """Return the next batch, in the order of submission. Blocks: until it is read.

        Signal handlers run during the wait. If one raises, the batch can be taken later.

        Raises:
            RuntimeError: If no batch was submitted.
            UserError: If the samples are invalid, or the file cannot be read. The batch is lost,
                and the next call returns the batch after it.
        """
        if not self.pending:
            raise RuntimeError("take() without a submit()")
        self._begin()
        self._begun[0].exception()  # waits
        made = self._begun.popleft()
        if self._thread is not None:
            self._begin()
        return made.result()

    def peek(self) -> Batch | None:
        """Return the batch that the next `take` returns; None if it is not read yet.

        Blocks: no; samples in memory are copied now, and not again in `take`.
        """
        self._begin()
        is_made = self._begun and self._begun[0].done() and self._begun[0].exception() is None
        return self._begun[0].result() if is_made else None

    def close(self) -> None:
        """End the thread, after its current read; batches that were not taken are lost."""
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

    def _begin(self) -> None:
        """Begin up to `DEPTH` batches in the thread, or make one batch of samples in memory."""
        while self._asked and len(self._begun) < (DEPTH if self._thread else 1):
            request = self._asked.popleft()
            if self._thread is not None:
                self._begun.append(self._thread.submit(self._make, *request))
                continue
            made = Future[Batch]()
            self._begun.append(made)
            try:
                made.set_result(self._make(*request))
            except BaseException as error:  # raised again by the caller of take()
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
        """Return the block that the next batch probably needs, if this batch ends in a new one.

        A single worker gets block after block. One of W equally fast workers gets every W-th block.
        So the prediction needs two equal distances between the last three blocks.
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
    """Random changes of images: mirroring and shifting.

    Args:
        shape: Shape of an image: (height, width), with channels after or before them.
        seed: Seed of the random changes.
        flip: Whether to mirror half of the images left to right.
        shift: Largest shift in pixels, up or down, and left or right. Zeros fill the border.

    Raises:
        UserError: If `shape` is not that of an image, or a shift would leave no pixel.
    """

    def __init__(self, shape: tuple[int, ...], seed: int, flip: bool, shift: int) -> None:
        self._rows = _rows_axis(shape)
        self._seed, self._flip, self._shift = seed, flip, shift
        sides = shape[self._rows : self._rows + 2]
        if shift >= min(sides):
            got = f"shift {shift} of images of {sides[0]} x {sides[1]}"
            raise UserError(got, f"at most {min(sides) - 1}")

    def apply(self, x: np.ndarray, ids: np.ndarray, epoch: int) -> np.ndarray:
        """Return the images `x` of the samples `ids` as changed in an epoch.

        Args:
            x: Images, shape (n, *shape); not written.
            ids: Numbers of the samples, shape (n,), int64.
            epoch: Number of the epoch, from 0.

        Returns:
            A new array of the shape and dtype of `x`.
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
    """Return the random changes of a job's training images; None if it has none.

    Raises:
        UserError: If the inputs are not images.
    """
    if not (config.flip or config.shift):
        return None
    return Augment(info.x_shape, config.seed, config.flip, config.shift)


def _rows_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of an image's rows; the next axis is that of its columns.

    Raises:
        UserError: If the shape is not that of an image.
    """
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in CHANNELS):
        return 0
    if len(shape) == 3 and shape[0] in CHANNELS:
        return 1
    got = f"flip or shift of inputs of shape {shape}"
    expected = "images: height x width, with 1 or 3 channels behind or before them"
    raise UserError(got, expected, "leave them out, or store the inputs in that shape")


def _cut(shift: int) -> slice:
    """Return the part of an axis that a shift along it leaves within the image."""
    return slice(max(shift, 0), min(shift, 0) or None)
