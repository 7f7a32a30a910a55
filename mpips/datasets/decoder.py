"""Images as arrays: decoded by Pillow, of one shape or made to fit one."""

import io
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from mpips import extras
from mpips.datasets.table import check_regular, reading
from mpips.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # Pillow's; some of its others start programs
MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels
GREY = ("1", "L")
DEEP = ("I", "F")  # modes of more than 8 bits a channel begin so
MOST_THREADS = 8
MOST_SIDE = 1 << 15

Shape = tuple[int, int, int]  # height, width, channels


def parse_shape(text: str, path: str) -> Shape | None:
    """Return the shape that ``64x64x3`` stands for; None where `text` is empty.

    Raises:
        UserError: If it is no such shape.
    """
    if not text:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)x([13])", text)
    height, width, channels = map(int, found.groups()) if found else (0, 0, 0)
    if not (0 < height <= MOST_SIDE and 0 < width <= MOST_SIDE):
        got = f"shape {text!r} of the images of {path}"
        expected = "height x width x channels, with 1 or 3 channels"
        raise UserError(got, expected, f"write it as {path}::64x64x3, or leave it out")
    return height, width, channels


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as it is written behind ``::``."""
    return "x".join(map(str, shape))


def shape_of(file: str | IO[bytes], name: str) -> Shape:
    """Return the shape of an image, from its header.

    Raises:
        UserError: If it is no image, or has more than 8 bits a channel; or if there is no Pillow.
    """
    with _opened(file, name) as image:
        if image.mode.startswith(DEEP):
            got = f"{name}: an image of mode {image.mode}"
            raise UserError(got, "8 bits a channel", "convert it, or store its numbers as HDF5")
        return _shape(image)


def _shape(image: Any) -> Shape:
    return image.height, image.width, 1 if image.mode in GREY else 3


def decode(data: bytes, name: str, shape: Shape, fit: bool) -> np.ndarray:
    """Return an image, uint8, shape (height, width, channels).

    Args:
        data: The image, as it is in its file.
        name: What messages call it.
        shape: What is expected of it, or what it is made to fit.
        fit: Whether to scale and to cut it to `shape`, by its shorter side and around its middle.

    Raises:
        UserError: If it cannot be decoded, or without `fit` is of another shape.
    """
    height, width, channels = shape
    mode = MODES[channels]
    with _opened(io.BytesIO(data), name) as image:
        if fit:
            image.draft(mode, (width, height))  # of a JPEG no more than that is decoded
        elif (found := _shape(image)) != shape:
            raise other_shape(name, found, shape)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = _pillow("ImageOps").fit(image, (width, height))
        return np.asarray(image).reshape(shape)


def other_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> UserError:
    """Make the error for an image that is not of the shape of the others."""
    remedy = f"write ::{shape_text(expected)} behind the data's name to scale and cut all to that"
    got = f"{name}: an image of {shape_text(found)}"
    return UserError(got, f"{shape_text(expected)} as the others", remedy)


def fill(out: np.ndarray, make: Callable[[int], np.ndarray]) -> np.ndarray:
    """Set each ``out[k]`` to ``make(k)``, in threads: Pillow decodes beside Python; returns `out`.

    Raises:
        UserError: As `make`; of several, one of the first.
    """
    count = min(_cores(), len(out))

    def some(first: int) -> None:
        for k in range(first, len(out), count):
            out[k] = make(k)

    for done in [_pool().submit(some, first) for first in range(count)]:
        done.result()
    return out


def _cores() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores(), thread_name_prefix="decoder")


@contextmanager
def _opened(file: str | IO[bytes], name: str) -> Iterator[Any]:
    pillow = _pillow("Image")
    if isinstance(file, str):
        check_regular(file)
    with reading(name, "image"), pillow.open(file, formats=FORMATS) as image:
        yield image


def _pillow(module: str) -> Any:
    return extras.load(f"PIL.{module}", "Pillow", "images", "reads images")


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image."""
    return Path(name).suffix.lower() in SUFFIXES
