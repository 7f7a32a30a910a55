"""NumPy's own files: a pair ``x.npy,y.npy``, or ``file.npz`` with two arrays in it."""

import zipfile
from typing import IO

import numpy as np

from mpips.datasets.table import MemoryTable, check_file, damaged, no_numbers, reading
from mpips.errors import UserError, nearest

MAGIC = b"\x93NUMPY"


def open_npy(path: str, names: str = "") -> MemoryTable:
    """Read ``inputs.npy,targets.npy`` into memory.

    Raises:
        UserError: If `path` is not two files, or one is missing, empty, truncated or not .npy.
    """
    x_path, comma, y_path = path.partition(",")
    if not comma or not y_path or names:
        raise UserError(
            f"dataset {path}", "two files, inputs and targets", "write it as x.npy,y.npy"
        )
    return MemoryTable(path, _load_npy(x_path), _load_npy(y_path), names=(x_path, y_path))


def open_npz(path: str, names: str = "") -> MemoryTable:
    """Read two arrays of `path` into memory; `names` is ``inputs,targets``, by default ``x,y``.

    Raises:
        UserError: If the file is missing, empty, truncated or not .npz, or has no such arrays.
    """
    check_file(path)
    pair = (names or "x,y").split(",")
    if len(pair) != 2:
        raise UserError(f"array names {names!r}", "two, separated by a comma", "write ::x,y")
    with reading(path, ".npz"), zipfile.ZipFile(path) as archive:
        x, y = (_member(archive, path, name) for name in pair)
    return MemoryTable(path, x, y, names=(pair[0], pair[1]))


def _load_npy(path: str) -> np.ndarray:
    check_file(path)
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise damaged(path, ".npy", ValueError("it does not begin as one"))
        file.seek(0)
        with reading(path, ".npy"):
            return _read(file, path, path)


def _member(archive: zipfile.ZipFile, path: str, name: str) -> np.ndarray:
    there = [entry.removesuffix(".npy") for entry in archive.namelist()]
    if name not in there:
        raise UserError(
            f"{path}: array {name!r} is missing",
            f"one of its arrays: {', '.join(there) or 'it has none'}",
            nearest(name, there) or "name inputs and targets, as in file.npz::x,y",
        )
    with archive.open(f"{name}.npy") as file:
        return _read(file, path, name)


def _read(file: IO[bytes], path: str, name: str) -> np.ndarray:
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        if "Object arrays" in str(error):  # such as names in a list; to read them may run code
            raise no_numbers(path, name, "objects") from None
        raise
