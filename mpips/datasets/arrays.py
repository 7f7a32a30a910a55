"""Files of whole arrays in memory: NumPy's own formats, and IDX.

NumPy's are a pair ``x.npy,y.npy``, or ``file.npz`` with two arrays. IDX is the format of MNIST,
plain or compressed with gzip.

Reference: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits".
"""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from mpips.datasets.table import (
    MemoryTable,
    check_file,
    no_array,
    no_numbers,
    open_plain,
    pair_of,
    reading,
)
from mpips.errors import UserError

NPY_MAGIC = np.lib.format.MAGIC_PREFIX
IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IDX_START = 4  # bytes: two zeros, the type, the number of dimensions
MARKS = (("images", "labels"), ("idx3", "idx1"))


def open_npy(path: str, names: str = "") -> MemoryTable:
    """Read ``inputs.npy,targets.npy`` into memory.

    Raises:
        UserError: If `path` does not name two files, or one is missing, empty, truncated or not
            .npy.
    """
    x_path, _, y_path = path.partition(",")
    if not y_path or names:
        expected = "two files, inputs and targets"
        raise UserError(f"dataset {path}", expected, "write it as x.npy,y.npy")
    return MemoryTable(path, _load_npy(x_path), _load_npy(y_path), names=(x_path, y_path))


def open_npz(path: str, names: str = "") -> MemoryTable:
    """Read two arrays of `path` into memory; `names` is ``inputs,targets``, by default ``x,y``.

    Raises:
        UserError: If the file is missing, empty, truncated or not .npz, or lacks the arrays.
    """
    check_file(path)
    pair = pair_of(names.split(",") if names else ())
    with reading(path, ".npz"), zipfile.ZipFile(path) as archive:
        x, y = (_member(archive, path, name) for name in pair)
    return MemoryTable(path, x, y, names=pair)


def _load_npy(path: str) -> np.ndarray:
    check_file(path)
    with reading(path, ".npy"), open(path, "rb") as file:
        if not file.peek(len(NPY_MAGIC)).startswith(NPY_MAGIC):
            raise ValueError("it does not begin as one")
        return _read_npy(file, path, path)


def _member(archive: zipfile.ZipFile, path: str, name: str) -> np.ndarray:
    there = [entry.removesuffix(".npy") for entry in archive.namelist()]
    if name not in there:
        raise no_array(path, name, there)
    with archive.open(f"{name}.npy") as file:
        return _read_npy(file, path, name)


def _read_npy(file: IO[bytes], path: str, name: str) -> np.ndarray:
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        if "Object arrays" in str(error):  # such as a list of names; reading them may run code
            raise no_numbers(path, name, "objects") from None
        raise


def open_idx(path: str, names: str = "") -> MemoryTable:
    """Read the images file `path`, or ``images,labels``, into memory.

    The file of labels is in the same folder: ``train-labels-idx1-ubyte`` for
    ``train-images-idx3-ubyte``, each with ``.gz`` or without.

    Raises:
        UserError: If a file is missing, empty, truncated or not IDX.
    """
    if names:
        raise UserError(f"array names {names!r} of {path}", "none: IDX files hold one array")
    images, _, labels = path.partition(",")
    if "," not in path:
        check_file(images)
        labels = _labels_beside(images)
    x, y = _read_idx(images), _read_idx(labels)
    return MemoryTable(images, x, y, names=(Path(images).name, Path(labels).name))


def find_mnist(folder: str) -> tuple[str, str]:
    """Return the files of training and test images in a folder with MNIST's four files.

    Raises:
        UserError: If the folder does not have these files.
    """
    train, test = (_images_of(folder, start) for start in ("train", "t10k"))
    if train is None or test is None:
        got = f"folder {folder} has neither MNIST's files nor folders of images"
        files = "train-images*, train-labels*, t10k-images* and t10k-labels*"
        raise UserError(got, f"{files}, or a folder a class", "name a file, or copy them there")
    return os.path.join(folder, train), os.path.join(folder, test)


def is_mnist(folder: str) -> bool:
    """Return whether a folder has MNIST's training images."""
    return _images_of(folder, "train") is not None


def _images_of(folder: str, start: str) -> str | None:
    with os.scandir(folder) as there:
        names = sorted(item.name for item in there if item.is_file())
    return next((name for name in names if name.startswith(start) and "images" in name), None)


def is_idx(path: str) -> bool:
    """Return whether a file, plain or compressed, begins like an IDX file."""
    try:
        with open_plain(path) as file:
            return _is_idx(file.read(IDX_START))
    except (OSError, EOFError, zlib.error):
        return False


def _is_idx(start: bytes) -> bool:
    return len(start) >= IDX_START and start[:2] == b"\0\0" and start[2] in IDX_TYPES


def _read_idx(path: str) -> np.ndarray:
    """Return the array of an IDX file, in the machine's byte order."""
    check_file(path)
    with reading(path, "gzip"), open_plain(path) as file:
        data = file.read()
    with reading(path, "IDX"):
        dimensions = data[3] if _is_idx(data) else 0
        if not dimensions:
            raise ValueError(f"its first bytes are {data[:4]!r}")
        begin = IDX_START + 4 * dimensions
        if len(data) < begin:
            raise EOFError("it ends within its header")
        shape = struct.unpack(f">{dimensions}I", data[IDX_START:begin])
        dtype = np.dtype(IDX_TYPES[data[2]])
        expected = begin + dtype.itemsize * int(np.prod(shape, dtype=object))
        if len(data) != expected:
            text = f"it has {len(data)} bytes, its header of shape {shape} says {expected}"
            raise ValueError(text)
    array = np.frombuffer(data, dtype, offset=begin).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _labels_beside(images: str) -> str:
    folder, name = os.path.split(images)
    if MARKS[0][0] not in name:
        got = f"no labels known for images file {images}"
        expected = "a name with 'images' in it, as train-images-idx3-ubyte"
        raise UserError(got, expected, "write it as images,labels")
    for mark, other in MARKS:
        name = name.replace(mark, other)
    plain = os.path.join(folder, name.removesuffix(".gz"))
    both = [plain, f"{plain}.gz"]
    found = next((path for path in both if os.path.exists(path)), None)
    if found is None:
        got = f"no labels beside {images}"
        raise UserError(got, " or ".join(both), "write it as images,labels")
    return found
