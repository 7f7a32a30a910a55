"""Sources of samples, and batches of them, as training reads them.

A `Source` is a set of a table's rows, numbered from 0. It gives them a meaning: inputs are scaled,
converted to the run's dtype and finite; targets are class numbers or real values.

Messages:
    sample 12 has label 7: Labels count from 0, or are -1 and +1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpips.datasets.table import ArrayInfo, Table
from mpips.errors import UserError
from mpips.kernels.vectors import all_finite

BLOCK_BYTES = 4 << 20
MOST_BLOCKS = 16  # blocks that are read at once if their samples are stored together


@dataclass
class Batch:
    """Samples of one gradient or one evaluation.

    Attributes:
        x: Inputs, shape (n, *x_shape), of the run's dtype; sparse ones as `mpips.datasets.csr.Csr`.
        y: Class numbers, shape (n,), int64; or targets, shape (n, *y_shape), of the run's dtype.
        ids: Numbers of the samples in their source, 0 to ``source.n - 1``, shape (n,), int64.
        epoch: Number of the epoch, from 0.
    """

    x: Any
    y: np.ndarray
    ids: np.ndarray
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class DataInfo:
    """Description of a dataset.

    Attributes:
        name: Short name for people.
        n_train: Number of training samples.
        n_test: Number of held-out samples; 0 if there are none.
        x_shape: Shape of one input.
        y_shape: Shape of one target; ``()`` for class numbers.
        classes: Number of classes; None if the targets are real values.
        source: Name or path that was opened.
        signs: Whether the stored labels are -1 and +1; batches have 0 and 1.
        countable: Number of classes that real-valued targets would make; 0 if they are not whole
            numbers.
        notes: Notes for the user.
        class_names: Names of the classes, by number, if the data has them.
        sparse: Whether inputs are sparse.
    """

    name: str
    n_train: int
    n_test: int
    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    classes: int | None
    source: str
    signs: bool = False
    countable: int = 0
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    sparse: bool = False


class Source:
    """Samples for training or testing, numbered from 0.

    Args:
        table: The file.
        info: Description of the dataset.
        rows: The table's rows of this source, in the order of the sample numbers.
        scale: Factor of the inputs, which multiplies the table's own factor.

    Attributes:
        ahead: Number of batches to request by `ask`, beside the current one, before they are read;
            0 if `read` suffices.

    `read` and `read_block` return stored inputs and targets, which `convert` turns into those of a
    batch. `load` does both and checks them.
    """

    ahead = 0

    def __init__(
        self, table: Table, info: DataInfo, rows: range | np.ndarray, scale: float = 1.0
    ) -> None:
        self.table = table
        self.info = info
        self.n = len(rows)
        self.in_memory = table.in_memory
        self.scattered = table.scattered
        self._rows = rows
        self._scale = table.scale * scale
        # Bytes are finite, also once they are scaled, and take a quarter of the memory of floats.
        self._keeps = not table.in_memory and table.x.dtype == np.uint8 and abs(self._scale) <= 1

    def ask(self, ids: np.ndarray, epoch: int) -> None:
        """Request a batch, if `ahead` is not 0. Batches are read later, in this order."""

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored (x, y) of the samples `ids`, shape (n,), int64.

        Only for data in memory, or data that is read sample by sample. Others need `read_block`.
        """
        if isinstance(self._rows, range):
            return self.table.gather(ids + self._rows.start)
        return self.table.gather(self._rows[ids])

    def read_block(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return stored (x, y) of the samples ``[begin, end)``; do not write to them."""
        if not isinstance(self._rows, range):
            return self.table.gather(self._rows[begin:end])
        rows = self._rows[begin:end]
        return self.table.read(rows.start, rows.stop)

    def convert(
        self, x: np.ndarray, y: np.ndarray, dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Convert stored arrays to the shapes and dtypes of a batch."""
        return self._inputs(x, dtype), self._targets(y, dtype)

    def load(self, begin: int, end: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples ``[begin, end)`` in the form of a batch.

        Raises:
            UserError: If an input or a target is not finite, or a label is outside the classes. It
                names the file, the array and the row. Data in memory is checked when it is opened.
        """
        x, y = self.load_stored(begin, end, dtype)
        return self._inputs(x, dtype) if self._keeps else x, y

    def load_stored(self, begin: int, end: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) as `load` does, but keep inputs that are stored as bytes; see `factor`."""
        raw_x, raw_y = self.read_block(begin, end)
        x = raw_x.reshape(-1, *self.info.x_shape) if self._keeps else self._inputs(raw_x, dtype)
        y = self._targets(raw_y, dtype)
        if not self.in_memory:
            if not self._keeps:
                self._check(x, self.table.x, begin)
            self._check_targets(raw_y, y, begin)
        return x, y

    @property
    def factor(self) -> float:
        """Factor that turns inputs of `load_stored` into those of a batch."""
        return self._scale if self._keeps else 1.0

    def check(self, dtype: np.dtype) -> None:
        """Check every sample of a whole table in memory, block by block; raises as `load`."""
        step = samples_per_block(self.table)
        for begin in range(0, self.n, step):
            end = min(begin + step, self.n)
            if self.table.checks_inputs and abs(self._scale) <= 1:  # a product may be too large
                raw_y = self.table.read_y(begin, end)
            else:
                x, raw_y = self.table.read(begin, end)
                self._check(self._inputs(x, dtype), self.table.x, begin)
            self._check_targets(raw_y, self._targets(raw_y, dtype), begin)

    def block(self, batch_size: int) -> int:
        """Return the number of samples to read at once: 0 in memory, 1 if each is read separately.

        A block has about 4 MB, or up to 64 MB if the file stores so much together. It is a multiple
        of `batch_size`, and of whole chunks of the file if possible.
        """
        if self.in_memory or self.scattered:
            return int(self.scattered)
        few = samples_per_block(self.table)
        if self._keeps:  # these take one byte a number, not four
            few = max(1, BLOCK_BYTES // math.prod(self.info.x_shape))
        target = max(few, min(self.table.together, MOST_BLOCKS * few))
        together = int(np.lcm(batch_size, self.table.chunk))
        unit = together if together <= 2 * target else batch_size
        whole = -(-self.n // batch_size) * batch_size  # all batches of the data
        return min(max(1, target // unit) * unit, whole)

    def close(self) -> None:
        """Close the file. The other source of the dataset may share it."""
        self.table.close()

    def _inputs(self, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        x = x.reshape(len(x), *self.info.x_shape)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._scale == 1.0:
                return x.astype(dtype, copy=False)
            return np.multiply(x, self._scale, dtype=dtype, casting="unsafe")

    def _targets(self, y: np.ndarray, dtype: np.dtype) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            if self.info.classes is None:
                return y.astype(dtype, copy=False)
            labels = y.reshape(len(y))
            labels = labels > 0 if self.info.signs else labels
            return labels.astype(np.int64, copy=False)

    def _check(self, values: np.ndarray, array: ArrayInfo, begin: int) -> None:
        if not all_finite(values.reshape(-1)):
            sample, *where = np.argwhere(~np.isfinite(values))[0].tolist()
            row, value = int(self._rows[begin + sample]), values[(sample, *where)]
            raise not_finite(self.table, array, row, where, value)

    def _check_targets(self, raw: np.ndarray, y: np.ndarray, begin: int) -> None:
        if self.info.classes is None:
            self._check(y, self.table.y, begin)
            return
        raw = raw.reshape(len(y))
        if self.info.signs:
            bad = np.abs(raw) != 1
        else:
            bad = (y < 0) | (y >= self.info.classes) | (raw != y)
        if bad.any():
            sample = int(np.argmax(bad))
            expected = f"whole numbers from 0 to {self.info.classes - 1}"
            remedy = "give the right number of --classes or mend the labels"
            row = int(self._rows[begin + sample])
            raise bad_label(self.table, row, raw[sample], expected, remedy)


def bad_label(table: Table, row: int, label: np.generic, expected: str, remedy: str) -> UserError:
    """Return the error for an invalid label of a table."""
    path, row = table.where(row)
    got = f"{path}: array {table.y.name!r}, sample {row} has label {label}"
    return UserError(got, expected, remedy)


def not_finite(
    table: Table, array: ArrayInfo, row: int, where: Sequence[int], value: np.generic
) -> UserError:
    """Return the error for a number that is not finite, at index `where` of a table's row."""
    path, row = table.where(row)
    element = f", element {tuple(where)}" if where else ""
    got = f"{path}: array {array.name!r}, sample {row}{element} is {value} in {value.dtype}"
    return UserError(got, "finite numbers", "remove or replace the sample")


def samples_per_block(table: Table) -> int:
    """Return the number of samples that make about 4 MB in single precision."""
    return max(1, int(BLOCK_BYTES / table.sample_bytes))


@dataclass(frozen=True)
class Dataset:
    """An open dataset: training and held-out samples, which may share a file.

    Attributes:
        info: Description of the data.
        train: Training samples.
        test: Held-out samples; None if there are none.
    """

    info: DataInfo
    train: Source
    test: Source | None

    def close(self) -> None:
        """Close the files; may be called again."""
        self.train.close()
        if self.test is not None:
            self.test.close()

    def __enter__(self) -> "Dataset":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def iterate(
    source: Source, begin: int, end: int, batch: int, dtype: np.dtype | str
) -> Iterator[Batch]:
    """Yield batches of the samples ``[begin, end)`` in order; the last batch may be smaller.

    Raises:
        UserError: As `Source.load`.
    """
    dtype = np.dtype(dtype)
    for first in range(begin, end, batch):
        last = min(first + batch, end)
        yield Batch(*source.load(first, last, dtype), np.arange(first, last, dtype=np.int64))
