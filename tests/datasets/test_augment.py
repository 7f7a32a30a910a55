"""Augmented images: `mpips.datasets.loader`."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.datasets.loader import Augment, Loader, augment_of
from mpips.datasets.order import Order
from mpips.errors import UserError

N, SHAPE = 400, (5, 6)
IMAGES = np.arange(1, 1 + N * 30).reshape(N, *SHAPE).astype("f4")
IDS = np.arange(N)


def moved(image: np.ndarray, flip: bool, down: int, right: int) -> np.ndarray:
    """Return an image pixel by pixel, from the definition."""
    seen, out = image[:, ::-1] if flip else image, np.zeros_like(image)
    for row in range(SHAPE[0]):
        for column in range(SHAPE[1]):
            if 0 <= row - down < SHAPE[0] and 0 <= column - right < SHAPE[1]:
                out[row, column] = seen[row - down, column - right]
    return out


def ways(flip: bool, shift: int) -> list[tuple[bool, int, int]]:
    """Return all that may be done to an image."""
    steps = range(-shift, shift + 1)
    return [(f, d, r) for f in ([False, True] if flip else [False]) for d in steps for r in steps]


@pytest.mark.parametrize(("flip", "shift"), [(True, 0), (False, 1), (True, 2)])
def test_each_way_is_drawn_as_often(flip: bool, shift: int) -> None:
    augment, found = Augment(SHAPE, 3, flip, shift), dict[tuple[bool, int, int], int]()
    for image, out in zip(IMAGES, augment.apply(IMAGES, IDS, 0), strict=True):
        same = [way for way in ways(flip, shift) if np.array_equal(moved(image, *way), out)]
        assert len(same) == 1, "the pixels of an image differ"
        found[same[0]] = found.get(same[0], 0) + 1
    expected = N / len(ways(flip, shift))
    assert set(found) == set(ways(flip, shift))
    assert max(abs(count - expected) for count in found.values()) < 5 * expected**0.5


def test_it_depends_on_seed_epoch_and_sample_alone() -> None:
    augment = Augment(SHAPE, 3, True, 2)
    whole = augment.apply(IMAGES, IDS, 1)
    some = np.array([7, 399, 0, 20])
    np.testing.assert_array_equal(augment.apply(IMAGES[some], some, 1), whole[some])
    for other in (augment.apply(IMAGES, IDS, 2), Augment(SHAPE, 4, True, 2).apply(IMAGES, IDS, 1)):
        assert (other != whole).any((1, 2)).mean() > 0.8
    assert augment.apply(IMAGES[:0], IDS[:0], 1).shape == (0, *SHAPE)


@pytest.mark.parametrize("axis", [1, 3])
def test_channels_go_together(axis: int) -> None:
    """Behind or before; channels of an image are mirrored and moved alike."""
    x = np.stack([IMAGES, IMAGES + 1e6, IMAGES + 2e6], axis)
    shape = x.shape[1:]
    out = Augment(shape, 0, True, 2).apply(x, IDS, 0)
    alone = Augment(SHAPE, 0, True, 2).apply(IMAGES, IDS, 0)
    for channel in range(3):
        one = out.take(channel, axis)
        np.testing.assert_array_equal(np.where(one > 0, one - channel * 1e6, 0), alone)


@pytest.mark.parametrize(
    ("shape", "shift", "expected"),
    [
        ((64,), 1, "inputs of shape (64,), expected images: height x width"),
        ((5, 6, 2), 1, "inputs of shape (5, 6, 2), expected images"),
        ((5, 6), 5, "shift 5 of images of 5 x 6, expected at most 4"),
    ],
)
def test_what_cannot_be_is_refused(shape: tuple[int, ...], shift: int, expected: str) -> None:
    info: Any = SimpleNamespace(x_shape=shape)
    with pytest.raises(UserError, match=re.escape(expected)):
        augment_of(Config(shift=shift), info)
    assert augment_of(Config(), info) is None


def test_a_loader_augments_what_is_trained_on(tmp_path: Any) -> None:
    """In memory and from a file, whose samples stay as they are."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"], file["y"] = (IMAGES % 251).astype("u1"), IDS % 2
    np.savez(tmp_path / "images.npz", x=(IMAGES % 251).astype("f4") / 255, y=IDS % 2)
    batches = []
    for name in ("images.h5", "images.npz"):
        config = Config(dataset=str(tmp_path / name), flip=True, shift=1)
        with open_dataset(config) as data:
            block = data.train.block(10)
            order = Order(data.train.n, 10, block, 0)
            augment = augment_of(config, data.info)
            with Loader(data.train, order, "f4", augment=augment) as loader:
                loader.submit(1, 0, 10)
                batch = loader.take()
            stored, _ = data.train.load(0, data.train.n, np.dtype("f4"))
            assert augment is not None
            expected = augment.apply(stored[batch.ids], batch.ids, 1)
            np.testing.assert_array_equal(batch.x, expected)
            batches.append(batch)
    assert (batches[0].x != 0).any()
