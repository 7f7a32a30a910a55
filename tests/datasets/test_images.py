"""Folders of images by class: what is read of them, and what is refused."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def save(path: Path, array: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.squeeze() if array.shape[-1] == 1 else array).save(path, **options)
    return path


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
        assert data.test is not None
        parts = [everything(source, "float64") for source in (data.train, data.test)]
        assert {*parts[1][1].tolist()} == {0, 1, 2}, "those held out are of all classes"
        x, y = (np.concatenate(pair) for pair in zip(*parts, strict=True))
        stored = np.rint(x * 255).astype("u1")
        found = stored.reshape(len(x), -1)[:, :2].tolist()
        assert sorted(found) == [[a, b] for a in range(3) for b in range(EACH)]
        for (label, k), image, target in zip(found, stored, y, strict=True):
            np.testing.assert_array_equal(image, pixels(label, k))
            assert target == label
        order = Order(data.train.n, 4, data.train.block(4), 0)  # of samples, not of blocks
        with Loader(data.train, order, "float64") as loader:
            for epoch in range(2):
                loader.submit(epoch, 0, data.train.n)
            batches = [loader.take() for _ in range(2)]
        assert (batches[0].ids != batches[1].ids).any()
        for batch in batches:
            assert sorted(batch.ids) == list(range(27))
            np.testing.assert_array_equal(batch.x, x[batch.ids])
            np.testing.assert_array_equal(batch.y, y[batch.ids])
        raw, _ = data.train.read(np.array([3, 0, 3]))
        assert raw.dtype == np.uint8
        np.testing.assert_array_equal(raw, stored[[3, 0, 3]])
        assert Path(data.train.table.where(3)[0]).parent.name == CLASSES[int(y[3])]


def test_all_are_made_to_fit_a_shape(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    y, x = np.mgrid[:60, :90]
    wide = np.stack([x * 2, y * 4, 0 * x], axis=2).astype("u1")
    save(folder / "a" / "1.jpg", wide, quality=95)
    save(folder / "a" / "2.png", wide[..., 0])
    save(folder / "b" / "1.png", wide.swapaxes(0, 1))
    save(folder / "b" / "2.png", wide[:20, 30:50])
    with opened(f"{folder}::20x20x3", test_fraction=0) as data:
        images = dict(zip(map(names(data), range(4)), everything(data.train)[0] * 255, strict=True))
        assert all(image.shape == (20, 20, 3) for image in images.values())
        middle = wide[:, 15:75].reshape(20, 3, 20, 3, 3).mean((1, 3))
        np.testing.assert_allclose(images["a/1.jpg"], middle, atol=8)
        np.testing.assert_allclose(images["b/1.png"], middle.swapaxes(0, 1), atol=8)
        np.testing.assert_allclose(images["b/2.png"], wide[:20, 30:50], rtol=1e-6)
        assert np.ptp(images["a/2.png"], axis=2).max() == 0
    with opened(f"{folder}::20x20x1", test_fraction=0) as data:
        assert data.info.x_shape == (20, 20, 1)
    with opened(photos(tmp_path / "grey", shape=(5, 5, 1)), test_fraction=0) as data:
        assert everything(data.train)[0].shape == (36, 5, 5, 1)


def names(data: Any) -> Any:
    return lambda row: "/".join(Path(data.train.table.where(row)[0]).parts[-2:])


def spoil(folder: Path, how: str) -> None:
    path = folder / "cat" / "7.png"
    if how == "size":
        save(path, pixels(2, 7, (5, 6, 3)))
    elif how == "grey":
        save(path, pixels(2, 7, (4, 6, 1)))
    elif how == "deep":
        Image.fromarray(np.ones((4, 6), "u2")).save(path)
    elif how == "text":
        path.write_text("no image")
    elif how == "class":
        for k in range(EACH):
            save(folder / "cat" / f"{k}.png", pixels(2, k, (5, 6, 3)))
    elif how == "empty":
        shutil.rmtree(folder / "cat")
        (folder / "cat").mkdir()
    elif how == "deeper":
        (folder / "cat" / "siamese").mkdir()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("size", "cat/7.png: an image of 5x6x3, expected 4x6x3 as the others; write ::4x6x3"),
        ("grey", "cat/7.png: an image of 4x6x1, expected 4x6x3 as the others; write ::4x6x3"),
        ("deep", "cat/7.png: an image of mode I;16, expected 8 bits a channel"),
        ("text", "cat/7.png cannot be read (cannot identify image file"),
        ("class", "cat/0.png: an image of 5x6x3, expected 4x6x3 as the others"),
        ("empty", "cat has no images, expected files that end in .jpg, .jpeg, .png"),
        ("deeper", "cat, which should hold images of a class, with folder siamese"),
    ],
)
def test_what_is_wrong_is_named_at_the_start(tmp_path: Path, how: str, told: str) -> None:
    folder = photos(tmp_path / "photos")
    spoil(folder, how)
    assert told in refused(folder)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_truncated_image_is_named_when_it_is_read(tmp_path: Path, suffix: str) -> None:
    folder = photos(tmp_path / "photos", shape=(40, 60, 3))
    stream = io.BytesIO()
    Image.fromarray(pixels(2, 7, (40, 60, 3))).save(stream, {"jpg": "jpeg"}.get(suffix, suffix))
    (folder / "cat" / "7.png").write_bytes(stream.getvalue()[: len(stream.getvalue()) // 2])
    with (
        opened(folder, test_fraction=0) as data,
        pytest.raises(UserError, match=r"cat/7\.png cannot be read \(.*\), expected a whole im"),
    ):
        everything(data.train)


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    """Who opens one waits for whoever writes; the folder has another one when it is read."""
    folder, told = photos(tmp_path / "photos"), "is a pipe or a device, expected a file"
    with opened(folder, test_fraction=0) as data:
        (folder / "cat" / "7.png").unlink()
        os.mkfifo(folder / "cat" / "7.png")
        with pytest.raises(UserError, match=told):
            everything(data.train)
    assert "7.png" in refused(folder)
    os.mkfifo(tmp_path / "data.json")
    with pytest.raises(UserError, match=told):
        index.load(tmp_path / "data.json")


def test_shapes_and_classes_have_to_match(tmp_path: Path) -> None:
    one, two = photos(tmp_path / "one"), photos(tmp_path / "two")
    shutil.rmtree(two / "bee,s")
    told = f"{two} with other classes than {one}: 'bee,s' is in {one} alone, expected the same fol"
    assert told in refused(one, test_dataset=str(two))
    assert "samples of shape (8, 8, 3)" in refused(one, test_dataset=f"{one}::8x8x3")
    for text in ("64", "0x4x3", "4x4x2", "4x4x3x1"):
        assert "expected height x width x channels" in refused(f"{one}::{text}")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("earlier", r"bee,s is not what .*: others, expected the same names, sizes and times"),
        ("renamed", r"bee,s is not what .*: others, expected the same names"),
        (None, ""),
    ],
)
def test_a_class_that_has_changed(tmp_path: Path, how: str | None, told: str) -> None:
    folder, path = photos(tmp_path / "photos"), tmp_path / "data.json"
    files = find_many(config(folder))["dataset"]
    entries = [count_file(files, each) for each in files.paths]
    index.save(path, {"dataset": entries})
    (entry, *_), image = index.load(path)["dataset"][1:], folder / "bee,s" / "3.png"
    if how == "earlier":
        os.utime(image, (10**9, 10**9))
    elif how == "renamed":
        image.rename(image.with_name("13.png"))
    else:
        moved = folder.rename(tmp_path / "moved") / "bee,s"
        assert index.recognise(entry, str(moved), path).held == entry.held
        return
    with pytest.raises(UserError, match=told):
        index.recognise(entry, entry.path, path)
