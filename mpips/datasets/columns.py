"""Tables of columns, read by pyarrow: what CSV and Parquet files share.

``::a,b,c,label`` names columns: the last has the targets, the others the inputs. One column of
inputs may be of lists of one length.
"""

import csv
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpips import extras
from mpips.datasets.hashed import NAME, ids_of
from mpips.datasets.table import ArrayInfo, Table, check_file, no_numbers, reading
from mpips.errors import UserError, nearest

MAX_NAMES_SHOWN = 20


@dataclass(frozen=True)
class Column:
    """A column: its name, the shape of a row of it, its dtype, whether it is read as ids."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    hashed: bool = False


class ColumnTable(Table):
    """Columns of a file, read piece by piece when they are asked for.

    Args:
        path: The file.
        names: Columns of inputs, and that of targets behind them.
        places: Where pieces begin, as `places` of another; None to find that out.
        hashed: Whether inputs are ids: see `mpips.datasets.hashed`.

    Raises:
        UserError: If the file is missing, empty or damaged, has no such columns, or they hold no
            numbers; or if there is no pyarrow.
    """

    in_memory = False
    format: ClassVar[str]

    def __init__(
        self, path: str, names: str = "", places: np.ndarray | None = None, hashed: bool = False
    ) -> None:
        check_file(path)
        self.path = path
        self._last: tuple[int, int, np.ndarray] | None = None
        with reading(path, self.format):
            self._file = self._open()
        try:
            with reading(path, self.format):
                self._header = self._read_header()
                wanted = chosen(path, names, self._header)
                self._starts = self._find_pieces(places)
                *self._inputs, self._target = self._columns(wanted, hashed)
            n = int(self._starts[-1])
            x, target = _inputs_of(path, self._inputs), self._target
            y = ArrayInfo(target.name, (n, *target.shape), target.dtype)
            super().__init__(path, ArrayInfo(x.name, (n, *x.shape), x.dtype), y)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> Any:
        """Return the open file."""

    @abstractmethod
    def _read_header(self) -> list[str]:
        """Return the names of all columns."""

    @abstractmethod
    def _find_pieces(self, places: np.ndarray | None) -> np.ndarray:
        """Return the first row of each piece, and the end, shape (pieces + 1,), int64."""

    @abstractmethod
    def _columns(self, names: Sequence[str], hashed: bool) -> list[Column]:
        """Return what columns hold, the target's last."""

    @abstractmethod
    def _batches(self, low: int, high: int, columns: Sequence[Column]) -> Iterator[Any]:
        """Yield columns of the pieces ``[low, high)`` as record batches, one behind the other."""

    def read_x(self, begin: int, end: int) -> np.ndarray:
        """Return the inputs of rows ``[begin, end)``, and keep their targets at hand."""
        *x, y = self._read(begin, end, [*self._inputs, self._target])
        self._last = begin, end, _joined(y)
        if len(x) == 1:
            return _joined(x[0])
        out = np.empty((end - begin, len(x)), self.x.dtype)
        for k, parts in enumerate(x):
            np.concatenate(parts, out=out[:, k])
        return out

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        if self._last is not None and self._last[:2] == (begin, end):
            return self._last[2]
        return _joined(self._read(begin, end, [self._target])[0])

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of scattered rows: slow, a piece of the file each."""
        wanted, places = np.unique(rows, return_inverse=True)
        pairs = [(self.read_x(row, row + 1), self.read_y(row, row + 1)) for row in wanted.tolist()]
        x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        return x[places], y[places]

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _read(self, begin: int, end: int, columns: Sequence[Column]) -> list[list[np.ndarray]]:
        """Return the arrays of each column that make its rows ``[begin, end)``."""
        low = int(np.searchsorted(self._starts, begin, "right")) - 1
        high = int(np.searchsorted(self._starts, end, "left"))
        at, found = int(self._starts[low]), [list[np.ndarray]() for _ in columns]
        with reading(f"{self.path}, samples {begin} to {end - 1}", self.format):
            for batch in self._batches(low, high, columns):
                first = max(begin, at)
                part = batch.slice(first - at, max(0, min(end, at + len(batch)) - first))
                for column, arrays in zip(columns, found, strict=True):
                    values = part.column(part.schema.get_field_index(column.name))
                    if len(part):
                        arrays.append(_numbers(self.path, column, values, first))
                at += len(batch)
                if at >= end:
                    break
            if at < end:
                raise EOFError("it ends early")
        return found


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def load(module: str = "") -> Any:
    """Import a module of pyarrow.

    Raises:
        UserError: If there is none.
    """
    what = "reads CSV and Parquet files"
    return extras.load(f"pyarrow{module}", "pyarrow", "parquet", what)


def chosen(path: str, names: str, there: list[str]) -> list[str]:
    """Return the columns that `names` names, at least two.

    Raises:
        UserError: If they are not in the file, or one is named twice.
    """
    shown = ", ".join(there[:MAX_NAMES_SHOWN])
    found = next(csv.reader([names])) if names else []
    if len(found) < 2:
        got = f"columns {names!r} of {path}" if names else f"{path} without names of columns"
        expected = f"inputs and a target among {shown}"
        raise UserError(got, expected, f"write it as {path}::{there[0]},{there[-1]}")
    for name in found:
        if name not in there:
            remedy = nearest(name, there) or "name inputs, then the target"
            raise UserError(f"{path}: column {name!r} is missing", f"one of {shown}", remedy)
        if found.count(name) > 1:
            raise UserError(f"{path}: column {name!r} is named twice", "each once")
        if there.count(name) > 1:
            raise UserError(f"{path} has two columns {name!r}", "one", "rename one of them")
    return found


def columns_of(
    path: str, kinds: Mapping[str, Any], hashed: bool, lengths: Mapping[str, int]
) -> list[Column]:
    """Return what columns hold.

    Args:
        path: The file, for messages.
        kinds: Tsuccessor types by name, the target's last.
        hashed: Whether all but the last are read as ids.
        lengths: Of the first lists of columns of lists.

    Raises:
        UserError: If one holds no numbers, or nothing that can be hashed.
    """
    *inputs, target = kinds
    for name in inputs if hashed else ():
        if kinds[name].num_fields:  # of text in a dictionary there are none
            got = f"{path}: column {name!r} of {kinds[name]}, which is to be hashed"
            raise UserError(got, "text or numbers", "write a column for each of its values")
    plain = [target] if hashed else list(kinds)
    ids = [Column(name, (), np.dtype("i8"), True) for name in inputs if hashed]
    return ids + [_column_of(path, name, kinds[name], lengths.get(name, 0)) for name in plain]


def _column_of(path: str, name: str, kind: Any, length: int) -> Column:
    types, shape = load(".types"), tuple[int, ...]()
    is_fixed = types.is_fixed_size_list(kind)
    if is_fixed or types.is_list(kind) or types.is_large_list(kind):
        shape, kind = (kind.list_size if is_fixed else length,), kind.value_type
    if types.is_dictionary(kind):
        raise no_numbers(path, name, "categories")
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        is_text = types.is_string(kind) or types.is_large_string(kind)
        raise no_numbers(path, name, "text" if is_text else f"values of type {kind}")
    return Column(name, shape, np.dtype(kind.to_pandas_dtype()))


def _inputs_of(path: str, columns: Sequence[Column]) -> ArrayInfo:
    """Return the name, shape and dtype of a sample's inputs, which several columns make."""
    shape, name = columns[0].shape, columns[0].name
    if len(columns) > 1:
        shape, name = (len(columns),), "inputs"
        for column in columns:
            if column.shape:
                got = f"{path}: column {column.name!r} of lists beside others"
                raise UserError(got, "one column of lists, or columns of numbers as inputs")
    dtype = np.result_type(*(column.dtype for column in columns))
    return ArrayInfo(NAME if columns[0].hashed else name, shape, dtype)


def _numbers(path: str, column: Column, values: Any, first: int) -> np.ndarray:
    """Return a column's values, shape (n, *column.shape).

    Args:
        path: The file, for messages.
        column: The column.
        values: An Arrow array.
        first: Row of the first value, for messages.

    Raises:
        UserError: If one is missing, or a list is of another length; it names the row.
    """
    where, size = f"{path}: column {column.name!r}", 1
    if column.hashed:
        return ids_of(column.name, values)
    rows = values
    if column.shape and not rows.null_count:
        (size,) = column.shape
        if hasattr(rows, "value_lengths"):
            lengths = rows.value_lengths().to_numpy(zero_copy_only=False)
            if (lengths != size).any():
                at = int(np.argmax(lengths != size))
                got = f"{where}, sample {first + at} has {lengths[at]} values"
                raise UserError(got, f"{size}, as the first", "leave it out")
        rows = rows.flatten()
    if rows.null_count:
        row = first + int(np.argmax(rows.is_null().to_numpy(zero_copy_only=False))) // size
        got = f"{where}, sample {row} has no value"
        raise UserError(got, "a number", "leave it out, or fill it")
    found = np.asarray(rows.to_numpy(zero_copy_only=False), column.dtype)
    return found.reshape(-1, *column.shape)
