"""Tables: the stored inputs and targets of a dataset's files.

The reader of a format makes a `Table`: two arrays, inputs `x` and targets `y`. Their rows are read
on demand, and have no meaning yet.
"""

import gzip
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from mpips.errors import UserError, nearest

UINT8_SCALE = 1 / 255
HASHED = "hashed columns"  # name of an array of ids
GZIP_MAGIC = b"\x1f\x8b"
MAX_NAMES_COMPARED = 1000
NAMES = {"U": "text", "S": "text", "O": "text or objects"}  # by the kind of a dtype


@dataclass(frozen=True)
class ArrayInfo:
    """Description of an array in a file: its name in messages, its whole shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @staticmethod
    def of(name: str, array: Any) -> "ArrayInfo":
        """Return the description of an array, or of a dataset of an HDF5 file."""
        return ArrayInfo(name, array.shape, array.dtype)

    def times(self, n: int) -> "ArrayInfo":
        """Return the description of `n` such arrays as one array."""
        return ArrayInfo(self.name, (n, *self.shape), self.dtype)


class Table(ABC):
    """A file's inputs and targets as they are stored.

    Args:
        path: The file, for messages.
        x: The inputs; shape (n, ...).
        y: The targets; shape (n, ...).
        scale: Factor of the inputs; None for the default, 1/255 for uint8 and 1 for other types.

    Attributes:
        chunk: Number of samples that the file stores together; 1 if it does not matter.
        together: Number of samples that take as long to read as one of them; 1 if there are none.
        class_names: Names of the classes, by number, if the data has them.
        places: Positions of samples in the file, shape (size,), int64, if it must be scanned for
            them.

    Raises:
        UserError: If the lengths differ, an array is empty, or one does not hold numbers.
    """

    in_memory: bool = True
    checks_inputs: ClassVar[bool] = False  # True if opening checks that inputs are finite
    scattered: ClassVar[bool] = False  # True if each sample is read and checked separately
    sparse: ClassVar[bool] = False  # True if inputs are `mpips.datasets.csr.Csr`
    chunk: int = 1
    together: int = 1
    class_names: tuple[str, ...] = ()
    places: np.ndarray | None = None

    def __init__(self, path: str, x: ArrayInfo, y: ArrayInfo, scale: float | None = None) -> None:
        check_arrays(path, x, y)
        self.path = path
        self.x = x
        self.y = y
        self.n = x.shape[0]
        natural = UINT8_SCALE if x.dtype == np.uint8 else 1.0
        self.scale = natural if scale is None else scale

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape of one input; a single number counts as a vector of length 1."""
        return self.x.shape[1:] or (1,)

    @property
    def sample_bytes(self) -> float:
        """Bytes of one sample's inputs when read, at least those of single precision."""
        return max(4, self.x.dtype.itemsize) * math.prod(self.x_shape)

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it, for messages."""
        return self.path, row

    @abstractmethod
    def read(self, begin: int, end: int) -> tuple[Any, np.ndarray]:
        """Return the stored inputs and targets of rows ``[begin, end)``; do not write to them."""

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return only the stored targets of rows ``[begin, end)``; do not write to them."""
        return self.read(begin, end)[1]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored inputs and targets of `rows`, shape (n,), int64, in that order.

        Only for tables in memory, and tables whose samples are read separately.
        """
        raise NotImplementedError(f"{self.path} is read in blocks")

    def match(self, other: "Table") -> None:
        """Check that `other` has samples of the same shape, and sparse ones if these are.

        Raises:
            UserError: If it does not.
        """
        remedy = "give training and test files of the same kind"
        kinds = [(table.sparse, table.x.name == HASHED) for table in (self, other)]
        if kinds[0] != kinds[1]:
            raise UserError(f"{other.path} beside {self.path}", "both sparse, or none", remedy)
        for mine, theirs in ((self.x, other.x), (self.y, other.y)):
            if mine.shape[1:] != theirs.shape[1:]:
                what = f"{other.path}: array {theirs.name!r} has samples of shape"
                expected = f"{mine.shape[1:]} as in {self.path}"
                raise UserError(f"{what} {theirs.shape[1:]}", expected, remedy)

    def close(self) -> None:  # noqa: B027 - tables in memory have no file to close
        """Close the file. May be called again."""


class MemoryTable(Table):
    """A table whose arrays are in memory."""

    def __init__(
        self, path: str, x: np.ndarray, y: np.ndarray, *, names: Sequence[str] = ("x", "y")
    ) -> None:
        super().__init__(path, ArrayInfo.of(names[0], x), ArrayInfo.of(names[1], y))
        self._x, self._y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        # Batches may be views of these arrays, which a problem must not change.
        self._x.setflags(write=False)
        self._y.setflags(write=False)

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored inputs and targets of rows ``[begin, end)``, as views."""
        return self._x[begin:end], self._y[begin:end]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored inputs and targets of `rows`, as copies."""
        return self._x.take(rows, axis=0), self._y.take(rows, axis=0)


def locate(edges: np.ndarray, row: int) -> tuple[int, int]:
    """Return the piece of a row, and the row's number in the piece; see `cuts`."""
    number = int(np.searchsorted(edges, row, "right")) - 1
    return number, row - int(edges[number])


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenation of arrays; a single array without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def cuts(edges: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of rows ``[begin, end)``, with their first row and the end in the piece.

    Args:
        edges: First row of each piece, and the end, shape (pieces + 1,), int64. A piece may have no
            rows.
        begin: The first row.
        end: The row after the last one.
    """
    number, _ = locate(edges, begin)
    while begin < end:
        start, stop = edges[number : number + 2].tolist()
        if stop > begin:
            yield number, begin - start, min(end, stop) - start
            begin = stop
        number += 1


def check_arrays(path: str, x: ArrayInfo, y: ArrayInfo) -> None:
    """Check that `x` and `y` are non-empty arrays of numbers, with equally many samples.

    Raises:
        UserError: If they are not.
    """
    for array in (x, y):
        if array.dtype.kind not in "buif":
            raise no_numbers(path, array.name, NAMES.get(array.dtype.kind, str(array.dtype)))
        if not array.shape or 0 in array.shape:
            got = f"{path}: array {array.name!r} has shape {array.shape}"
            raise UserError(got, "at least one sample, and no empty dimension")
    if x.shape[0] != y.shape[0]:
        got = f"{path}: array {x.name!r} has {x.shape[0]} samples and {y.name!r} has {y.shape[0]}"
        raise UserError(got, "the same number", "name the arrays that belong together")


def no_numbers(path: str, name: str, held: str) -> UserError:
    """Return the error for an array that does not hold numbers."""
    remedy = "make numbers of names by np.unique(names, return_inverse=True)[1]"
    return UserError(f"{path}: array {name!r} holds {held}", "real numbers or integers", remedy)


def pair_of(names: Sequence[str]) -> tuple[str, str]:
    """Return the names of inputs and targets in the text after ``::``; by default ``x`` and ``y``.

    Raises:
        UserError: If there are not two names.
    """
    pair = names or ("x", "y")
    if len(pair) != 2 or not all(pair):
        got = f"array names {','.join(names)!r}"
        raise UserError(got, "two, separated by a comma", "write ::x,y")
    return pair[0], pair[1]


def no_array(path: str, name: str, there: Sequence[str]) -> UserError:
    """Return the error for an array that is missing in a file."""
    expected = f"one of its arrays: {', '.join(there) or 'it has none'}"
    remedy = nearest(name, there) or f"name inputs and targets, as in {Path(path).name}::x,y"
    return UserError(f"{path}: array {name!r} is missing", expected, remedy)


def check_file(path: str) -> None:
    """Check that `path` is a readable file with content.

    Raises:
        UserError: If it is not.
    """
    if not os.path.exists(path):
        parent = Path(path).parent
        there = sorted(os.listdir(parent))[:MAX_NAMES_COMPARED] if parent.is_dir() else []
        hint = nearest(Path(path).name, there) or "check the path"
        raise UserError(f"data file {path} does not exist", "an existing file", hint)
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file", "a data file")
    if not os.access(path, os.R_OK):
        raise UserError(f"data file {path} cannot be read", "a readable file", "check its mode")
    if os.path.getsize(path) == 0:
        raise UserError(f"data file {path} is empty (0 bytes)", "a file with samples")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a path is not a pipe or a device, on which `open` would block.

    Raises:
        UserError: If it is one.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path} is a pipe or a device", "a file")


def is_compressed(path: str) -> bool:
    """Return whether a file is compressed with gzip."""
    with open(path, "rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def open_plain(path: str) -> BinaryIO:
    """Open a file, which gzip decompresses if it is compressed."""
    return cast(BinaryIO, gzip.open(path)) if is_compressed(path) else open(path, "rb")


@contextmanager
def reading(path: str, format_name: str) -> Iterator[None]:
    """Turn an exception of a reader within the block into the UserError of a damaged file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # readers raise exceptions of many types, even TokenError
        raise damaged(path, format_name, error) from None


def damaged(path: str, format_name: str, error: Exception) -> UserError:
    """Return the error for a file that the reader of `format_name` refuses."""
    text = " ".join(str(error).split()) or type(error).__name__
    remedy = "it may be truncated or of another format; make or copy it again"
    return UserError(f"{path} cannot be read ({text})", f"a whole {format_name} file", remedy)
