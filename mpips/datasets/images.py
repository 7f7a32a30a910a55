"""Folders of images by class: ``photos/<class>/*.jpg``, each decoded when it is read.

``photos/`` takes images of one shape, ``photos/::64x64x3`` scales and cuts them to one. Classes are
numbered in the order of their names. As each image is read by itself, no order of them costs more
than another: their rows are mixed, always in the same way, so that those held out are of all
classes, and an epoch's order is one of samples, not of blocks.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpips.datasets.decoder import (
    SUFFIXES,
    decode,
    fill,
    is_image,
    other_shape,
    parse_shape,
    shape_of,
)
from mpips.datasets.files import Files
from mpips.datasets.idx import is_mnist
from mpips.datasets.index import Held
from mpips.datasets.order import SPLIT, shuffled
from mpips.datasets.table import ArrayInfo, Table, check_regular, reading
from mpips.errors import UserError

READER = "images.ImageTable"
IMAGES, CLASSES = "images", "classes"  # what messages call inputs and targets


class ImageTable(Table):
    """The images of the folders of a dataset.

    Args:
        files: The folders, each of one class.
        held: What each of them holds.

    Raises:
        UserError: If a folder's images are of another shape, or it has changed since it was
            counted.

    Threads may share it.
    """

    in_memory = False
    scattered = True

    def __init__(self, files: Files, held: Sequence[Held]) -> None:
        self._folders = files.paths
        height, width, channels = held[0].x.shape[1:]
        self._shape = height, width, channels
        self._fit = bool(files.arrays)
        counts = [each.x.shape[0] for each in held]
        names = [_names(folder) for folder in files.paths]
        for folder, each, there, n in zip(files.paths, held, names, counts, strict=True):
            if each.x.shape[1:] != self._shape:
                first = os.path.join(folder, there[0])
                raise other_shape(first, each.x.shape[1:], self._shape)
            if len(there) != n:
                remedy = "leave the data alone while a job reads it; run it again"
                raise UserError(f"{folder} with {len(there):,} images", f"{n:,} as counted", remedy)
        mixed = shuffled(sum(counts), SPLIT)
        # Bytes of one width take a third of what Python's strings do.
        self._names = np.concatenate([np.array([*map(os.fsencode, each)]) for each in names])[mixed]
        self._labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[mixed]
        x = ArrayInfo(IMAGES, (len(mixed), *self._shape), np.dtype("u1"))
        super().__init__(files.title, x, ArrayInfo(CLASSES, (len(mixed),), self._labels.dtype))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by number."""
        return tuple(Path(folder).name for folder in self._folders)

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and 0."""
        return os.path.join(self._folders[self._labels[row]], os.fsdecode(self._names[row])), 0

    def read_x(self, begin: int, end: int) -> np.ndarray:
        """Return the images of rows ``[begin, end)``, uint8."""
        return self.gather(np.arange(begin, end))[0]

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the classes of rows ``[begin, end)``."""
        return self._labels[begin:end]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return images and classes of `rows`; decodes in threads."""
        out = np.empty((len(rows), *self._shape), np.uint8)
        return fill(out, lambda k: self._decode(rows[k])), self._labels[rows]

    def match(self, other: Table) -> None:
        """Make sure that `other` has the same classes and images of the same shape."""
        super().match(other)
        mine, theirs = set(self.class_names), set(other.class_names)
        if mine != theirs:
            odd = sorted(mine ^ theirs)[0]
            has, lacks = (self.path, other.path) if odd in mine else (other.path, self.path)
            got = f"{other.path} with other classes than {self.path}: {odd!r} is in {has} alone"
            remedy = f"leave it out, or move some of its images to {lacks}"
            raise UserError(got, "the same folders in both", remedy)

    def _decode(self, row: int) -> np.ndarray:
        path, _ = self.where(row)
        check_regular(path)
        with reading(path, "image"), open(path, "rb", buffering=0) as file:
            data = file.read()  # at once: Pillow would read a little at a time
        return decode(data, path, self._shape, self._fit)


def find_classes(name: str) -> Files | None:
    """Return the folders of the classes in the folder that `name` is; None where it is another.

    Raises:
        UserError: If the shape behind ``::`` is none.
    """
    path, _, shape = name.partition("::")
    folder = os.path.expanduser(path)
    if not os.path.isdir(folder) or is_mnist(folder):
        return None
    with os.scandir(folder) as there:
        found = [item.path for item in there if item.is_dir() and not item.name.startswith(".")]
    parse_shape(shape, path)
    return Files(name, tuple(sorted(found)), shape, READER) if found else None


def count_images(folder: str, shape: str) -> Held:
    """Look at the images of a class: how many they are, and of which shape; none is decoded.

    Raises:
        UserError: If there is none, one cannot be read, or they are of several shapes.
    """
    wanted, names = parse_shape(shape, folder), _names(folder)
    if not names:
        got = f"folder {folder} has no images"
        suffixes = ", ".join(SUFFIXES)
        raise UserError(got, f"files that end in {suffixes}", "name the folder of the classes")
    paths = [os.path.join(folder, name) for name in names]
    first = shape_of(paths[0], paths[0])
    for path in paths[1:]:
        if (found := shape_of(path, path)) != first and wanted is None:
            raise other_shape(path, found, first)
    x = ArrayInfo(IMAGES, (len(names), *(wanted or first)), np.dtype("u1"))
    return Held(x, ArrayInfo(CLASSES, (len(names),), np.dtype("i4")), 1 / 255, 1)


def _names(folder: str) -> list[str]:
    """Return the names of the images in a folder, in their order.

    Raises:
        UserError: If it cannot be read, or there are folders in it.
    """
    try:
        with os.scandir(folder) as there:
            items = [(item.name, item.is_dir()) for item in there]
    except OSError as problem:
        raise UserError(f"{folder} cannot be read ({problem.strerror})", "a folder") from None
    for name, is_folder in items:
        if is_folder and not name.startswith("."):
            got = f"folder {folder}, which should hold images of a class, with folder {name}"
            remedy = f"name {folder} itself, or move the images of {name} up"
            raise UserError(got, "images alone", remedy)
    return sorted(name for name, _ in items if is_image(name) and not name.startswith("."))
