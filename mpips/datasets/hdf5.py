"""HDF5 files, read in blocks that fit in memory.

``file.h5`` stands for its arrays ``x`` and ``y``, ``file.h5::inputs,targets`` for others. Slashes
separate groups. An attribute ``scale`` of the inputs multiplies them.

A file can refer to data in other files, by external links, external storage and virtual arrays. A
file from elsewhere could so read any file of the user. Such data is refused, unless a third word
allows it: ``file.h5::x,y,external``.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpips.datasets.base import BLOCK_BYTES
from mpips.datasets.table import ArrayInfo, Table, check_file, no_array, pair_of, reading
from mpips.errors import UserError

FORMAT = "HDF5"
MAX_NAMES_SHOWN = 20
MAX_LINKS = 16  # soft links on the path of an item, HDF5's own limit
EXTERNAL = "external"  # word after the names of arrays: allows data in other files


class OutsideError(ValueError):
    """Raised if an item of an HDF5 file refers to another file."""


class Hdf5Table(Table):
    """Two arrays of an HDF5 file, read on demand.

    Args:
        path: The file.
        names: Names of inputs and targets; see `parse`.
        places: Not used, as rows need no positions.

    Raises:
        UserError: If the file is missing, empty, truncated or not HDF5, or lacks the arrays.
    """

    in_memory = False
    cache_bytes = 2 * BLOCK_BYTES  # holds the chunk that two consecutive blocks share

    def __init__(self, path: str, names: str = "", places: None = None) -> None:
        pair, external = parse(names)
        check_file(path)
        with reading(path, FORMAT):
            # Locks fail on some file systems, and a file that is only read needs none.
            self._file = h5py.File(path, "r", locking=False, rdcc_nbytes=self.cache_bytes)
        try:
            self._x, self._y = (_array(self._file, path, name, external) for name in pair)
            x, y = ArrayInfo.of(pair[0], self._x), ArrayInfo.of(pair[1], self._y)
            super().__init__(path, x, y, _scale(self._x, path, pair[0]))
            self.chunk = self.together = self._x.chunks[0] if self._x.chunks else 1
        except BaseException:
            self._file.close()
            raise

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored inputs and targets of rows ``[begin, end)``, from the file."""
        return self._read(self._x, begin, end), self._read(self._y, begin, end)

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the stored targets of rows ``[begin, end)``, from the file."""
        return self._read(self._y, begin, end)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, array: Any, begin: int, end: int) -> np.ndarray:
        with reading(f"{self.path}: {array.name}, samples {begin} to {end - 1}", FORMAT):
            return array[begin:end]


class Hdf5OfMany(Hdf5Table):
    """One file of many. It caches no chunks, since blocks are read in any order."""

    cache_bytes = 0


def parse(names: str) -> tuple[tuple[str, str], bool]:
    """Return the arrays in ``inputs,targets,external``, and whether it has the word `EXTERNAL`.

    Both parts are optional: the default arrays are ``x`` and ``y``.

    Raises:
        UserError: If it has another form.
    """
    parts = names.split(",") if names else []
    external = len(parts) in (1, 3) and parts[-1] == EXTERNAL
    return pair_of(parts[:-1] if external else parts), external


def inside(group: Any, name: str) -> Any:
    """Return an item of an open file, without access to other files; None if it does not exist.

    Args:
        group: Group in which the name is looked up, unless the name begins with a slash.
        name: Names of groups and of the item, separated by slashes.

    Raises:
        OutsideError: If a link leads to another file, or an array has its data in one. If a virtual
            array has its data in a source that is not a plain array of the file.
        RuntimeError: If the path has too many links.
    """
    item = _linked(group, name, iter(range(MAX_LINKS)))
    if not isinstance(item, h5py.Dataset):
        return item
    sources = item.virtual_sources() if item.is_virtual else []
    files = [source.file_name for source in sources if source.file_name != "."]
    files += [file for file, *_ in item.external or ()]
    for source in {source.dset_name for source in sources if source.file_name == "."}:
        found = None if "%" in source else _linked(item.file, source, iter(range(MAX_LINKS)))
        # HDF5 reads zeros for a missing source, and crashes on a circle of virtual arrays.
        if not isinstance(found, h5py.Dataset) or found.is_virtual:
            raise OutsideError(f"{name!r} has its data in {source!r}, no plain array of the file")
        files += [file for file, *_ in found.external or ()]
    if files:
        raise OutsideError(f"{name!r} has its data in the file {files[0]}")
    return item


def _linked(group: Any, name: str, links: Iterator[int]) -> Any:
    """Return the item of a name. Each soft link on its path takes a number from `links`."""
    item = group.file if name.startswith("/") else group
    for part in (each for each in name.split("/") if each not in ("", ".")):
        link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
        if isinstance(link, h5py.ExternalLink):
            raise OutsideError(f"{part!r} links to the file {link.filename}")
        if isinstance(link, h5py.SoftLink):
            if next(links, None) is None:
                raise RuntimeError("too many links")
            item = _linked(item, link.path, links)
        else:
            item = link and item[part]
    return item


def _array(file: Any, path: str, name: str, external: bool) -> Any:
    there: list[str] = []

    def note(key: str, item: Any) -> bool | None:
        there.extend([key] if isinstance(item, h5py.Dataset) else [])
        return len(there) >= MAX_NAMES_SHOWN or None

    with reading(path, FORMAT):
        try:
            item = file.get(name) if external else inside(file, name)
        except OutsideError as error:
            trusted = f"write ::x,y,{EXTERNAL} if you trust {Path(path).name}"
            remedy = f"name that file itself, or {trusted}"
            raise UserError(f"{path}: {error}", "data in the file itself", remedy) from None
        if isinstance(item, h5py.Dataset):
            _check_sources(item, path, name)
            return item
        file.visititems(note)
    raise no_array(path, name, there)


def _check_sources(array: Any, path: str, name: str) -> None:
    """Check that all files of a virtual array exist, as HDF5 reads zeros for a missing file.

    Raises:
        UserError: If one is missing.
    """
    folder = os.path.dirname(array.file.filename)
    for source in array.virtual_sources() if array.is_virtual else ():
        file = source.file_name
        tried = (os.path.join(folder, file), file, os.path.join(folder, os.path.basename(file)))
        if file != "." and "%" not in file and not any(map(os.path.exists, tried)):
            got = f"{path}: virtual array {name!r} without its file {file}"
            raise UserError(got, "all files that it is made of", "put it back")


def _scale(x: Any, path: str, name: str) -> float | None:
    if "scale" not in x.attrs:
        return None
    scale = np.asarray(x.attrs["scale"])
    if scale.size != 1 or scale.dtype.kind not in "iuf" or not np.isfinite(scale).all():
        raise UserError(f"{path}: attribute 'scale' of {name!r} is {scale}", "one finite number")
    return float(scale.reshape(()))
