"""Tar files of samples: what is read of them, and what is refused."""

import functools
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_datasets import config, everything, opened, refused
from test_images import pixels

from mpips.datasets import Counted, count_file, find_many, index, open_parts, tar
from mpips.errors import UserError

Image = pytest.importorskip("PIL.Image")

SIZES = (5, 1, 9)
Member = tuple[str, bytes]


def png(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "png")
    return stream.getvalue()


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_tar(path: Path, members: list[Member]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def sample(k: int) -> list[Member]:
    name = f"train/{k:04d}"
    return [
        (f"{name}.png", png(pixels(k % 3, k))),
        (f"{name}.json", b"{}"),
        (f"{name}.cls", f"{k % 3}\n".encode()),
    ]


def shards(folder: Path, make: Any = sample) -> str:
    numbers = iter(range(sum(SIZES)))
    for part, size in enumerate(SIZES):
        members = [member for _ in range(size) for member in make(next(numbers))]
        write_tar(folder / f"{part}.tar", members)
    return f"{folder}/*.tar"


def test_samples_stand_one_behind_the_other(tmp_path: Path) -> None:
    with opened(shards(tmp_path), test_fraction=0) as data:
        assert (data.info.x_shape, data.info.classes, data.info.n_train) == ((4, 6, 3), 3, 15)
        x, y = everything(data.train, "float64")
        np.testing.assert_array_equal(y, np.arange(15) % 3)
        stored = np.stack([pixels(k % 3, k) for k in range(15)])
        np.testing.assert_array_equal(np.rint(x * 255), stored)
        some = data.train.table.read(2, 14)[0]
        assert some.dtype == np.uint8
        np.testing.assert_array_equal(some, stored[2:14])
        assert data.train.table.where(7) == (f"{tmp_path}/2.tar", 1)
    with opened(f"{tmp_path}/2.tar::png,cls,8x8x1", test_fraction=0) as data:
        assert (data.info.x_shape, data.info.n_train) == ((8, 8, 1), 9)


def arrays(k: int) -> list[Member]:
    x = np.random.default_rng(k).normal(size=(2, 3)).astype("f4")
    return [(f"{k}.x.npy", npy(x)), (f"{k}.y.npy", npy(np.float64(k)))]


def test_arrays_are_inputs_and_targets(tmp_path: Path) -> None:
    with opened(f"{shards(tmp_path, arrays)}::x.npy,y.npy", test_fraction=0) as data:
        assert (data.info.x_shape, data.info.classes) == ((2, 3), None)
        x, y = everything(data.train, "float64")
        np.testing.assert_array_equal(y, np.arange(15))
        expected = np.stack([np.random.default_rng(k).normal(size=(2, 3)) for k in range(15)])
        np.testing.assert_array_equal(x, expected.astype("f4"))
    write_tar(tmp_path / "bad.tar", [*arrays(0), ("1.x.npy", npy(np.full((2, 3), np.nan, "f4")))])
    assert "bad.tar: sample 1 (1) has x.npy and no y.npy" in refused(
        f"{tmp_path}/bad.tar::x.npy,y.npy"
    )


LAST = sample(14)
BAD: dict[str, tuple[list[Member], str]] = {
    "no label": (LAST[:2], "has png, json and no cls, expected a member of each kind"),
    "no image": (LAST[1:], "has json, cls and no image or .npy, expected a member of each kind"),
    "text": ([LAST[0], ("train/0014.cls", b"cat")], "has target 'cat', expected a whole number"),
}


@pytest.mark.parametrize("how", BAD)
def test_samples_that_are_not_whole(tmp_path: Path, how: str) -> None:
    members, told = BAD[how]
    name = shards(tmp_path)
    write_tar(tmp_path / "2.tar", [m for k in range(6, 14) for m in sample(k)] + members)
    assert f"{tmp_path}/2.tar: sample 8 (train/0014) {told}" in refused(name)


@pytest.mark.parametrize("cut", ["header", "member", "end"])
def test_a_truncated_file_is_named_at_the_start(tmp_path: Path, cut: str) -> None:
    name, path = shards(tmp_path), tmp_path / "2.tar"
    with tarfile.open(path) as file:
        last = file.getmembers()[-1].offset_data
    os.truncate(path, {"header": 40, "member": last + 1, "end": last + 512}[cut])
    text = refused(name)
    assert str(path) in text
    assert "expected a whole uncompressed tar file" in text


def test_other_files_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as file:
        file.add(__file__, "1.png")
    assert "expected a whole uncompressed tar file" in refused(tmp_path / "c.tar.gz")
    write_tar(tmp_path / "d.tar", [])
    assert "it has no members" in refused(tmp_path / "d.tar")
    name = shards(tmp_path)
    for names in ("png", "png,", "png,cls,64", "a,b,c,d"):
        assert str(tmp_path) in refused(f"{name}::{names}")


GOOD = png(pixels(0, 0))
ODD = {
    "shape": (GOOD, png(pixels(0, 0, (5, 5, 3))), "an image of 5x5x3, expected 4x6x3"),
    "truncated": (GOOD, GOOD[:60], r"cannot be read \(.*\), expected a whole image file"),
    "array": (npy(np.zeros(3)), npy(np.zeros(4)), r"an array of shape \(4,\), float64, expected"),
    "kind": (npy(np.zeros(3)), GOOD, r"cannot be read \(.*\), expected a whole \.npy file"),
}


@pytest.mark.parametrize("how", ODD)
def test_another_shape_or_kind_is_named_when_it_is_read(tmp_path: Path, how: str) -> None:
    first, odd, told = ODD[how]

    def make(k: int) -> list[Member]:
        name = f"{k}.{'npy' if how in ('array', 'kind') else 'png'}"
        return [(name, odd if k == 8 else first), (f"{k}.cls", b"%d" % (k % 2))]

    wrong = pytest.raises(UserError, match=rf"{tmp_path}/2\.tar, sample 2:? {told}")
    with opened(shards(tmp_path, make), test_fraction=0) as data, wrong:
        everything(data.train)


def test_places_are_kept_beside_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is gone through once; without its places, which may be lost, once more."""
    files = find_many(config(shards(tmp_path)))["dataset"]
    counted = [count_file(files, path) for path in files.paths]
    path, gone_through = tmp_path / "data.json", list[str]()
    entries = [*counted]
    for worker in range(2):
        entries[worker::2] = index.save_places(
            path, "dataset", worker=worker, entries=counted[worker::2]
        )
    index.save(path, {"dataset": entries})
    assert '"places": null' in path.read_text()
    kept = index.load(path)["dataset"]
    assert kept == entries

    def spy(path: str, wanted: tar.MemberNames) -> np.ndarray:
        gone_through.append(Path(path).name)
        return scan(path, wanted)

    scan = tar.scan
    monkeypatch.setattr(tar, "scan", spy)
    for lost in ([], ["1.tar"]):
        counted_again = Counted(files, kept, functools.partial(index.load_places, path, "dataset"))
        opened = open_parts(config(files.name), {"dataset": counted_again})
        np.testing.assert_array_equal(opened.train.read_y(0, 15), np.arange(15) % 3)
        opened.close()
        assert gone_through == lost
        (tmp_path / "dataset.places.1").write_bytes(b"")
