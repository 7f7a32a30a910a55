"""Random mirroring and shifts of training images, other ones each epoch.

What is done to a sample depends on the seed, the epoch and its number alone: not on the batch that
it is in, the worker that has it, or a stop in between.
"""

import numpy as np

from mpips.config import Config
from mpips.datasets.base import DataInfo
from mpips.datasets.order import bits_of
from mpips.errors import UserError

CHANNELS = (1, 3)
WORD = 16  # bits of a sample's number that one draw takes


class Augment:
    """Changes batches of images.

    Args:
        shape: Of an image: (height, width), with channels behind or before them.
        seed: Of what is drawn.
        flip: Whether a half of the images is mirrored left to right.
        shift: Pixels by which an image is moved at most, up or down, left or right; what comes in
            at the border is zero.

    Raises:
        UserError: If `shape` is not that of an image, or it has no pixel left.
    """

    def __init__(self, shape: tuple[int, ...], seed: int, flip: bool, shift: int) -> None:
        self._rows = _rows_axis(shape)
        self._seed, self._flip, self._shift = seed, flip, shift
        sides = shape[self._rows : self._rows + 2]
        if shift >= min(sides):
            got = f"shift {shift} of images of {sides[0]} x {sides[1]}"
            raise UserError(got, f"at most {min(sides) - 1}")

    def apply(self, x: np.ndarray, ids: np.ndarray, epoch: int) -> np.ndarray:
        """Return the images `x` of the samples `ids` as they are in an epoch.

        Args:
            x: Shape (n, *shape); not written.
            ids: Numbers of the samples, shape (n,), int64.
            epoch: Counted from 0.

        Returns:
            A new array like `x`.
        """
        drawn = bits_of(ids, self._seed, epoch)
        out = np.zeros_like(x)
        for image, to, bits in zip(x, out, drawn.tolist(), strict=True):
            seen = np.flip(image, self._rows + 1) if self._flip and bits & 1 else image
            down, right = (self._draw(bits >> WORD), self._draw(bits >> 2 * WORD))
            lead = (slice(None),) * self._rows
            source = *lead, _cut(-down), _cut(-right)
            to[*lead, _cut(down), _cut(right)] = seen[source]
        return out

    def _draw(self, bits: int) -> int:
        """Return a number of pixels between ``-shift`` and ``shift``."""
        return (bits & ((1 << WORD) - 1)) * (2 * self._shift + 1) // (1 << WORD) - self._shift


def augment_of(config: Config, info: DataInfo) -> Augment | None:
    """Return what a job does to its training images; None for nothing.

    Raises:
        UserError: If they are none.
    """
    if not (config.flip or config.shift):
        return None
    return Augment(info.x_shape, config.seed, config.flip, config.shift)


def _rows_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of an image's rows, behind which is that of its columns."""
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in CHANNELS):
        return 0
    if len(shape) == 3 and shape[0] in CHANNELS:
        return 1
    got = f"flip or shift of inputs of shape {shape}"
    expected = "images: height x width, with 1 or 3 channels behind or before them"
    raise UserError(got, expected, "leave them out, or store the inputs in that shape")


def _cut(moved: int) -> slice:
    """Return what of an axis is there when something has moved along it."""
    return slice(max(moved, 0), min(moved, 0) or None)
