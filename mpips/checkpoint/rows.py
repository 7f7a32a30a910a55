"""Changed rows of tables in files, and arrays read in pieces.

The dataset ``tables/<table>/rows`` has the numbers of the rows, in any order. In the same order,
``params`` has their values and ``slots/<slot>`` their optimizer state. The file has a record and a
checksum like a shard file; its range is ``[0, number of rows)``.

An incremental checkpoint has the rows that changed since the one before it. Such a chain is read
from its newest checkpoint on, and a row of an older one is skipped if a newer one has it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpips.checkpoint.files import PathLike, damaged, file_of, item, reading, row_bytes
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
COLUMNS = (ROWS, PARAMS)  # datasets of every table, beside slots
READ_BYTES = 1 << 20  # bytes of a piece, all columns together; two pieces are in memory at a time


@dataclass(frozen=True)
class Stream:
    """An array that is read piece by piece.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
        pieces: Function that yields the pieces in the order of the elements, at each call anew.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stream":
        """Return a stream of one piece, an array in memory."""
        return cls(array.shape, array.dtype, lambda: iter([array]))

    @property
    def nbytes(self) -> int:
        """Size of the array's elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """Read the whole array into memory."""
        out, at = np.empty(self.shape, self.dtype), 0
        flat = out.reshape(-1)
        for piece in self.pieces():
            flat[at : at + piece.size] = piece.reshape(-1)
            at += piece.size
        return out

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of each piece."""
        for piece in self.pieces():
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


class RowSource(Protocol):
    """Rows of a table that are read piece by piece."""

    @property
    def count(self) -> int:
        """Number of rows."""

    def pieces(self) -> "Iterator[TableRows]":
        """Yield the rows, in at least one piece, which may have no rows; called once."""


@dataclass(frozen=True)
class TableRows:
    """Some rows of a table.

    Attributes:
        rows: Numbers of the rows, without duplicates, shape (k,), dtype int64.
        params: Values, shape (k, dim), dtype float32 or float64.
        slots: Optimizer state by slot, each of shape (k, ...).
    """

    rows: np.ndarray
    params: np.ndarray
    slots: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "TableRows":
        """Build rows from arrays by name of their dataset, the inverse of `arrays`."""
        slots = {name.removeprefix(SLOTS): a for name, a in arrays.items() if name not in COLUMNS}
        return cls(arrays[ROWS], arrays[PARAMS], slots)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Numbers, values and slots, by name of their dataset."""
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
    """Write one owner's rows durably. Training may continue in another thread.

    Args:
        folder: Folder that `begin_step` returned.
        owner: Number of the owner, which is in the file's name.
        step: Step of the checkpoint.
        tables: Rows by table.
        base: Step of the checkpoint since which these rows have changed. None if `tables` has all
            rows that were ever changed.

    Returns:
        The record that `commit` needs.

    Raises:
        ValueError: If a table does not yield `count` rows.
        UserError: If the file system refuses.

    Blocks: until the file is on disk. Other threads run meanwhile.
    """
    size = sum(table.count for table in tables.values())

    def fill(file: "h5py.File") -> None:
        for name, table in tables.items():
            _write_table(file, name, table)

    return write_file(Path(folder) / file_of("rows", owner), owner, 0, size, step, fill, base)


def _write_table(file: "h5py.File", name: str, table: RowSource) -> None:
    """Write the rows of a table, piece by piece."""
    at, count, out = 0, table.count, dict[str, "h5py.Dataset"]()
    for piece in table.pieces():
        for column, array in piece.arrays.items():
            if column not in out:
                shape = count, *array.shape[1:]
                out[column] = file.create_dataset(f"{_group(name)}/{column}", shape, array.dtype)
            write_pieces(out[column], array, at)
        at += len(piece.rows)
    if at != count:
        raise ValueError(f"{at} rows of table {name}, expected {count}")


class Ordered(NamedTuple):
    """Some rows of a table, sorted by number.

    Attributes:
        rows: Numbers of the rows, increasing, shape (k,), dtype int64.
        places: Index of each row in `params`, shape (k,), dtype int64.
        params: Values, shape (at least k, dim); may have other rows too.
    """

    rows: np.ndarray
    places: np.ndarray
    params: np.ndarray

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Read the rows of some numbers, and leave `out` as it is for rows that are missing.

        Args:
            numbers: Numbers of the rows, shape (n,), dtype int64.
            out: Gets the values, shape (n, dim).
        """
        at = np.searchsorted(self.rows, numbers)
        inside = np.flatnonzero(at < len(self.rows))
        known = inside[self.rows[at[inside]] == numbers[inside]]
        out[known] = self.params[self.places[at[known]]]


Wanted = Callable[[np.ndarray], np.ndarray]  # a mask of the rows of some numbers


@dataclass(frozen=True)
class RowsFile:
    """Rows of one table in an owner's file, which each method opens and closes.

    Attributes:
        folder: Folder of the checkpoint.
        record: Record of the file.
        step: Step of the checkpoint.
        table: Name of the table.
        keep: Mask of the rows to read, shape (rows in the file,), dtype bool; None for all.

    Raises:
        UserError: In all methods, if the file cannot be read or does not match its record.
    """

    folder: Path
    record: ShardRecord
    step: int
    table: str
    keep: np.ndarray | None = None

    @property
    def count(self) -> int:
        """Number of rows to read."""
        if self.keep is not None:
            return int(np.count_nonzero(self.keep))
        with self._opened() as columns:
            return len(columns[ROWS])

    def columns(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of a row in each of the table's datasets, ``rows`` first."""
        with self._opened() as columns:
            return {name: (data.shape[1:], data.dtype) for name, data in columns.items()}

    def pieces(self, wanted: Wanted | None = None) -> Iterator[TableRows]:
        """Yield the rows, piece by piece; those that are not wanted are hardly read."""
        return map(TableRows.of, self.arrays(wanted=wanted))

    def arrays(
        self, only: str = "", wanted: Wanted | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows piece by piece as arrays by dataset, of all datasets or of one."""
        with self._opened() as columns:
            if only:
                columns = {only: columns[only]}
            lengths = [len(dataset) for dataset in columns.values()]
            if len(set(lengths)) > 1:
                got = f"{self._path}: arrays of table {self.table} of lengths {lengths}"
                raise damaged(got, str(lengths[0]))
            count = max(1, READ_BYTES // sum(map(row_bytes, columns.values())))
            for begin in range(0, lengths[0], count):
                part = slice(begin, begin + count)
                kept = slice(None) if self.keep is None else self.keep[part]
                if wanted is not None:
                    mask = wanted(columns[ROWS][part])
                    kept = mask if self.keep is None else mask & self.keep[part]
                    if not kept.any():
                        continue
                yield {name: array[part][kept] for name, array in columns.items()}

    def column(self, name: str) -> Iterator[np.ndarray]:
        """Yield one dataset, piece by piece."""
        return (arrays[name] for arrays in self.arrays(name))

    def numbers(self) -> np.ndarray:
        """Return the numbers of the rows, shape (count,), dtype int64."""
        return Stream((self.count,), np.dtype(np.int64), partial(self.column, ROWS)).whole()

    def ordered(self) -> Ordered:
        """Return the rows sorted by number; values stay in the file until they are read."""
        rows, params = self.numbers(), self._mapped()
        count = len(rows) if self.keep is None else len(self.keep)
        if len(params) != count:
            raise damaged(f"{self._path}: {len(params)} rows of table {self.table}", str(count))
        places = np.arange(count) if self.keep is None else np.flatnonzero(self.keep)
        order = np.argsort(rows)
        return Ordered(rows[order], places[order], params)

    def _mapped(self) -> np.ndarray:
        """Map the values of all rows of the file into memory.

        The operating system reads pages on first use, and caches them once for all ranks of a host.
        """
        with self._opened() as columns:
            dataset = columns[PARAMS]
            offset, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
            if offset is None:  # not contiguous in the file, as a tiny or empty dataset
                return np.asarray(dataset[:])
            return np.memmap(self._path, dtype, "r", offset, shape)  # checks the file's size

    @property
    def _path(self) -> Path:
        return self.folder / self.record.file

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """Open the file, and yield the table's datasets by name, ``rows`` and ``params`` first."""
        with reading(self._path, f"table {self.table}") as file:
            check_identity(self._path, file, self.record, self.step)
            group = item(file, _group(self.table))
            slots = list(item(group, "slots")) if "slots" in group else []
            yield {name: item(group, name) for name in (*COLUMNS, *map(slot_dataset, slots))}


def counted_rows(folder: Path, contents: Contents, table: str) -> Iterator[RowsFile]:
    """Yield the rows of a table in a checkpoint and its chain, file by file, each row once.

    Args:
        folder: Folder of the checkpoint.
        contents: Contents of its index.
        table: Name of the table.

    Raises:
        UserError: If a file, or an earlier checkpoint of the chain, cannot be read.
    """
    newer = np.zeros(0, np.int64)  # sorted numbers of the rows in newer checkpoints
    for link in links(folder, contents):
        seen = [newer]
        for record in link.rows:
            file = RowsFile(link.folder, record, link.step, table)
            if contents.base is None:  # no chain, so that no numbers need to be compared
                yield file
                continue
            numbers = file.numbers()
            yield replace(file, keep=~_among(numbers, newer))
            seen.append(np.sort(numbers))
        newer = np.sort(np.concatenate(seen), kind="stable")  # merges sorted parts


def _among(numbers: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return a mask of the `numbers` that are in `ordered`, which is sorted; dtype bool."""
    if not len(ordered):
        return np.zeros(len(numbers), bool)
    at = np.searchsorted(ordered, numbers)
    return ordered[np.minimum(at, len(ordered) - 1)] == numbers


def _group(table: str) -> str:
    return f"tables/{table}"
