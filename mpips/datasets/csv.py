"""CSV files with a line of names: ``train.csv::a,b,c,label``, see `columns`.

A file is gone through once, for where its lines begin, about every megabyte; then any of them are
found. Inputs are double precision; targets are whole numbers, which are classes, if the first
megabyte has no others.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from csv import reader
from dataclasses import replace
from typing import Any

import numpy as np

from mpips.datasets.columns import Column, ColumnTable, columns_of, load
from mpips.datasets.table import damaged
from mpips.errors import UserError

PIECE = 1 << 20  # bytes between lines that are known
PIECES = 16  # that are parsed at once
COMPRESSED = b"\x1f\x8b"


class CsvTable(ColumnTable):
    """Columns of a CSV file; a piece is about a megabyte of lines."""

    format = "CSV"

    @property
    def places(self) -> np.ndarray:
        """Rows and the bytes that they begin at, shape (2 m,), int64."""
        return np.concatenate([self._starts, self._at])

    def _open(self) -> Any:
        return open(self.path, "rb", buffering=0)

    def _read_header(self) -> list[str]:
        line = os.pread(self._file.fileno(), PIECE, 0).partition(b"\n")[0]
        if line.startswith(COMPRESSED):
            raise damaged(self.path, f"plain {self.format}", ValueError("it is compressed"))
        self._begin = len(line) + 1
        text = line.decode("utf-8-sig").rstrip("\r")
        return [name.strip() for name in next(reader([text], skipinitialspace=True)) or [""]]

    def _find_pieces(self, places: np.ndarray | None) -> np.ndarray:
        found = scan(self.path, self._begin) if places is None else places
        rows, self._at = found.reshape(2, -1)
        return rows

    def _columns(self, names: Sequence[str], hashed: bool) -> list[Column]:
        first = self._parse(0, 1, names, dict.fromkeys(names[:-1], "string") if hashed else {})
        kinds = {name: first.schema.field(name).type for name in names}
        found = columns_of(self.path, kinds, hashed, {})
        self._booleans = {column.name for column in found if column.dtype.kind == "b"}
        whole = found[-1].dtype.kind in "bi"
        inputs = [c if c.hashed else replace(c, dtype=np.dtype("f8")) for c in found[:-1]]
        return [*inputs, replace(found[-1], dtype=np.dtype("i8" if whole else "f8"))]

    def _batches(self, low: int, high: int, columns: Sequence[Column]) -> Iterator[Any]:
        kinds = {c.name: self._kind(c) for c in columns}
        for first in range(low, high, PIECES):
            last = min(first + PIECES, high)
            begin, end = self._starts[[first, last]].tolist()
            table = self._parse(first, last, list(kinds), kinds)
            if len(table) != end - begin:
                got = f"{self.path}: {len(table)} samples from sample {begin} on"
                expected = f"{end - begin}, a line each"
                raise UserError(got, expected, "take out empty and quoted lines")
            yield from table.to_batches()

    def _kind(self, column: Column) -> Any:
        """Return the type of Arrow that a column is parsed as; `true` parses as no number."""
        if column.hashed:
            return "string"
        boolean = column.name in self._booleans
        return "bool" if boolean else load().from_numpy_dtype(column.dtype)

    def _parse(self, low: int, high: int, names: Sequence[str], kinds: Mapping[str, Any]) -> Any:
        """Parse columns of the lines between two that are known."""
        at, size = int(self._at[low]), int(self._at[high] - self._at[low])
        data = os.pread(self._file.fileno(), size, at)
        if len(data) < size:
            raise EOFError("it ends early")
        csv = load(".csv")
        return csv.read_csv(
            load().BufferReader(data),
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
