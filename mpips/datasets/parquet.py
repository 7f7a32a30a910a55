"""Parquet files, of which row groups are read: ``train.parquet::a,b,c,label``, see `arrow`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpips.datasets import arrow
from mpips.datasets.arrow import Column
from mpips.datasets.hashed import NAME
from mpips.datasets.table import ArrayInfo, Table, check_file, reading
from mpips.errors import UserError

FORMAT = "Parquet"
ROWS = 1 << 16  # that are decoded at once


class ParquetTable(Table):
    """Columns of a Parquet file, read when they are asked for.

    Args:
        path: The file.
        names: Columns of inputs, and that of targets behind them.
        hashed: Whether inputs are ids: see `mpips.datasets.hashed`.

    Raises:
        UserError: If the file is missing, empty, truncated or not Parquet, has no such columns, or
            they hold no numbers; or if there is no pyarrow.
    """

    in_memory = False

    def __init__(self, path: str, names: str = "", hashed: bool = False) -> None:
        check_file(path)
        self._hashed = hashed
        parquet = arrow.load(".parquet", "Parquet files")
        with reading(path, FORMAT):
            self._file = parquet.ParquetFile(path)
        self.path = path
        try:
            *inputs, target = self._columns(names)
            self._inputs, self._target = inputs, target
            about, n = self._file.metadata, self._file.metadata.num_rows
            groups = [about.row_group(k).num_rows for k in range(about.num_row_groups)]
            self._starts = np.cumsum([0, *groups])
            shape, dtype = arrow.inputs_of(path, inputs)
            name = inputs[0].name if len(inputs) == 1 else "inputs"
            name = NAME if hashed else name
            x, y = ArrayInfo(name, (n, *shape), dtype), (n, *target.shape)
            super().__init__(path, x, ArrayInfo(target.name, y, target.dtype))
        except BaseException:
            self._file.close()
            raise

    @property
    def together(self) -> int:
        """Rows of the largest group: to read one of them takes as long as to read all."""
        return int(np.diff(self._starts).max())

    def read_x(self, begin: int, end: int) -> np.ndarray:
        """Return the inputs of rows ``[begin, end)``."""
        out = np.empty((end - begin, *self.x.shape[1:]), self.x.dtype)
        whole = len(self._inputs) == 1 and begin in self._starts and end in self._starts
        for at, parts in self._read(begin, end, self._inputs):
            if whole and len(parts[0]) == len(out):
                return parts[0]  # as it was decoded
            rows = slice(at - begin, at - begin + len(parts[0]))
            for k, part in enumerate(parts):
                out[(rows, k) if len(parts) > 1 else rows] = part
        return out

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        return np.concatenate([parts[0] for _, parts in self._read(begin, end, [self._target])])

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of scattered rows: slow, a row group each."""
        return arrow.one_by_one(self, rows)

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _columns(self, names: str) -> list[Column]:
        schema = self._file.schema_arrow
        fields = {field.name: field.type for field in schema}
        found, wanted = list[Column](), arrow.chosen(self.path, names, schema.names)
        if self._hashed:
            for name in wanted[:-1]:
                if fields[name].num_fields:  # of text in a dictionary there are none
                    got = f"{self.path}: column {name!r} of {fields[name]}, which is to be hashed"
                    raise UserError(got, "text or numbers", "write a column for each of its values")
            found = [Column(name, (), np.dtype("i8"), True) for name in wanted[:-1]]
        for name in wanted[len(found) :]:
            length = 0
            if hasattr(fields[name], "value_type") and not hasattr(fields[name], "list_size"):
                length = self._first_length(name)
            found.append(arrow.column_of(self.path, name, fields[name], length))
        return found

    def _first_length(self, name: str) -> int:
        """Return the length of the first list of a column; 0 if that is none."""
        with reading(self.path, FORMAT):
            for batch in self._file.iter_batches(1, columns=[name]):
                first = batch.column(0)[0].as_py()
                return len(first) if isinstance(first, list) else 0
        return 0

    def _read(
        self, begin: int, end: int, columns: list[Column]
    ) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yield arrays of columns, piece by piece, each with its first row."""
        first = int(np.searchsorted(self._starts, begin, "right")) - 1
        last = int(np.searchsorted(self._starts, end, "left"))
        at = int(self._starts[first])
        pieces = self._file.iter_batches(
            ROWS,
            row_groups=list(range(first, last)),
            columns=[c.name for c in columns],
            use_threads=len(columns) > 1,  # to wake another thread takes longer than it gains
        )
        while at < end:
            with reading(f"{self.path}, samples {begin} to {end - 1}", FORMAT):
                piece: Any = next(pieces)
                low, high = max(begin, at) - at, min(end, at + len(piece)) - at
                if low < high:
                    part = piece.slice(low, high - low)
                    values = [part.column(part.schema.get_field_index(c.name)) for c in columns]
                    yield (
                        at + low,
                        [
                            arrow.numbers(self.path, c, v, at + low)
                            for c, v in zip(columns, values, strict=True)
                        ],
                    )
                at += len(piece)


def open_hashed(path: str, names: str = "") -> ParquetTable:
    """Open a file whose inputs are read as ids."""
    return ParquetTable(path, names, hashed=True)
