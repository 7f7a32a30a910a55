"""CSV files with a line of names: ``train.csv::a,b,c,label``, see `arrow`.

A file is gone through once, for where its lines begin, about every megabyte; then any of them are
found. Inputs are double precision; targets are whole numbers, which are classes, if the first
megabyte has no others.
"""

import os
from csv import reader
from itertools import pairwise
from typing import Any

import numpy as np

from mpips.datasets import arrow
from mpips.datasets.arrow import Column
from mpips.datasets.hashed import NAME
from mpips.datasets.table import ArrayInfo, Table, check_file, damaged, reading
from mpips.errors import UserError

FORMAT = "CSV"
PIECE = 1 << 20  # bytes between lines that are known
PIECES = 16  # of text at once, where targets alone are wanted
COMPRESSED = b"\x1f\x8b"


class CsvTable(Table):
    """Columns of a CSV file, parsed when they are asked for.

    Args:
        path: The file.
        names: Columns of inputs, and that of targets behind them.
        places: Where lines begin, as `places` of another; None to go through the file for it.
        hashed: Whether inputs are ids: see `mpips.datasets.hashed`.

    Raises:
        UserError: If the file is missing or empty, has no such columns, or they hold no numbers;
            or if there is no pyarrow.
    """

    in_memory = False

    def __init__(
        self, path: str, names: str = "", places: np.ndarray | None = None, hashed: bool = False
    ) -> None:
        check_file(path)
        self.path, self._hashed = path, hashed
        self._file = os.open(path, os.O_RDONLY)
        try:
            with open(path, "rb") as file:
                line = file.readline(PIECE)
            if line.startswith(COMPRESSED):
                raise damaged(path, f"plain {FORMAT}", ValueError("it is compressed"))
            self._header = _names(line, path)
            columns = arrow.chosen(path, names, self._header)
            found = scan(path, len(line)) if places is None else places
            self._rows, self._at = found.reshape(2, -1)
            self._inputs, self._target = self._columns(columns)
            n, width = int(self._rows[-1]), len(self._inputs)
            name = NAME if hashed else "inputs"
            x = ArrayInfo(name, (n, width) if width > 1 else (n,), np.dtype("f8"))
            super().__init__(path, x, ArrayInfo(columns[-1], (n,), self._target.dtype))
        except BaseException:
            self.close()
            raise
        self._last: tuple[int, int, np.ndarray] | None = None

    @property
    def places(self) -> np.ndarray:
        """Rows and the bytes that they begin at, shape (2 m,), int64."""
        return np.concatenate([self._rows, self._at])

    def read_x(self, begin: int, end: int) -> np.ndarray:
        """Return the inputs of rows ``[begin, end)``, and keep their targets at hand."""
        *x, y = self._read(begin, end, [*self._inputs, self._target])
        self._last = begin, end, y
        return np.stack(x, axis=1) if len(x) > 1 else x[0]

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        if self._last is not None and self._last[:2] == (begin, end):
            return self._last[2]
        edges = self._rows[::PIECES].tolist()
        cuts = [begin, *(row for row in edges if begin < row < end), end]
        return np.concatenate([self._read(*rows, [self._target])[0] for rows in pairwise(cuts)])

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of scattered rows: slow, a megabyte of text each."""
        return arrow.one_by_one(self, rows)

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _columns(self, names: list[str]) -> tuple[list[Column], Column]:
        """Return the columns, after a look at the first lines."""
        first, hashed = self._parse(0, 1, names, {}), self._hashed
        kinds = {
            name: arrow.column_of(self.path, name, first.column(name).type, 0).dtype.kind
            for name in (names[-1:] if hashed else names)
        }
        self._booleans = {name for name, kind in kinds.items() if kind == "b"}
        target = np.dtype("i8" if kinds[names[-1]] in "bi" else "f8")
        inputs = [Column(name, (), np.dtype("f8"), hashed) for name in names[:-1]]
        return inputs, Column(names[-1], (), target)

    def _read(self, begin: int, end: int, columns: list[Column]) -> list[np.ndarray]:
        low = int(np.searchsorted(self._rows, begin, "right")) - 1
        high = int(np.searchsorted(self._rows, end, "left"))
        kinds = {c.name: self._kind(c) for c in columns}
        start, expected = int(self._rows[low]), int(self._rows[high] - self._rows[low])
        table = self._parse(low, high, list(kinds), kinds)
        if len(table) != expected:
            got = f"{self.path}: {len(table)} samples from sample {start} on"
            raise UserError(got, f"{expected}, a line each", "take out empty and quoted lines")
        part = table.slice(begin - start, end - begin).combine_chunks()
        return [arrow.numbers(self.path, c, _whole(part.column(c.name)), begin) for c in columns]

    def _kind(self, column: Column) -> Any:
        """Return the type of Arrow that a column is parsed as; `true` parses as no number."""
        if column.hashed:
            return "string"
        boolean = column.name in self._booleans
        return "bool" if boolean else arrow.load("", "CSV files").from_numpy_dtype(column.dtype)

    def _parse(self, low: int, high: int, names: list[str], kinds: dict[str, Any]) -> Any:
        """Parse the lines between two that are known."""
        csv, pa = arrow.load(".csv", "CSV files"), arrow.load("", "CSV files")
        at, size = int(self._at[low]), int(self._at[high] - self._at[low])
        rows = f"{self._rows[low]} to {self._rows[high] - 1}"
        with reading(f"{self.path}, samples {rows}", FORMAT):
            data = os.pread(self._file, size, at)
            if len(data) < size:
                raise EOFError("it ends early")
            return csv.read_csv(
                pa.BufferReader(data),
                read_options=csv.ReadOptions(column_names=self._header),
                convert_options=csv.ConvertOptions(
                    include_columns=names, column_types=kinds, null_values=[""]
                ),
            )


def open_hashed(path: str, names: str = "", places: np.ndarray | None = None) -> CsvTable:
    """Open a file whose inputs are read as ids."""
    return CsvTable(path, names, places, hashed=True)


def scan(path: str, begin: int) -> np.ndarray:
    """Go through a file for where its lines begin, from a byte on.

    Returns:
        Rows, and the bytes that they begin at, shape (2 m,), int64: the first, one about every
        megabyte, and where the row behind the last would be.
    """
    rows, places, row, at = [0], [begin], 0, begin
    with open(path, "rb") as file:
        file.seek(begin)
        while piece := file.read(PIECE):
            piece += file.readline()
            row += piece.count(b"\n") + (not piece.endswith(b"\n"))
            at += len(piece)
            rows.append(row)
            places.append(at)
    if not row:
        raise UserError(f"{path} has one line alone", "a line of names, and a line a sample")
    return np.array([*rows, *places], np.int64)


def _names(line: bytes, path: str) -> list[str]:
    with reading(path, FORMAT):
        text = line.decode("utf-8-sig").rstrip("\r\n")
        return [name.strip() for name in next(reader([text], skipinitialspace=True)) or [""]]


def _whole(column: Any) -> Any:
    """Return a column of one or no chunk as one array."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
