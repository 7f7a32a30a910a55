"""IDX files, the format of MNIST, plain or compressed with gzip.

Reference: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits".
"""

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from mpips.datasets.table import MemoryTable, check_file, damaged, reading
from mpips.errors import UserError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
MARKS = (("images", "labels"), ("idx3", "idx1"))


def open_idx(path: str, names: str = "") -> MemoryTable:
    """Read the images file `path`, or ``images,labels``, into memory.

    The labels are found beside the images: ``train-images-idx3-ubyte`` and
    ``train-labels-idx1-ubyte``, either with ``.gz`` or without.

    Raises:
        UserError: If a file is missing, empty, truncated or not IDX.
    """
    if names:
        raise UserError(f"array names {names!r} of {path}", "none: IDX files hold one array")
    images, comma, labels = path.partition(",")
    if not comma:
        check_file(images)
        labels = _labels_beside(images)
    x, y = read_idx(images), read_idx(labels)
    return MemoryTable(images, x, y, names=(Path(images).name, Path(labels).name))


def find_mnist(folder: str) -> tuple[str, str]:
    """Return the images files for training and for testing in a folder with MNIST's four files.

    Raises:
        UserError: If the folder has no such files.
    """
    found = [_images_of(folder, start) for start in ("train", "t10k")]
    if found[0] is None or found[1] is None:
        raise UserError(
            f"folder {folder} has neither MNIST's files nor folders of images",
            "train-images*, train-labels*, t10k-images* and t10k-labels*, or a folder a class",
            "name a file, or copy them there",
        )
    return os.path.join(folder, found[0]), os.path.join(folder, found[1])


def is_mnist(folder: str) -> bool:
    """Say whether MNIST's images to train on are in a folder."""
    return _images_of(folder, "train") is not None


def _images_of(folder: str, start: str) -> str | None:
    with os.scandir(folder) as there:
        names = sorted(item.name for item in there if item.is_file())
    return next((name for name in names if name.startswith(start) and "images" in name), None)


def read_idx(path: str) -> np.ndarray:
    """Return the array of an IDX file, in the machine's byte order.

    Raises:
        UserError: If the file is missing, empty, truncated, too long or not IDX.
    """
    check_file(path)
    data = _content(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES or data[3] == 0:
        raise damaged(path, "IDX", ValueError(f"its first bytes are {data[:4]!r}"))
    begin = 4 + 4 * data[3]
    if len(data) < begin:
        raise damaged(path, "IDX", ValueError("it ends within its header"))
    shape = struct.unpack(f">{data[3]}I", data[4:begin])
    dtype = np.dtype(TYPES[data[2]])
    expected = begin + dtype.itemsize * int(np.prod(shape, dtype=object))
    if len(data) != expected:
        text = f"it has {len(data)} bytes, its header of shape {shape} says {expected}"
        raise damaged(path, "IDX", ValueError(text))
    array = np.frombuffer(data, dtype, offset=begin).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def is_idx(path: str) -> bool:
    """Say whether `path` begins as an IDX file, plain or compressed, does."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:2] == GZIP_MAGIC:
        try:
            with gzip.open(path) as file:
                start = file.read(4)
        except (OSError, EOFError, zlib.error):
            return False
    return len(start) == 4 and start[:2] == b"\0\0" and start[2] in TYPES


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read()
    if data[:2] != GZIP_MAGIC:
        return data
    with reading(path, "gzip"):
        return gzip.decompress(data)


def _labels_beside(images: str) -> str:
    folder, name = os.path.split(images)
    if MARKS[0][0] not in name:
        raise UserError(
            f"no labels known for images file {images}",
            "a name with 'images' in it, as train-images-idx3-ubyte",
            "write it as images,labels",
        )
    for mark, other in MARKS:
        name = name.replace(mark, other)
    plain = os.path.join(folder, name.removesuffix(".gz"))
    both = [plain, f"{plain}.gz"]
    found = next((path for path in both if os.path.exists(path)), None)
    if found is None:
        raise UserError(
            f"no labels beside {images}", " or ".join(both), "write it as images,labels"
        )
    return found
