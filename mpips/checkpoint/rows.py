"""One owner's rows of all tables in one HDF5 file: those that have been changed, by their numbers.

``tables/<table>/rows`` has the numbers, in any order, ``params`` beside it a row each, and
``slots/<slot>`` what the update rule keeps of each. The file is recorded, summed and checked like a
shard file, as the range of all rows in it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpips.checkpoint.files import (
    FORMAT,
    PIECE_BYTES,
    PathLike,
    create_h5,
    damaged,
    file_sha256,
    item,
    pieces,
    reading,
    rows_file,
    write_durably,
)
from mpips.checkpoint.shards import PARAMS, ShardRecord, check_identity, slot_dataset
from mpips.checkpoint.stream import Stream

if TYPE_CHECKING:
    import h5py

ROWS = "rows"
READ_BYTES = 1 << 20  # of rows in a piece, all columns together: two are there at a time


class RowSource(Protocol):
    """Rows of a table that come a piece at a time."""

    @property
    def count(self) -> int:
        """How many they are."""

    def pieces(self) -> "Iterator[TableRows]":
        """Yield them, at least one piece, which may be of no rows; once."""


@dataclass(frozen=True)
class TableRows:
    """Some rows of a table.

    Attributes:
        rows: Their numbers, no two alike, shape (k,), dtype int64.
        params: Their values, shape (k, dim), dtype float32 or float64.
        slots: What the update rule keeps of each, by slot, each of shape (k, ...).
    """

    rows: np.ndarray
    params: np.ndarray
    slots: Mapping[str, np.ndarray]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of them, by the names of their datasets."""
        slots = {slot_dataset(name): slot for name, slot in self.slots.items()}
        return {ROWS: self.rows, PARAMS: self.params, **slots}

    @property
    def count(self) -> int:
        """See `RowSource.count`."""
        return len(self.rows)

    def pieces(self) -> "Iterator[TableRows]":
        """See `RowSource.pieces`."""
        yield self


def write_rows(
    folder: PathLike,
    owner: int,
    step: int,
    tables: Mapping[str, RowSource],
    base: int | None = None,
) -> ShardRecord:
    """Write one owner's rows, durably; may run in a thread beside the training.

    Args:
        folder: What `begin_step` returned.
        owner: Number of the owner; names the file.
        step: The step of the checkpoint.
        tables: Rows by table.
        base: The step of the checkpoint since which these have changed; None where they are all
            that have ever been changed.

    Returns:
        The record that `commit` needs.

    Raises:
        ValueError: If arrays of one table differ in length, or it has another number of rows than
            it said.
        UserError: If the file system refuses.

    Blocks: until the file is on the disk. Other threads run meanwhile.
    """
    size = sum(table.count for table in tables.values())
    attributes = {"version": FORMAT, "begin": 0, "end": size, "step": step, "owner": owner}
    final = Path(folder) / rows_file(owner)

    def write(path: Path) -> None:
        with create_h5(path) as file:
            file.attrs.update(attributes)
            for name, table in tables.items():
                _write_table(file, name, table)

    write_durably(final, write)
    found = final.stat().st_size, file_sha256(final)
    return ShardRecord(owner, final.name, 0, size, *found, base)


def _write_table(file: "h5py.File", name: str, table: RowSource) -> None:
    """Write the rows of a table as they come, one piece behind another."""
    at, count, out = 0, table.count, dict[str, "h5py.Dataset"]()
    for piece in table.pieces():
        lengths = {len(array) for array in piece.arrays.values()}
        if len(lengths) > 1:
            raise ValueError(f"table {name} of lengths {lengths}, expected one")
        for column, array in piece.arrays.items():
            if column not in out:
                shape = count, *array.shape[1:]
                out[column] = file.create_dataset(_place(name, column), shape, array.dtype)
            for begin, end in pieces(0, len(array), _row_bytes(array)):
                out[column][at + begin : at + end] = array[begin:end]
        at += len(piece.rows)
    if at != count:
        raise ValueError(f"{at} rows of table {name}, expected {count}")


def read_rows(folder: Path, record: ShardRecord, step: int, table: str) -> Iterator[TableRows]:
    """Yield the rows of a table in an owner's file, a piece after another.

    Raises:
        UserError: If the file cannot be read or is not the one that the record describes.
    """
    path = folder / record.file
    with reading(path, f"table {table}") as file:
        check_identity(path, file, record, step)
        group = item(file, _place(table, ""))
        numbers, params = item(group, ROWS), item(group, PARAMS)
        slots = {name: item(group, slot_dataset(name)) for name in _slots(group)}
        arrays = (params, *slots.values())
        if {len(array) for array in arrays} != {len(numbers)}:
            lengths = [len(array) for array in arrays]
            got = f"{path}: arrays of table {table} of lengths {lengths}"
            raise damaged(got, str(len(numbers)))
        count = max(1, READ_BYTES // sum(map(_row_bytes, (numbers, *arrays))))
        for begin in range(0, len(numbers), count):
            some = slice(begin, begin + count)
            kept = {name: slot[some] for name, slot in slots.items()}
            yield TableRows(numbers[some], params[some], kept)


def map_params(folder: Path, record: ShardRecord, step: int, table: str) -> np.ndarray:
    """Return the values of a table's rows in an owner's file, where they stay until they are read.

    Pages that are read are in memory once a host, as long as it has no better use for it.

    Raises:
        UserError: As `read_rows`.
    """
    path = folder / record.file
    with reading(path, f"table {table}") as file:
        check_identity(path, file, record, step)
        dataset = item(file, _place(table, PARAMS))
        offset, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
        if offset is None:  # so short that it lies elsewhere, or of no rows
            return np.asarray(dataset[:])
        return np.memmap(path, dtype, "r", offset, shape)  # which a file that is too short refuses


def read_columns(
    folder: Path, record: ShardRecord, step: int, table: str
) -> dict[str, tuple[int, tuple[int, ...], np.dtype]]:
    """Return of a table's datasets in an owner's file, ``rows`` first: rows, shape of one, dtype.

    Raises:
        UserError: As `read_rows`.
    """
    path = folder / record.file
    with reading(path, f"table {table}") as file:
        check_identity(path, file, record, step)
        group = item(file, _place(table, ""))
        names = ROWS, PARAMS, *map(slot_dataset, _slots(group))
        found = {name: item(group, name) for name in names}
        return {name: (len(some), some.shape[1:], some.dtype) for name, some in found.items()}


def column_pieces(
    folder: Path, record: ShardRecord, step: int, table: str, column: str
) -> Iterator[np.ndarray]:
    """Yield one of a table's datasets in an owner's file, a piece after another.

    Raises:
        UserError: As `read_rows`.
    """
    path = folder / record.file
    with reading(path, f"{column} of table {table}") as file:
        check_identity(path, file, record, step)
        dataset = item(file, _place(table, column))
        for begin, end in pieces(0, len(dataset), _row_bytes(dataset)):
            yield dataset[begin:end]


def read_column(
    folder: Path, record: ShardRecord, step: int, table: str, column: str
) -> np.ndarray:
    """Return one of a table's datasets in an owner's file, whole.

    Raises:
        UserError: As `read_rows`.
    """
    count, shape, dtype = read_columns(folder, record, step, table)[column]
    read = partial(column_pieces, folder, record, step, table, column)
    return Stream((count, *shape), dtype, read).whole()


def _slots(group: Any) -> list[str]:
    return list(item(group, "slots")) if "slots" in group else []


def _place(table: str, dataset: str) -> str:
    return f"tables/{table}/{dataset}"


def _row_bytes(array: np.ndarray) -> int:
    items = int(np.prod(array.shape[1:], dtype=np.int64))
    return min(PIECE_BYTES, max(1, array.dtype.itemsize * items))
