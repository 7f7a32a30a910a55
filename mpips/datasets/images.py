"""Images: decoding by Pillow, and folders of images by class, ``photos/<class>/*.jpg``.

``photos/`` has images of equal shape; ``photos/::64x64x3`` scales and crops them to that shape.
Classes are numbered in the order of their names. Images are read one by one, so all orders cost
the same. Therefore rows are shuffled once, always in the same way: held-out rows have images of all
classes, and an epoch shuffles samples, not blocks.
"""

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from mpips import extras
from mpips.datasets.arrays import is_mnist
from mpips.datasets.files import Files
from mpips.datasets.index import FileInfo
from mpips.datasets.order import SPLIT, shuffled
from mpips.datasets.table import ArrayInfo, Table, check_regular, reading
from mpips.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # formats of Pillow that start no programs
MODES = {1: "L", 3: "RGB"}  # modes of Pillow, by the number of channels
GREY = ("1", "L")
DEEP = ("I", "F")  # first letters of modes with more than 8 bits a channel
MOST_THREADS = 8
MOST_SIDE = 1 << 15
READER = "images.ImageTable"
IMAGES, CLASSES = "images", "classes"  # names of inputs and targets in messages

Shape = tuple[int, int, int]  # height, width, channels


def parse_shape(text: str, path: str) -> Shape | None:
    """Return the shape in a text such as ``64x64x3``; None if the text is empty.

    Raises:
        UserError: If the text is not a shape.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+)x(\d+)x([13])", text)
    height, width, channels = map(int, match.groups()) if match else (0, 0, 0)
    if not (0 < height <= MOST_SIDE and 0 < width <= MOST_SIDE):
        got = f"shape {text!r} of the images of {path}"
        expected = "height x width x channels, with 1 or 3 channels"
        raise UserError(got, expected, f"write it as {path}::64x64x3, or leave it out")
    return height, width, channels


def shape_of(file: str | IO[bytes], name: str) -> Shape:
    """Return the shape of an image, from its header.

    Raises:
        UserError: If it is not an image, or has more than 8 bits a channel; if Pillow is not
            installed.
    """
    with _opened(file, name) as image:
        return _shape(image)


def _shape(image: Any) -> Shape:
    return image.height, image.width, 1 if image.mode in GREY else 3


def decode(data: bytes, name: str, shape: Shape, fit: bool) -> np.ndarray:
    """Return an image, uint8, shape (height, width, channels).

    Args:
        data: Contents of the image's file.
        name: Name of the image in messages.
        shape: Expected shape, or the shape to scale and crop to.
        fit: Whether to scale the image by its shorter side, and crop it around its center.

    Raises:
        UserError: If it cannot be decoded, or has another shape without `fit`.
    """
    height, width, channels = shape
    mode = MODES[channels]
    with _opened(io.BytesIO(data), name) as image:
        if fit:
            image.draft(mode, (width, height))  # decodes a JPEG at a reduced size
        elif (actual := _shape(image)) != shape:
            raise _other_shape(name, actual, shape)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = _pillow("ImageOps").fit(image, (width, height))
        return np.asarray(image).reshape(shape)


def _other_shape(name: str, actual: Sequence[int], expected: Sequence[int]) -> UserError:
    """Return the error for an image whose shape differs from that of the others."""
    theirs = "x".join(map(str, expected))
    remedy = f"write ::{theirs} behind the data's name to scale and cut all to that"
    got = f"{name}: an image of {'x'.join(map(str, actual))}"
    return UserError(got, f"{theirs} as the others", remedy)


def fill(out: np.ndarray, make: Callable[[int], np.ndarray]) -> np.ndarray:
    """Set each ``out[k]`` to ``make(k)``, in threads, and return `out`. Pillow releases the GIL.

    Raises:
        UserError: As `make`; if several calls raise, the error of the first index.
    """
    for k, made in enumerate(_pool().map(make, range(len(out)))):
        out[k] = made
    return out


@cache
def _pool() -> ThreadPoolExecutor:
    cores = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(cores, thread_name_prefix="decoder")


@contextmanager
def _opened(file: str | IO[bytes], name: str) -> Iterator[Any]:
    pillow = _pillow("Image")
    if isinstance(file, str):
        check_regular(file)
    with reading(name, "image"), pillow.open(file, formats=FORMATS) as image:
        if image.mode.startswith(DEEP):
            got = f"{name}: an image of mode {image.mode}"
            raise UserError(got, "8 bits a channel", "convert it, or store its numbers as HDF5")
        yield image


def _pillow(module: str) -> Any:
    return extras.load(f"PIL.{module}", "Pillow", "images", "reads images")


class ImageTable(Table):
    """The images of a dataset's folders.

    Args:
        files: The folders, one for each class.
        held: Description of each folder's images.

    Raises:
        UserError: If a folder has images of another shape, or another number of images than
            counted.

    Threads may share it.
    """

    in_memory = False
    scattered = True

    def __init__(self, files: Files, held: Sequence[FileInfo]) -> None:
        self._folders, self._fit = files.paths, bool(files.arrays)
        self.class_names = tuple(Path(folder).name for folder in files.paths)
        height, width, channels = held[0].x.shape[1:]
        self._shape = height, width, channels
        names = [_names(folder) for folder in files.paths]
        for folder, each, there in zip(files.paths, held, names, strict=True):
            n, *shape = each.x.shape
            if tuple(shape) != self._shape:
                raise _other_shape(os.path.join(folder, there[0]), shape, self._shape)
            if len(there) != n:
                remedy = "leave the data alone while a job reads it; run it again"
                raise UserError(f"{folder} with {len(there):,} images", f"{n:,} as counted", remedy)
        mixed = shuffled(sum(map(len, names)), SPLIT)
        # An array of bytes takes a third of the memory of Python's strings.
        self._names = np.concatenate([np.array([*map(os.fsencode, each)]) for each in names])[mixed]
        self._labels = np.repeat(np.arange(len(names), dtype=np.int32), [*map(len, names)])[mixed]
        x = ArrayInfo(IMAGES, (len(mixed), *self._shape), np.dtype("u1"))
        super().__init__(files.title, x, ArrayInfo.of(CLASSES, self._labels))

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and row 0 in it."""
        return os.path.join(self._folders[self._labels[row]], os.fsdecode(self._names[row])), 0

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the images and classes of rows ``[begin, end)``."""
        return self.gather(np.arange(begin, end))

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the classes of rows ``[begin, end)``."""
        return self._labels[begin:end]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8, and classes of `rows`; decodes in threads."""
        out = np.empty((len(rows), *self._shape), np.uint8)
        return fill(out, lambda k: self._decode(rows[k])), self._labels[rows]

    def match(self, other: Table) -> None:
        """Check that `other` has the same classes, and images of the same shape.

        Raises:
            UserError: If they differ.
        """
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
            data = file.read()  # in one read, where Pillow would make many
        return decode(data, path, self._shape, self._fit)


def find_classes(name: str) -> Files | None:
    """Return the folders of the classes in a folder of images; None for another dataset.

    Raises:
        UserError: If the text after ``::`` is not a shape.
    """
    path, _, shape = name.partition("::")
    folder = os.path.expanduser(path)
    if not os.path.isdir(folder) or is_mnist(folder):
        return None
    with os.scandir(folder) as there:
        folders = [item.path for item in there if item.is_dir() and not item.name.startswith(".")]
    parse_shape(shape, path)
    return Files(name, tuple(sorted(folders)), shape, READER) if folders else None


def count_images(folder: str, shape: str) -> FileInfo:
    """Return the number and shape of the images of a class, without decoding any.

    Raises:
        UserError: If there is no image, one cannot be read, or their shapes differ.
    """
    wanted, names = parse_shape(shape, folder), _names(folder)
    if not names:
        got, expected = f"folder {folder} has no images", f"files that end in {', '.join(SUFFIXES)}"
        raise UserError(got, expected, "name the folder of the classes")
    paths = [os.path.join(folder, name) for name in names]
    first = shape_of(paths[0], paths[0])
    for path in paths[1:]:
        if (other := shape_of(path, path)) != first and wanted is None:
            raise _other_shape(path, other, first)
    x = ArrayInfo(IMAGES, (len(names), *(wanted or first)), np.dtype("u1"))
    return FileInfo(x, ArrayInfo(CLASSES, (len(names),), np.dtype("i4")), 1 / 255, 1)


def _names(folder: str) -> list[str]:
    """Return the names of the images in a folder, sorted.

    Raises:
        UserError: If the folder cannot be read, or has folders in it.
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
    images = [name for name, _ in items if Path(name).suffix.lower() in SUFFIXES]
    return sorted(name for name in images if not name.startswith("."))
