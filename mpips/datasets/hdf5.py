"""HDF5 files, read in blocks: the file never has to fit in memory.

``file.h5`` means its arrays ``x`` and ``y``, ``file.h5::inputs,targets`` others; groups are
named with slashes. An attribute ``scale`` of the inputs is a factor on them.
"""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpips.datasets.base import BLOCK_BYTES
from mpips.datasets.table import ArrayInfo, MemoryTable, Table, check_file, reading
from mpips.errors import UserError, nearest

FORMAT = "HDF5"
MAX_NAMES_SHOWN = 20
CACHE_BYTES = 2 * BLOCK_BYTES  # holds the chunk that two neighbouring blocks share


class Hdf5Table(Table):
    """Two arrays of an HDF5 file, read when they are asked for.

    Args:
        path: The file.
        names: Inputs and targets in it.
        cache_bytes: Chunks of an array that are kept.

    Raises:
        UserError: If the file is missing, empty, truncated or not HDF5, or has no such arrays.
    """

    in_memory = False

    def __init__(
        self, path: str, names: tuple[str, str] = ("x", "y"), cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._file = _open(path, cache_bytes)
        try:
            self._x, self._y = (_array(self._file, path, name) for name in names)
            x = ArrayInfo(names[0], self._x.shape, self._x.dtype)
            y = ArrayInfo(names[1], self._y.shape, self._y.dtype)
            super().__init__(path, x, y, _scale(self._x, path, names[0]))
        except BaseException:
            self._file.close()
            raise

    @property
    def chunk(self) -> int:
        """Number of samples that the file stores together."""
        return self._x.chunks[0] if self._x.chunks else 1

    def read_x(self, begin: int, end: int) -> np.ndarray:
        """Return the stored inputs of rows ``[begin, end)``, from the file."""
        return self._read(self._x, slice(begin, end))

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the stored targets of rows ``[begin, end)``, from the file."""
        return self._read(self._y, slice(begin, end))

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored inputs and targets of scattered rows: slow, one seek a row."""
        wanted, places = np.unique(rows, return_inverse=True)
        return self._read(self._x, wanted)[places], self._read(self._y, wanted)[places]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, array: Any, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            where = f"samples {rows.start} to {rows.stop - 1}"
        else:
            where = f"some of samples {rows[0]} to {rows[-1]}"
        with reading(f"{self.path}: {array.name}, {where}", FORMAT):
            return array[rows]


def open_hdf5(path: str, names: str = "", cache_bytes: int = CACHE_BYTES) -> Hdf5Table:
    """Open `path`; `names` is ``inputs,targets``, by default ``x,y``."""
    pair = tuple((names or "x,y").split(","))
    if len(pair) != 2 or not all(pair):
        raise UserError(f"array names {names!r}", "two, separated by a comma", "write ::x,y")
    return Hdf5Table(path, (pair[0], pair[1]), cache_bytes)


def open_hdf5_of_many(path: str, names: str = "") -> Hdf5Table:
    """Open one file of many, of which none keeps chunks: blocks are read in any order."""
    return open_hdf5(path, names, 0)


def load_hdf5(path: str) -> MemoryTable:
    """Read the arrays ``x`` and ``y`` of a small file into memory."""
    table = Hdf5Table(path)
    try:
        x, y = table.read_x(0, table.n), table.read_y(0, table.n)
        return MemoryTable(path, x, y, scale=table.scale)
    finally:
        table.close()


def _open(path: str, cache_bytes: int) -> Any:
    check_file(path)
    with reading(path, FORMAT):
        # Locks fail on some file systems and protect nothing here: the file is only read.
        return h5py.File(path, "r", locking=False, rdcc_nbytes=cache_bytes)


def _array(file: Any, path: str, name: str) -> Any:
    there: list[str] = []

    def note(key: str, item: Any) -> bool | None:
        there.extend([key] if isinstance(item, h5py.Dataset) else [])
        return len(there) >= MAX_NAMES_SHOWN or None

    with reading(path, FORMAT):
        found = file.get(name)
        if isinstance(found, h5py.Dataset):
            return found
        file.visititems(note)
    stem = Path(path).name
    raise UserError(
        f"{path}: array {name!r} is missing",
        f"one of its arrays: {', '.join(there) or 'it has none'}",
        nearest(name, there) or f"name inputs and targets, as in {stem}::x,y",
    )


def _scale(x: Any, path: str, name: str) -> float | None:
    if "scale" not in x.attrs:
        return None
    found = np.asarray(x.attrs["scale"])
    if found.size != 1 or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise UserError(f"{path}: attribute 'scale' of {name!r} is {found}", "one finite number")
    return float(found.reshape(()))
