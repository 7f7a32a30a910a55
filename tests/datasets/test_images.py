"""Folders of images by class: what is read of them, and what is refused."""

import io
import os
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import RAN
from test_datasets import config, everything, opened, refused

from mpips.datasets import count_file, find_many, index
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.errors import UserError

Image = pytest.importorskip("PIL.Image")

CLASSES = ("ant", "bee,s", "cat")
EACH = 12


def pixels(label: int, k: int, shape: tuple[int, ...] = (4, 6, 3)) -> np.ndarray:
    """Return an image that tells what it is: its first byte is its class, its second its number."""
    found = np.random.default_rng([label, k]).integers(0, 256, shape, dtype=np.uint8)
    found.reshape(-1)[:2] = label, k
    return found


def encoded(array: np.ndarray, kind: str = "png", **how: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array.squeeze() if array.shape[-1] == 1 else array).save(stream, kind, **how)
    return stream.getvalue()


def save(path: Path, array: np.ndarray, kind: str = "png", **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(array, kind, **how))


def photos(folder: Path, **options: Any) -> Path:
    for label, name in enumerate(CLASSES):
        for k in range(EACH):
            save(folder / name / f"{k}.png", pixels(label, k, **options))
    return folder


def test_samples_are_those_of_the_folders(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    (folder / ".cache").mkdir()
    (folder / "cat" / "notes.txt").write_text("no image")
    with opened(f"{folder}/", test_fraction=0.25, batch_size=4) as data:
        info = data.info
        assert (info.name, info.x_shape, info.classes) == ("photos", (4, 6, 3), 3)
        assert info.class_names == CLASSES
        assert info.notes[-1] == "classes: 0 ant, 1 bee,s, 2 cat"
        parts = [everything(source, "float64") for source in (data.train, data.test)]
        assert {*parts[1][1].tolist()} == {0, 1, 2}, "those held out are of all classes"
        x, y = (np.concatenate(pair) for pair in zip(*parts, strict=True))
        stored = np.rint(x * 255).astype("u1")
        found = stored.reshape(len(x), -1)[:, :2].tolist()
        assert sorted(found) == [[a, b] for a in range(3) for b in range(EACH)]
        for (label, k), image, target in zip(found, stored, y, strict=True):
            np.testing.assert_array_equal(image, pixels(label, k))
            assert target == label
        order = Order(data.train.n, data.train.block(4), 0)  # of samples, not of blocks
        with Loader(data.train, order, "float64") as loader:
            loader.submit(1, 0, data.train.n)
            batch = loader.take()
        assert sorted(batch.ids) == list(range(27)) != batch.ids.tolist()
        np.testing.assert_array_equal(batch.x, x[batch.ids])
        np.testing.assert_array_equal(batch.y, y[batch.ids])
        assert Path(data.train.table.where(3)[0]).parent.name == CLASSES[int(y[3])]


def test_all_are_made_to_fit_a_shape(tmp_path: Path) -> None:
    y, x = np.mgrid[:60, :90]
    wide, folder = np.stack([x * 2, y * 4, 0 * x], axis=2).astype("u1"), tmp_path / "photos"
    save(folder / "a" / "1.jpg", wide, "jpeg", quality=95, comment=b"../../etc/passwd")
    save(folder / "a" / "2.png", wide[..., 0])
    save(folder / "b" / "1.png", wide.swapaxes(0, 1))
    save(folder / "b" / "2.png", wide[:20, 30:50], "webp", lossless=True)
    save(folder / "b" / "3.png", wide[:20, 30:50], "bmp")
    save(folder / "b" / "4.png", wide[:20, 30:50, 0], "gif")
    with opened(f"{folder}::20x20x3", test_fraction=0) as data:
        paths = [Path(data.train.table.where(row)[0]) for row in range(6)]
        names = [f"{path.parent.name}/{path.name}" for path in paths]
        images = dict(zip(names, everything(data.train)[0] * 255, strict=True))
        assert all(image.shape == (20, 20, 3) for image in images.values())
        middle = wide[:, 15:75].reshape(20, 3, 20, 3, 3).mean((1, 3))
        np.testing.assert_allclose(images["a/1.jpg"], middle, atol=8)
        np.testing.assert_allclose(images["b/1.png"], middle.swapaxes(0, 1), atol=8)
        for name in ("b/2.png", "b/3.png"):
            np.testing.assert_allclose(images[name], wide[:20, 30:50], rtol=1e-6)
        for name in ("a/2.png", "b/4.png"):
            assert np.ptp(images[name], axis=2).max() == 0
    with opened(f"{folder}::20x20x1", test_fraction=0) as data:
        assert data.info.x_shape == (20, 20, 1)
    with opened(photos(tmp_path / "grey", shape=(5, 5, 1)), test_fraction=0) as data:
        assert everything(data.train)[0].shape == (36, 5, 5, 1)


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\n"
    b"(%pipe%touch /tmp/mpips-was-here) (w) file closefile showpage\n%%EOF\n"
)


def huge_png() -> bytes:
    """Return a picture whose header says that its sides are of 2 billion points."""
    data, sides = encoded(pixels(2, 7)), struct.pack(">II", (1 << 31) - 1, (1 << 31) - 1)
    header = b"IHDR" + sides + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


SEVEN, NO_IMAGE = Path("cat", "7.png"), "cannot be read (cannot identify image file"
OTHER = "expected 4x6x3 as the others; write ::4x6x3"
PICTURES: dict[str, tuple[bytes, str]] = {  # a picture in place of one, and what is said of it
    "another size": (encoded(pixels(2, 7, (5, 6, 3))), f"an image of 5x6x3, {OTHER}"),
    "grey": (encoded(pixels(2, 7, (4, 6, 1))), f"an image of 4x6x1, {OTHER}"),
    "deep": (encoded(np.ones((4, 6), "u2")), "an image of mode I;16, expected 8 bits a channel"),
    "huge": (huge_png(), "cannot be read (Image size"),
    "text": (b"no image", NO_IMAGE),
    "a program": (b"#!/bin/sh\ntouch /tmp/mpips-was-here\n", NO_IMAGE),
    "PostScript": (POSTSCRIPT, NO_IMAGE),
    "TIFF": (encoded(pixels(2, 7), "tiff"), NO_IMAGE),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_wrong_picture_is_named_at_the_start(tmp_path: Path, name: str) -> None:
    folder, (data, words) = photos(tmp_path / "photos"), PICTURES[name]
    (folder / SEVEN).write_bytes(data)
    RAN.unlink(missing_ok=True)
    assert re.search(f"cat/7.png:? {re.escape(words)}", refused(folder))
    assert not RAN.exists()


def test_a_wrong_folder_is_named_at_the_start(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    (folder / "cat" / "siamese").mkdir()
    assert "cat, which should hold images of a class, with folder siamese" in refused(folder)
    shutil.rmtree(folder / "cat")
    (folder / "cat").mkdir()
    words = "cat has no images, expected files that end in .jpg, .jpeg, .png"
    assert words in refused(folder)
    for k in range(EACH):
        save(folder / "cat" / f"{k}.png", pixels(2, k, (5, 6, 3)))
    assert "cat/0.png: an image of 5x6x3, expected 4x6x3 as the others" in refused(folder)


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    """Who opens one waits for whoever writes; the folder has another one when it is read."""
    folder, words = photos(tmp_path / "photos"), "is a pipe or a device, expected a file"
    with opened(folder, test_fraction=0) as data:
        (folder / SEVEN).unlink()
        os.mkfifo(folder / SEVEN)
        with pytest.raises(UserError, match=words):
            everything(data.train)
    assert "7.png" in refused(folder)
    os.mkfifo(tmp_path / "data.json")
    with pytest.raises(UserError, match=words):
        index.load(tmp_path / "data.json")


def test_shapes_and_classes_have_to_match(tmp_path: Path) -> None:
    one, two = photos(tmp_path / "one"), photos(tmp_path / "two")
    shutil.rmtree(two / "bee,s")
    words = f"{two} with other classes than {one}: 'bee,s' is in {one} alone, expected the same fol"
    assert words in refused(one, test_dataset=str(two))
    assert "samples of shape (8, 8, 3)" in refused(one, test_dataset=f"{one}::8x8x3")
    for text in ("64", "0x4x3", "4x4x2", "4x4x3x1"):
        assert "expected height x width x channels" in refused(f"{one}::{text}")


def test_a_class_that_has_changed(tmp_path: Path) -> None:
    folder, path = photos(tmp_path / "photos"), tmp_path / "data.json"
    files = find_many(config(folder))["dataset"]
    path.write_text(index.to_text({"dataset": [count_file(files, each) for each in files.paths]}))
    entry, image = index.load(path)["dataset"][1], folder / "bee,s" / "3.png"
    folder.rename(tmp_path / "moved")
    assert index.recognise(entry, f"{tmp_path}/moved/bee,s", path).held == entry.held
    (tmp_path / "moved").rename(folder)
    about, words = image.stat(), r"bee,s is not what .*: others, expected the same names, sizes and"
    os.utime(image, (10**9, 10**9))
    with pytest.raises(UserError, match=words):
        index.recognise(entry, entry.path, path)
    os.utime(image, (about.st_atime, about.st_mtime))
    image.rename(image.with_name("13.png"))
    with pytest.raises(UserError, match=words):
        index.recognise(entry, entry.path, path)
