"""Samples of a program: arrays, or a sequence of samples.

They reach the loops as a `Source` does that was read from a file; nothing is converted.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpips.datasets import DataInfo, Dataset, Source
from mpips.errors import UserError

KINDS = (
    "arrays of one length: one, a tuple (x, y) or a mapping; a number of samples; or a sequence of "
    "samples"
)
Take = Callable[[np.ndarray], tuple[Any, Any]]


class Samples(Source):
    """A program's samples, numbered from 0.

    Args:
        data: An array whose rows are samples; a tuple (x, y) of two such; a mapping of names to
            such; the number of samples, where batches are to have their numbers alone; or anything
            that has a length and gives sample k by ``data[k]``.

    Raises:
        UserError: If it is something else, or empty.
    """

    in_memory = True

    def __init__(self, data: Any) -> None:
        self.n, self._take = _arrays(data) or _sequence(data)
        if self.n < 1:
            raise UserError("data without a sample", "at least one")

    def read(self, ids: np.ndarray) -> tuple[Any, Any]:
        """Return what batches have as x and y of the samples `ids`, shape (n,), int64."""
        return self._take(ids)

    def convert(self, x: Any, y: Any, dtype: np.dtype) -> tuple[Any, Any]:
        """Return both as they are."""
        return x, y

    def load(self, begin: int, end: int, dtype: np.dtype) -> tuple[Any, Any]:
        """Return what batches have as x and y of the samples ``[begin, end)``."""
        return self.read(np.arange(begin, end))

    def block(self, batch_size: int) -> int:
        """Return 0: the samples are not read in blocks."""
        return 0

    def close(self) -> None:
        """Leave the data alone."""


def dataset(name: str, train: Samples, test: Samples | None) -> Dataset:
    """Return samples to train on, and held-out ones, as a dataset of that name."""
    return Dataset(info_of(name, train.n, test.n if test is not None else 0), train, test)


def info_of(name: str, count: int, held_out: int) -> DataInfo:
    """Return what is known of a program's data: how many samples it has, by that name."""
    return DataInfo(name, count, held_out, (), (), None, name)


def _arrays(data: Any) -> tuple[int, Take] | None:
    """Return the number of samples and what takes some of them, of arrays; None of other data."""
    if isinstance(data, Mapping):
        named = {name: np.asanyarray(column) for name, column in data.items()}
        length = _length({f"data[{name!r}]": column for name, column in named.items()})
        return length, lambda ids: ({name: c.take(ids, axis=0) for name, c in named.items()}, None)
    if isinstance(data, tuple) and len(data) == 2:
        x, y = map(np.asanyarray, data)
        return _length({"x": x, "y": y}), lambda ids: (x.take(ids, axis=0), y.take(ids, axis=0))
    if isinstance(data, np.ndarray):
        return _length({"data": data}), lambda ids: (data.take(ids, axis=0), None)
    return None


def _sequence(data: Any) -> tuple[int, Take]:
    if isinstance(data, int) and not isinstance(data, bool):
        return data, lambda ids: (None, None)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str):
        return len(data), lambda ids: ([data[k] for k in ids.tolist()], None)
    raise UserError(f"data of type {type(data).__name__}", KINDS)


def _length(columns: Mapping[str, np.ndarray]) -> int:
    """Return the length that all columns have."""
    lengths = {name: column.shape[0] if column.ndim else None for name, column in columns.items()}
    if not columns or None in lengths.values() or len(set(lengths.values())) > 1:
        shapes = ", ".join(f"{name} of shape {c.shape}" for name, c in columns.items())
        raise UserError(f"data with {shapes or 'no array'}", "arrays of one length, a row a sample")
    return int(next(iter(columns.values())).shape[0])
