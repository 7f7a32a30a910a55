"""Parquet files, of which row groups are read: ``train.parquet::a,b,c,label``, see `columns`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpips.datasets.columns import Column, ColumnTable, columns_of, load

ROWS = 1 << 16  # that are decoded at once


class ParquetTable(ColumnTable):
    """Columns of a Parquet file; a piece is a row group."""

    format = "Parquet"

    @property
    def together(self) -> int:
        """Rows of the largest group: to read one of them takes as long as to read all."""
        return int(np.diff(self._starts).max())

    def _open(self) -> Any:
        return load(".parquet").ParquetFile(self.path)

    def _read_header(self) -> list[str]:
        return list(self._file.schema_arrow.names)

    def _find_pieces(self, places: np.ndarray | None) -> np.ndarray:
        about = self._file.metadata
        groups = [about.row_group(k).num_rows for k in range(about.num_row_groups)]
        return np.cumsum([0, *groups])

    def _columns(self, names: Sequence[str], hashed: bool) -> list[Column]:
        kinds = {name: self._file.schema_arrow.field(name).type for name in names}
        lists = [
            k for k, kind in kinds.items() if kind.num_fields and not hasattr(kind, "list_size")
        ]
        lengths = {name: self._first_length(name) for name in lists}
        return columns_of(self.path, kinds, hashed, lengths)

    def _first_length(self, name: str) -> int:
        """Return the length of the first list of a column; 0 if that is none."""
        for batch in self._file.iter_batches(1, columns=[name]):
            first = batch.column(0)[0].as_py()
            return len(first) if isinstance(first, list) else 0
        return 0

    def _batches(self, low: int, high: int, columns: Sequence[Column]) -> Iterator[Any]:
        names = [column.name for column in columns]
        # To wake another thread for one column takes longer than it gains.
        return self._file.iter_batches(
            ROWS, row_groups=list(range(low, high)), columns=names, use_threads=len(names) > 1
        )


def open_hashed(path: str, names: str = "") -> ParquetTable:
    """Open a file whose inputs are read as ids."""
    return ParquetTable(path, names, hashed=True)
