"""Changed rows of tables in files, and arrays read in pieces.

``tables/<table>/rows`` has the numbers, in any order, ``params`` beside it a row each, and
``slots/<slot>`` what the update rule keeps of each. The file is recorded, summed and checked like a
shard file, as the range of all rows in it.

Of a chain, in which each checkpoint has the rows changed since the one before, the newest comes
first: a row counts where it is found first, and is left out of older files.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpips.checkpoint.files import PathLike, damaged, file_of, item, pieces, reading, row_bytes
from mpips.checkpoint.index import Contents, links
from mpips.checkpoint.shards import (
    PARAMS,
    SLOTS,
    ShardRecord,
    check_identity,
    slot_dataset,
    write_file,
    write_pieces,
)

if TYPE_CHECKING:
    import h5py

ROWS = "rows"
COLUMNS = (ROWS, PARAMS)  # which every table has, beside slots
READ_BYTES = 1 << 20  # of rows in a piece, all columns together: two are there at a time


@dataclass(frozen=True)
class Stream:
    """An array that comes a piece at a time.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        pieces: Returns its pieces, in the order of its elements; may be called again.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stream":
        """Return an array that is there, in one piece."""
        return cls(array.shape, array.dtype, lambda: iter([array]))

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """Return all of it."""
        out, at = np.empty(self.shape, self.dtype), 0
        flat = out.reshape(-1)
        for piece in self.pieces():
            flat[at : at + piece.size] = piece.reshape(-1)
            at += piece.size
        return out

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of its pieces."""
        for piece in self.pieces():
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


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

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "TableRows":
        """Return rows by the names of their datasets; the inverse of `arrays`."""
        slots = {name.removeprefix(SLOTS): a for name, a in arrays.items() if name not in COLUMNS}
        return cls(arrays[ROWS], arrays[PARAMS], slots)

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

    def fill(file: "h5py.File") -> None:
        for name, table in tables.items():
            _write_table(file, name, table)

    return write_file(Path(folder) / file_of("rows", owner), owner, 0, size, step, fill, base)


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
                out[column] = file.create_dataset(f"{_group(name)}/{column}", shape, array.dtype)
            write_pieces(out[column], array, at)
        at += len(piece.rows)
    if at != count:
        raise ValueError(f"{at} rows of table {name}, expected {count}")


class Ordered(NamedTuple):
    """Some rows of a table by their numbers.

    Attributes:
        rows: Their numbers, increasing, shape (k,), dtype int64.
        places: Where each is in `params`, shape (k,), dtype int64.
        params: Values, shape (at least k, dim), perhaps of others as well.
    """

    rows: np.ndarray
    places: np.ndarray
    params: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, places: np.ndarray, params: np.ndarray) -> "Ordered":
        """Return rows of which `rows` are the numbers of those at `places`, in any order."""
        order = np.argsort(rows)
        return cls(rows[order], places[order], params)

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Read those of some rows that are here, each into its place of `out`, shape (n, dim)."""
        at = np.searchsorted(self.rows, numbers)
        inside = np.flatnonzero(at < len(self.rows))
        here = inside[self.rows[at[inside]] == numbers[inside]]
        out[here] = self.params[self.places[at[here]]]


@dataclass(frozen=True)
class RowsFile:
    """Rows of one table in an owner's file, which is opened for each reading.

    Attributes:
        folder: Of the checkpoint.
        record: The file.
        step: The step of the checkpoint.
        table: The table.
        keep: Which rows of the file count, shape (its rows,), dtype bool; None for all.

    Raises:
        UserError: In all methods, if the file cannot be read or is not the one that the record
            describes.
    """

    folder: Path
    record: ShardRecord
    step: int
    table: str
    keep: np.ndarray | None = None

    @property
    def count(self) -> int:
        """How many they are."""
        if self.keep is not None:
            return int(np.count_nonzero(self.keep))
        with self._opened() as columns:
            return len(columns[ROWS])

    def columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of a row in each of the table's datasets, ``rows`` first."""
        with self._opened() as columns:
            return {name: (some.shape[1:], some.dtype) for name, some in columns.items()}

    def pieces(self) -> Iterator[TableRows]:
        """Yield them, a piece after another."""
        with self._opened() as columns:
            lengths = [len(dataset) for dataset in columns.values()]
            if len(set(lengths)) > 1:
                got = f"{self._path}: arrays of table {self.table} of lengths {lengths}"
                raise damaged(got, str(lengths[0]))
            count = max(1, READ_BYTES // sum(map(row_bytes, columns.values())))
            for begin in range(0, lengths[0], count):
                part = slice(begin, begin + count)
                kept = slice(None) if self.keep is None else self.keep[part]
                yield TableRows.of({name: a[part][kept] for name, a in columns.items()})

    def column(self, name: str) -> Iterator[np.ndarray]:
        """Yield one of the datasets, a piece after another."""
        with self._opened() as columns:
            dataset = columns[name]
            for begin, end in pieces(0, len(dataset), row_bytes(dataset)):
                kept = slice(None) if self.keep is None else self.keep[begin:end]
                yield dataset[begin:end][kept]

    def numbers(self) -> np.ndarray:
        """Return the numbers of the rows, shape (count,), dtype int64."""
        return Stream((self.count,), np.dtype(np.int64), partial(self.column, ROWS)).whole()

    def ordered(self) -> Ordered:
        """Return them by their numbers; values are read from the file when they are wanted."""
        rows, params = self.numbers(), self._mapped()
        count = len(rows) if self.keep is None else len(self.keep)
        if len(params) != count:
            raise damaged(f"{self._path}: {len(params)} rows of table {self.table}", str(count))
        places = np.arange(count) if self.keep is None else np.flatnonzero(self.keep)
        return Ordered.of(rows, places, params)

    def _mapped(self) -> np.ndarray:
        """Return the values of all rows of the file, where they stay until they are read.

        Pages that are read are in memory once a host, as long as it has no better use for it.
        """
        with self._opened() as columns:
            dataset = columns[PARAMS]
            offset, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
            if offset is None:  # so short that it lies elsewhere, or of no rows
                return np.asarray(dataset[:])
            return np.memmap(self._path, dtype, "r", offset, shape)  # refuses too short a file

    @property
    def _path(self) -> Path:
        return self.folder / self.record.file

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """Open the file; yields the table's datasets by name, ``rows`` and ``params`` first."""
        with reading(self._path, f"table {self.table}") as file:
            check_identity(self._path, file, self.record, self.step)
            group = item(file, _group(self.table))
            slots = list(item(group, "slots")) if "slots" in group else []
            yield {name: item(group, name) for name in (*COLUMNS, *map(slot_dataset, slots))}


def counted_rows(folder: Path, contents: Contents, table: str) -> Iterator[RowsFile]:
    """Yield the rows of a table in a checkpoint, file by file; each row once.

    Args:
        folder: The checkpoint's.
        contents: Of its index.
        table: The table.

    Raises:
        UserError: If a file, or a checkpoint to which this one adds, cannot be read.
    """
    newer = np.zeros(0, np.int64)  # sorted
    for link in links(folder, contents):
        here = [newer]
        for record in link.rows:
            file = RowsFile(link.folder, record, link.step, table)
            if contents.base is None:  # as most are: numbers need not be read beforehand
                yield file
                continue
            numbers = file.numbers()
            yield replace(file, keep=~_among(numbers, newer))
            here.append(np.sort(numbers))
        newer = np.sort(np.concatenate(here), kind="stable")  # which merges what is sorted


def _among(numbers: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return which of some numbers are among others, which are sorted."""
    if not len(ordered):
        return np.zeros(len(numbers), bool)
    at = np.searchsorted(ordered, numbers)
    return ordered[np.minimum(at, len(ordered) - 1)] == numbers


def _group(table: str) -> str:
    return f"tables/{table}"
