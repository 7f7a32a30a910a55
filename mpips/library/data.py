"""Samples of a program: arrays, or a sequence of samples.

Loops read them through the interface `Source`, as samples of files. No value is converted.
"""

from collections.abc import Callable, Mapping
from numbers import Integral
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
        data: An array whose rows are samples; a tuple (x, y) of two such arrays; a mapping of names
            to such arrays; the number of samples, for batches of numbers alone; or any object that
            has a length and returns sample k by ``data[k]``.

    Raises:
        UserError: If it is of another type, or empty.
    """

    in_memory = True

    def __init__(self, data: Any) -> None:
        self.n, self._take = _arrays(data) or _sequence(data)
        if self.n < 1:
            raise UserError("data without a sample", "at least one")

    def read(self, ids: np.ndarray) -> tuple[Any, Any]:
        """Return x and y of a batch of the samples `ids`, shape (n,), int64."""
        return self._take(ids)

    def convert(self, x: Any, y: Any, dtype: np.dtype) -> tuple[Any, Any]:
        """Return x and y without a change."""
        return x, y

    def load(self, begin: int, end: int, dtype: np.dtype) -> tuple[Any, Any]:
        """Return x and y of a batch of the samples ``[begin, end)``."""
        return self.read(np.arange(begin, end))

    def block(self, batch_size: int) -> int:
        """Return 0: the samples are not read in blocks."""
        return 0

    def close(self) -> None:
        """Do nothing: the data belongs to the program."""


def dataset(name: str, train: Samples, test: Samples | None) -> Dataset:
    """Return a named dataset of samples to train on and held-out samples."""
    return Dataset(info_of(name, train.n, test.n if test is not None else 0), train, test)


def info_of(name: str, count: int, held_out: int) -> DataInfo:
    """Return the description of a program's data: its name, and its numbers of samples."""
    return DataInfo(name, count, held_out, (), (), None, name)


def _arrays(data: Any) -> tuple[int, Take] | None:
    """Return the number of samples of arrays, and a function that takes some; None otherwise."""
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
    if isinstance(data, Integral) and not isinstance(data, bool):
        return int(data), lambda ids: (None, None)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str):
        return len(data), lambda ids: ([data[k] for k in ids.tolist()], None)
    raise UserError(f"data of type {type(data).__name__}", KINDS)


def _length(columns: Mapping[str, np.ndarray]) -> int:
    """Return the length of the columns, which must be equal.

    Raises:
        UserError: If lengths differ, or there is no column.
    """
    lengths = {name: column.shape[0] if column.ndim else None for name, column in columns.items()}
    if not columns or None in lengths.values() or len(set(lengths.values())) > 1:
        shapes = ", ".join(f"{name} of shape {c.shape}" for name, c in columns.items())
        raise UserError(f"data with {shapes or 'no array'}", "arrays of one length, a row a sample")
    return int(next(iter(columns.values())).shape[0])
