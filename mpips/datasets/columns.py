"""Columns of CSV and Parquet files, read by pyarrow: ``train.csv::a,b,c,label``.

The last named column has the targets, the others have the inputs. A single column of inputs may
have lists of equal length. Parquet files are read by row groups.

The first line of a CSV file has the names. The file is scanned once for positions of lines, about
one every megabyte. They locate any line. Inputs have double precision. Targets are class numbers,
if those in the first megabyte are whole numbers.
"""

import csv
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from mpips import extras
from mpips.datasets.csr import ids_of
from mpips.datasets.table import (
    HASHED,
    ArrayInfo,
    Table,
    check_file,
    damaged,
    is_compressed,
    joined,
    no_numbers,
    reading,
)
from mpips.errors import UserError, nearest

MAX_NAMES_SHOWN = 20
PIECE = 1 << 20  # bytes between lines of a CSV file whose positions are stored
PIECES = 16  # pieces that are parsed at once
ROWS = 1 << 16  # rows of a Parquet file that are decoded at once


@dataclass(frozen=True)
class Column(ArrayInfo):
    """A column: its name, the shape of one row, its dtype, and whether its values are hashed."""

    hashed: bool = False


class ColumnTable(Table):
    """Columns of a file, read in pieces on demand.

    Args:
        path: The file.
        names: Columns of the inputs, then the column of targets.
        places: Positions of pieces, as the attribute `places` of another table of the file; None
            to find them.

    Raises:
        UserError: If the file is missing, empty or damaged; if it lacks a column, or one does not
            have numbers; if pyarrow is not installed.
    """

    in_memory = False
    hashed: ClassVar[bool] = False  # True if inputs are hashed to ids: see `mpips.datasets.csr`
    format: ClassVar[str]
    _file: Any = None

    def __init__(self, path: str, names: str = "", places: np.ndarray | None = None) -> None:
        check_file(path)
        self.path = path
        try:
            with reading(path, self.format):
                self._header = self._open()
                wanted = _chosen(path, names, self._header)
                self._starts = self._find_pieces(places)
                *self._inputs, self._target = self._columns(wanted)
            n, x = int(self._starts[-1]), _inputs_of(path, self._inputs)
            super().__init__(path, x.times(n), self._target.times(n))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> list[str]:
        """Open the file, and return the names of all columns."""

    @abstractmethod
    def _find_pieces(self, places: np.ndarray | None) -> np.ndarray:
        """Return the first row of each piece, and the end, shape (pieces + 1,), int64."""

    @abstractmethod
    def _columns(self, names: Sequence[str]) -> list[Column]:
        """Return descriptions of columns, that of the target last."""

    @abstractmethod
    def _batches(self, low: int, high: int, columns: Sequence[Column]) -> Iterator[Any]:
        """Yield columns of the pieces ``[low, high)`` as record batches, in order."""

    def _described(self, kinds: Mapping[str, Any], lengths: Mapping[str, int]) -> list[Column]:
        """Return descriptions of columns by Arrow types, and by lengths of their first lists."""
        target = list(kinds)[-1]
        return [
            _column_of(self.path, name, kind, lengths.get(name, 0), self.hashed and name != target)
            for name, kind in kinds.items()
        ]

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of rows ``[begin, end)``."""
        *x, y = self._read(begin, end, [*self._inputs, self._target])
        if len(x) == 1:
            return joined(x[0]), joined(y)
        out = np.empty((end - begin, len(x)), self.x.dtype)
        for k, parts in enumerate(x):
            np.concatenate(parts, out=out[:, k])
        return out, joined(y)

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        return joined(self._read(begin, end, [self._target])[0])

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file is not None:
            self._file.close()

    def _read(self, begin: int, end: int, columns: Sequence[Column]) -> list[list[np.ndarray]]:
        """Return, for each column, arrays that together have its rows ``[begin, end)``."""
        low = int(np.searchsorted(self._starts, begin, "right")) - 1
        high = int(np.searchsorted(self._starts, end, "left"))
        at, values_of = int(self._starts[low]), [list[np.ndarray]() for _ in columns]
        with reading(f"{self.path}, samples {begin} to {end - 1}", self.format):
            for batch in self._batches(low, high, columns):
                first, last = max(begin, at), min(end, at + len(batch))
                if first < last:
                    part = batch.slice(first - at, last - first)
                    for column, arrays in zip(columns, values_of, strict=True):
                        values = part.column(part.schema.get_field_index(column.name))
                        arrays.append(_numbers(self.path, column, values, first))
                at += len(batch)
                if at >= end:
                    break
            if at < end:
                raise EOFError("it ends early")
        return values_of


class ParquetTable(ColumnTable):
    """Columns of a Parquet file. A piece is a row group, which is read completely for any row."""

    format = "Parquet"

    def _open(self) -> list[str]:
        self._file = _load(".parquet").ParquetFile(self.path)
        return list(self._file.schema_arrow.names)

    def _find_pieces(self, places: np.ndarray | None) -> np.ndarray:
        about = self._file.metadata
        groups = [about.row_group(k).num_rows for k in range(about.num_row_groups)]
        self.together = max(groups, default=1)
        return np.cumsum([0, *groups])

    def _columns(self, names: Sequence[str]) -> list[Column]:
        kinds = {name: self._file.schema_arrow.field(name).type for name in names}
        lists = [
            k for k, kind in kinds.items() if kind.num_fields and not hasattr(kind, "list_size")
        ]
        return self._described(kinds, {name: self._first_length(name) for name in lists})

    def _first_length(self, name: str) -> int:
        """Return the length of a column's first list; 0 if the first row has none."""
        for batch in self._file.iter_batches(1, columns=[name]):
            first = batch.column(0)[0].as_py()
            return len(first) if isinstance(first, list) else 0
        return 0

    def _batches(self, low: int, high: int, columns: Sequence[Column]) -> Iterator[Any]:
        names = [column.name for column in columns]
        # For a single column, waking another thread takes longer than it saves.
        return self._file.iter_batches(
            ROWS, row_groups=list(range(low, high)), columns=names, use_threads=len(names) > 1
        )


class HashedParquetTable(ParquetTable):
    """Columns of a Parquet file, with inputs hashed to ids."""

    hashed = True


class CsvTable(ColumnTable):
    """Columns of a CSV file. A piece is about a megabyte of lines.

    `places` has the first row of each piece and the number of rows, then their positions in bytes.
    """

    format = "CSV"

    def _open(self) -> list[str]:
        self._file = open(self.path, "rb")  # noqa: SIM115 - closed by `close`
        if is_compressed(self.path):
            raise damaged(self.path, f"plain {self.format}", ValueError("it is compressed"))
        line = self._file.readline()
        self._begin = len(line)
        text = line.decode("utf-8-sig").rstrip("\r\n")
        return [name.strip() for name in next(csv.reader([text], skipinitialspace=True)) or [""]]

    def _find_pieces(self, places: np.ndarray | None) -> np.ndarray:
        self.places = scan(self.path, self._begin) if places is None else places
        rows, self._at = self.places.reshape(2, -1)
        return rows

    def _columns(self, names: Sequence[str]) -> list[Column]:
        as_text = dict.fromkeys(names[:-1], "string") if self.hashed else {}
        first = self._parse(0, 1, names, as_text)
        kinds = {name: first.schema.field(name).type for name in names}
        *inputs, target = stored = self._described(kinds, {})
        dtype = np.dtype("i8" if target.dtype.kind in "bi" else "f8")
        found = [each if each.hashed else replace(each, dtype=np.dtype("f8")) for each in inputs]
        found.append(replace(target, dtype=dtype))
        # Arrow's types to parse as: `true` does not parse as a number.
        self._kinds = {c.name: _load().from_numpy_dtype(c.dtype) for c in found} | as_text
        self._kinds |= {c.name: "bool" for c in stored if c.dtype.kind == "b"}
        return found

    def _batches(self, low: int, high: int, columns: Sequence[Column]) -> Iterator[Any]:
        kinds = {c.name: self._kinds[c.name] for c in columns}
        for first in range(low, high, PIECES):
            last = min(first + PIECES, high)
            begin, end = self._starts[[first, last]].tolist()
            table = self._parse(first, last, list(kinds), kinds)
            if len(table) != end - begin:
                got = f"{self.path}: {len(table)} samples from sample {begin} on"
                expected = f"{end - begin}, a line each"
                raise UserError(got, expected, "take out empty and quoted lines")
            yield from table.to_batches()

    def _parse(self, low: int, high: int, names: Sequence[str], kinds: Mapping[str, Any]) -> Any:
        """Parse columns of the lines of pieces ``[low, high)``."""
        at, size = int(self._at[low]), int(self._at[high] - self._at[low])
        data = os.pread(self._file.fileno(), size, at)
        if len(data) < size:
            raise EOFError("it ends early")
        arrow = _load(".csv")
        convert = arrow.ConvertOptions(include_columns=names, column_types=kinds, null_values=[""])
        longest = int(np.diff(self._at[low : high + 1]).max())  # no line is longer than a block
        reads = arrow.ReadOptions(column_names=self._header, block_size=longest)
        return arrow.read_csv(_load().BufferReader(data), reads, convert_options=convert)


class HashedCsvTable(CsvTable):
    """Columns of a CSV file, with inputs hashed to ids."""

    hashed = True


def scan(path: str, begin: int) -> np.ndarray:
    """Scan a CSV file for positions of lines, from a byte on.

    Returns:
        Rows, then their positions in bytes, shape (2 m,), int64: the first row, a row about every
        megabyte, and the end of the file.

    Raises:
        UserError: If the file has no line after the names.
    """
    rows, places = [0], [begin]
    with open(path, "rb") as file:
        file.seek(begin)
        while piece := file.read(PIECE):
            piece += file.readline()
            rows.append(rows[-1] + piece.count(b"\n") + (not piece.endswith(b"\n")))
            places.append(places[-1] + len(piece))
    if not rows[-1]:
        raise UserError(f"{path} has one line alone", "a line of names, and a line a sample")
    return np.array([*rows, *places], np.int64)


def _load(module: str = "") -> Any:
    """Import a module of pyarrow.

    Raises:
        UserError: If pyarrow is not installed.
    """
    return extras.load(f"pyarrow{module}", "pyarrow", "parquet", "reads CSV and Parquet files")


def _chosen(path: str, names: str, there: list[str]) -> list[str]:
    """Return the columns in `names`, at least two.

    Raises:
        UserError: If a column is not in the file, or is named twice.
    """
    shown = ", ".join(there[:MAX_NAMES_SHOWN])
    chosen = next(csv.reader([names])) if names else []
    if len(chosen) < 2:
        got = f"columns {names!r} of {path}" if names else f"{path} without names of columns"
        expected = f"inputs and a target among {shown}"
        raise UserError(got, expected, f"write it as {path}::{there[0]},{there[-1]}")
    for name in chosen:
        if name not in there:
            remedy = nearest(name, there) or "name inputs, then the target"
            raise UserError(f"{path}: column {name!r} is missing", f"one of {shown}", remedy)
        if chosen.count(name) > 1:
            raise UserError(f"{path}: column {name!r} is named twice", "each once")
        if there.count(name) > 1:
            raise UserError(f"{path} has two columns {name!r}", "one", "rename one of them")
    return chosen


def _column_of(path: str, name: str, kind: Any, length: int, hashed: bool) -> Column:
    """Return the description of a column.

    Args:
        path: The file, for messages.
        name: Name of the column.
        kind: Its Arrow type.
        length: Length of its first list, for a column of lists.
        hashed: Whether its values are hashed to ids.

    Raises:
        UserError: If it does not have numbers, or its values cannot be hashed.
    """
    if hashed and kind.num_fields:  # text in a dictionary has none
        got = f"{path}: column {name!r} of {kind}, which is to be hashed"
        raise UserError(got, "text or numbers", "write a column for each of its values")
    if hashed:
        return Column(name, (), np.dtype("i8"), True)
    types, shape = _load(".types"), tuple[int, ...]()
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
    """Return the name, shape and dtype of a sample's inputs, from one or several columns."""
    shape, name = columns[0].shape, columns[0].name
    if len(columns) > 1:
        shape, name = (len(columns),), "inputs"
        for column in columns:
            if column.shape:
                got = f"{path}: column {column.name!r} of lists beside others"
                raise UserError(got, "one column of lists, or columns of numbers as inputs")
    dtype = np.result_type(*(column.dtype for column in columns))
    return ArrayInfo(HASHED if columns[0].hashed else name, shape, dtype)


def _numbers(path: str, column: Column, values: Any, first: int) -> np.ndarray:
    """Return a column's values, shape (n, *column.shape).

    Args:
        path: The file, for messages.
        column: The column.
        values: An Arrow array of a part of it.
        first: Row of the first value, for messages.

    Raises:
        UserError: If a value is missing, or a list has another length. It names the row.
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
