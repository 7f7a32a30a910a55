import gzip
import random
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpips.config import Config
from mpips.datasets import Dataset, describe, iterate, open_dataset, open_parts
from mpips.errors import UserError

IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def config(dataset: Any, **fields: Any) -> Config:
    return Config(**{"dataset": str(dataset), "test_fraction": 0.2, "batch_size": 1, **fields})


def opened(dataset: Any, **fields: Any) -> Dataset:
    return open_dataset(config(dataset, **fields))


def refused(dataset: Any, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(dataset, **fields)
    assert ", expected " in str(caught.value)
    return str(caught.value)


def everything(source: Any, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    batches = list(iterate(source, 0, source.n, 7, dtype))
    return np.concatenate([b.x for b in batches]), np.concatenate([b.y for b in batches])


def write_h5(path: Path, x: Any, y: Any, scale: Any = None, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, **options)
        file.create_dataset("y", data=y)
        if scale is not None:
            file["x"].attrs["scale"] = scale
    return path


def write_npz(path: Path, x: Any, y: Any) -> Path:
    np.savez(path, x=x, y=y)
    return path


WRITE = {"h5": write_h5, "npz": write_npz}


def idx_bytes(array: np.ndarray) -> bytes:
    code = IDX_CODES[array.dtype.str[1:]]
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    data = idx_bytes(array)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 3), dtype=np.uint8)


# The bundled digits


def test_digits() -> None:
    data = opened("digits", classes=10, batch_size=32)
    info = data.info
    assert (info.name, info.n_train, info.n_test, info.x_shape) == ("digits", 1438, 359, (8, 8))
    assert (info.classes, info.y_shape, data.train.in_memory) == (10, (), True)
    x, y = everything(data.train)
    assert (x.dtype, x.min(), x.max()) == (np.float32, 0, 1)
    assert (y.dtype, set(y)) == (np.int64, set(range(10)))
    assert info.notes == ("labels 0 to 9: 10 classes, 128 to 160 training samples each",)


def test_spirals_are_always_the_same_and_lie_on_their_arms() -> None:
    from mpips.datasets.built_in import ARMS, TURNS, open_spirals

    first, again = open_spirals(), open_spirals()
    x, y = first.read(0, first.n)
    for mine, other in zip((x, y), again.read(0, first.n), strict=True):
        assert np.array_equal(mine, other)
    radius, angle = np.hypot(*x.T), np.arctan2(x[:, 1], x[:, 0])
    off = angle / (2 * np.pi) - y / ARMS - TURNS * radius
    away = 2 * np.pi * radius * np.abs(off - np.round(off))  # along the circle
    assert np.quantile(away, 0.99) < 2 * np.pi * TURNS * 0.05
    data = opened("spirals", batch_size=32)
    assert (data.info.n_train, data.info.classes, data.info.x_shape) == (4800, ARMS, (2,))


# Splitting


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_split_in_memory_is_random_disjoint_and_complete(tmp_path: Path, fraction: float) -> None:
    x = np.arange(50.0).reshape(50, 1)
    path = write_npz(tmp_path / "a.npz", x, np.arange(50.0))
    data = opened(path, test_fraction=fraction)
    assert data.test is not None
    train, test = everything(data.train)[1], everything(data.test)[1]
    assert sorted([*train, *test]) == list(range(50))
    assert len(test) == data.info.n_test == min(49, max(1, round(50 * fraction)))
    if fraction == 0.5:
        assert sorted(test) != list(range(25, 50))
    again = opened(path, test_fraction=fraction)
    assert again.test is not None
    assert np.array_equal(everything(again.test)[1], test)


def test_split_of_hdf5_is_the_tail(tmp_path: Path) -> None:
    y = np.arange(50.0)
    data = opened(write_h5(tmp_path / "a.h5", y, y), test_fraction=0.3)
    assert data.test is not None
    assert everything(data.train)[1].tolist() == list(range(35))
    assert everything(data.test)[1].tolist() == list(range(35, 50))
    assert data.info.x_shape == (1,)
    data.close()
    data.close()


def test_own_test_dataset(tmp_path: Path) -> None:
    train = write_npz(tmp_path / "a.npz", np.ones((9, 2)), np.arange(9) % 3)
    test = write_h5(tmp_path / "b.h5", np.ones((4, 2)), [0, 4, 1, 1])
    data = opened(train, test_dataset=str(test))
    assert (data.info.n_train, data.info.n_test, data.info.classes) == (9, 4, 5)
    assert data.test is not None
    assert everything(data.test)[1].tolist() == [0, 4, 1, 1]
    text = refused(test, test_dataset="digits")
    assert "(8, 8)" in text
    assert "(2,)" in text


def test_batch_larger_than_the_data(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", np.ones((10, 2)), np.arange(10) % 2)
    assert opened(path, batch_size=8).info.n_train == 8
    text = refused(path, batch_size=9)
    assert "batch_size=9" in text
    assert "at most 8" in text
    one = write_npz(tmp_path / "one.npz", np.ones((1, 2)), [0])
    assert "has 1 sample, expected at least 2" in refused(one)
    assert opened(one, test_dataset=str(path), classes=2).info.n_test == 10


# Scaling and types


@pytest.mark.parametrize("kind", WRITE)
def test_uint8_is_divided_by_255(tmp_path: Path, kind: str) -> None:
    x, y = images(10), np.zeros(10)
    data = opened(WRITE[kind](tmp_path / f"a.{kind}", x, y), test_fraction=0, scale=3.0)
    assert (data.test, data.info.n_test) == (None, 0)
    assert np.allclose(everything(data.train)[0], x / 255 * 3, rtol=1e-6)
    path = write_h5(tmp_path / "own.h5", x, y, scale=0.5)  # in place of 1/255
    data = opened(path, scale=4.0, test_fraction=0)
    assert np.array_equal(everything(data.train)[0], x * np.float32(2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stored", ["<f4", ">f4", "<f8", ">f8", "f2", "?", "u2", ">i8"])
@pytest.mark.parametrize("kind", WRITE)
def test_every_stored_type(tmp_path: Path, kind: str, stored: str, dtype: str) -> None:
    """In Fortran's order too; a problem cannot change what lies in memory."""
    x = np.asfortranarray((np.arange(24).reshape(8, 3) % 5).astype(stored))
    path = WRITE[kind](tmp_path / f"a.{kind}", x, x[:, :2].astype("f4"))
    data = opened(path, dtype=dtype, test_fraction=0)
    assert (data.info.y_shape, data.info.classes) == ((2,), None)
    for found, wanted in zip(everything(data.train, dtype), (x, x[:, :2]), strict=True):
        assert found.dtype == np.dtype(dtype)
        assert found.dtype.isnative
        assert np.array_equal(found, wanted.astype("f8"))
    batch = next(iterate(data.train, 0, 8, 8, dtype))
    assert batch.x.flags.c_contiguous
    if kind == "npz" and np.dtype(stored) == np.dtype(dtype):
        with pytest.raises(ValueError, match="read-only"):
            batch.x[0] = 5


# Labels


@pytest.mark.parametrize("kind", WRITE)
@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (np.array([0, 3, 1, 2, 0], "u1"), 0, 4),
        (np.array([[0], [3], [1], [2], [0]], "i8"), 0, 4),
        (np.array([0.0, 3, 1, 2, 0]), 4, 4),
        (np.array([0, 4, 2, 1, 9]), 0, 10),
        (np.random.default_rng(0).integers(0, 1000, 500), 0, None),  # few samples of many classes
        (np.random.default_rng(0).permutation(60), 0, 60),
        (np.minimum(np.random.default_rng(0).zipf(1.5, 5000), 400) - 1, 0, 400),  # some are rare
    ],
)
def test_labels_are_classes(
    tmp_path: Path, kind: str, labels: np.ndarray, classes: int, expected: int | None
) -> None:
    path = WRITE[kind](tmp_path / f"a.{kind}", np.ones((len(labels), 2)), labels)
    data = opened(path, test_fraction=0, classes=classes)
    assert data.info.classes == (expected or labels.max() + 1)
    assert data.info.y_shape == ()
    found = everything(data.train)[1]
    assert found.dtype == np.int64
    assert np.array_equal(found, labels.reshape(-1))


@pytest.mark.parametrize(
    ("labels", "classes", "told"),
    [
        ([0, 1, 0, 1, -1, 0, -7], 0, "sample 4 has label -1, expected class numbers .* floats"),
        (np.array([0, 1, 2**64 - 1, 2], "u8"), 0, "18,?446,?744,?073,?709,?551,?61[56]"),
        (np.array([0, 1, 2**64 - 1, 2], "u8"), 3, "sample 2 has label 18446744073709551615"),
        ([0, 1, 2**63 - 1, 2], 3, "sample 2 has label 9223372036854775807"),
        ([0, 1, 1.5, 1], 3, "sample 2 has label 1.5"),
        ([0, 1, np.nan, 1], 3, "sample 2 has label nan"),
        ([0, 1, np.inf, 1], 3, "sample 2 has label inf"),
        (np.eye(4, dtype=int), 0, r"\(4, 4\)"),
        (np.eye(4), 4, r"\(4, 4\)"),
    ],
)
def test_labels_that_are_refused(tmp_path: Path, labels: Any, classes: int, told: str) -> None:
    for kind, write in WRITE.items():
        path = write(tmp_path / f"a.{kind}", np.ones((len(labels), 2)), np.array(labels))
        assert re.search(told, refused(path, classes=classes, test_fraction=0))


# What the labels are, told at the start


def noted(dataset: Any, **fields: Any) -> tuple[str, ...]:
    with opened(dataset, **fields) as data:
        return data.info.notes


TEN = np.random.default_rng(0).permutation(np.arange(200) % 10)
WRITERS = {
    "a.h5": write_h5,
    "a.npz": write_npz,
    "a.svm": lambda path, x, y: write_svm(path, "".join(f"{label} 1:1\n" for label in y)),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("labels", "problem", "classes"),
    [
        (np.zeros(200, int), "has one label alone, 0", 2),
        (np.full(200, -1), "has one label alone, -1", 2),
        (np.full(200, 7), "has one label alone, 7", 8),
        (TEN[TEN < 5] * 10, "has labels that are all multiples of 10", 41),
        (TEN * 100_000, "has labels that are all multiples of 100000", 900_001),
        (TEN * 1000 + 3, "has 10 labels up to 9,003", 9004),
        (TEN % 2 * 50, "has 2 labels up to 50", 51),
    ],
)
def test_labels_that_are_no_class_numbers(
    tmp_path: Path, name: str, labels: np.ndarray, problem: str, classes: int
) -> None:
    path = WRITERS[name](tmp_path / name, np.ones((len(labels), 1)), labels)
    text = refused(path)
    assert f"array 'labels' {problem}" in text.replace("'y'", "'labels'")
    assert f"or give --classes {classes} if that is meant" in text
    assert opened(path, classes=classes).info.classes == classes
    parts = open_parts(config(path))  # a run that was begun before is only told
    found = describe(config(path), parts, strict=False)
    assert problem in found.notes[1]


def test_labels_that_count_from_1(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", np.ones((200, 1)), TEN + 1)
    told, hint = noted(path)
    assert told.startswith("labels 1 to 10: 10 of 11 classes, 1")
    assert hint == (
        "no sample has label 0: if labels count from 1, take 1 off each, or give --classes 11 if "
        "that is meant"
    )
    assert len(noted(path, classes=11)) == 1
    assert "expected whole numbers from 0 to 9; labels count from 0: take 1" in refused(
        path, classes=10
    )


@pytest.mark.parametrize("name", WRITERS)
def test_signs_are_classes_in_every_format(tmp_path: Path, name: str) -> None:
    labels = np.array([-1, 1, 1, -1, 1, 1])
    path = WRITERS[name](tmp_path / name, np.ones((6, 1)), labels)
    for classes in (0, 2):
        data = opened(path, classes=classes, test_fraction=0)
        assert (data.info.classes, data.info.signs) == (2, True)
        assert everything(data.train)[1].tolist() == [0, 1, 1, 0, 1, 1]
        assert data.info.notes[0].startswith("labels -1 and +1 (taken as 0 and 1): 2 classes, 2 to")
        data.close()
    ones = WRITERS[name](tmp_path / f"b{name[1:]}", np.ones((3, 1)), np.array([1, 1, 1]))
    test = opened(path, test_dataset=str(ones)).test
    assert test is not None
    assert everything(test)[1].tolist() == [1, 1, 1]


def test_a_file_sorted_by_class(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a.h5", np.ones((200, 2)), np.sort(TEN))
    text = refused(path)
    assert "a.h5 is sorted by class, and its last 40 samples are held out, expected" in text
    assert "shuffle the samples, give others as --test-dataset, or give --classes 10" in text
    told = noted(path, classes=10)[1]
    assert told.startswith(f"{path} is sorted by class, and its last 40 samples are held out: ")
    other = write_h5(tmp_path / "b.h5", np.ones((200, 2)), TEN)
    assert len(noted(path, test_dataset=str(other))) == len(noted(other)) == 1
    wide = write_h5(tmp_path / "c.h5", np.ones((200, 1 << 13)), np.sort(TEN))
    assert "read in blocks, so that steps see few classes" in noted(wide, test_dataset=str(wide))[1]
    assert len(noted(write_npz(tmp_path / "a.npz", np.ones((200, 2)), np.sort(TEN)))) == 1


def test_held_out_labels_that_training_has_not(tmp_path: Path) -> None:
    def write(name: str, labels: np.ndarray) -> str:
        return str(write_npz(tmp_path / name, np.ones((len(labels), 1)), labels))

    few, all_ten = write("few.npz", TEN[TEN < 4]), write("all.npz", TEN)
    text = refused(few, test_dataset=all_ten)
    assert "120 of 200 held-out samples have labels that training has not: 4, 5, 6, 7, 8 and 1" in (
        text
    )
    assert "--classes 10" in text
    assert opened(few, test_dataset=all_ten, classes=10).info.classes == 10
    most = write("most.npz", TEN[TEN != 9])
    assert noted(most, test_dataset=all_ten)[1] == (
        "20 of 200 held-out samples have labels that training has not: 9"
    )


def test_targets_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, real = np.ones((200, 1)), rng.normal(size=200)
    for write, name in ((write_npz, "a.npz"), (write_h5, "a.h5")):
        path = write(tmp_path / name, x, real)
        told = f"targets {real.min():.4g} to {real.max():.4g}, mean {real.mean():.4g}"
        assert noted(path) == (told,)
        path = write(tmp_path / name, x, TEN.astype("f4"))
        assert noted(path) == (
            "targets 0 to 9, mean 4.5",
            "they are whole numbers: if they are class labels, give --classes 10",
        )
        assert opened(path).info.countable == 10
        assert len(noted(path, classes=10)) == 1
    assert opened(write_npz(tmp_path / "b.npz", x, TEN % 2 * 2.0 - 1)).info.countable == 2
    assert opened(write_npz(tmp_path / "b.npz", x, TEN * 1e5)).info.countable == 0


# Numbers that are not finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("array", ["x", "y"])
@pytest.mark.parametrize("row", [0, 17, 39])
def test_not_finite(tmp_path: Path, array: str, row: int, value: float) -> None:
    """Refused as data in memory is opened; of a file single targets alone, and others when read."""
    arrays = {"x": np.ones((40, 2)), "y": np.ones((40, 2))}
    arrays[array][row, 1] = value
    seen = np.inf if value == 1e39 else value
    told = f"array {array!r}, sample {row}, element (1,) is {seen} in float32, expected finite"
    assert told in refused(write_npz(tmp_path / "a.npz", **arrays))
    data = opened(write_h5(tmp_path / "a.h5", **arrays))
    source = data.train if row < data.info.n_train else data.test
    with pytest.raises(UserError, match=re.escape(told)):
        everything(source)
    arrays["y"] = arrays["y"][:, 1]
    if array == "y" and value != 1e39:
        told = f"array 'y', sample {row} is {value} in float64, expected finite numbers"
        assert told in refused(write_h5(tmp_path / "b.h5", **arrays))


# Files that are not what they should be


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("digit", "unknown dataset 'digit', .*did you mean 'digits'?"),
        ("nothing-like-it", r"expected one of .*\.npz"),
        ("{}/folder.h5", "neither MNIST's files nor folders of images"),
        ("{}/x.npy", "write it as x.npy,y.npy"),
        ("{}/x.npy,{}/z.npy", "z.npy does not exist"),
        ("{}/a.npz", "array 'x' is missing, expected one of its arrays: inputs, targets"),
        ("{}/a.npz::input,targets", "did you mean 'inputs'?"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "folder.h5").mkdir()
    np.save(tmp_path / "x.npy", images(10))
    np.save(tmp_path / "y.npy", np.arange(10))
    np.savez_compressed(tmp_path / "a.npz", inputs=images(10), targets=np.arange(10))
    assert re.search(told, refused(name.format(*[tmp_path] * 2)))
    for good in (f"{tmp_path}/x.npy,{tmp_path}/y.npy", f"{tmp_path}/a.npz::inputs,targets"):
        info = opened(good).info
        assert (info.classes, info.n_train, info.x_shape) == (10, 8, (4, 3))


@pytest.mark.parametrize("suffix", [".h5", ".npz", ".svm", ".txt", "", ".gz"])
def test_missing_files_and_their_nearest(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"training{suffix}").write_bytes(b"x")
    text = refused(tmp_path / f"trainin{suffix}")
    assert "does not exist" in text
    assert f"did you mean 'training{suffix}'?" in text
    assert "does not exist" in refused("digits", test_dataset=f"{tmp_path}/no/such{suffix}")


@pytest.mark.parametrize("name", ["a.h5", "a.npz", "a.npy,b.npy", "a.svm", "train-images", "a.gz"])
@pytest.mark.parametrize("content", [b"", b"hello, this is text\n" * 40, b"\x00\x01\x02\x03" * 9])
def test_files_of_another_format(tmp_path: Path, name: str, content: bytes) -> None:
    paths = [tmp_path / part for part in name.split(",")]
    for path in paths:
        path.write_bytes(content)
    text = refused(",".join(map(str, paths)))
    assert str(paths[0]) in text
    if not content:
        assert "is empty" in text


def valid_files(folder: Path) -> dict[str, Path]:
    folder.mkdir()
    x, y = images(30), (np.arange(30) % 3).astype(np.uint8)
    write_idx(folder / "l-labels-idx1", y)
    lines = [f"{k % 2} 1:{k} 3:0.5\n" for k in range(30)]
    with gzip.open(folder / "t.svm.gz", "wb") as file:
        file.writelines(line.encode() for line in lines)
    np.save(folder / "y.npy", y)
    np.save(folder / "x.npy", x)
    return {
        "h5": write_h5(folder / "a.h5", x, y),
        "gzipped h5": write_h5(folder / "b.h5", x, y, compression="gzip", chunks=(8, 4, 3)),
        "npz": write_npz(folder / "a.npz", x, y),
        "npy": folder / "x.npy",
        "idx": write_idx(folder / "l-images-idx3", x),
        "idx.gz": write_idx(folder / "l-images-idx3.gz", x),
        "svm.gz": folder / "t.svm.gz",
    }


KINDS = ["h5", "gzipped h5", "npz", "npy", "idx", "idx.gz", "svm.gz"]


def spec_of(path: Path) -> str:
    return f"{path},{path.with_name('y.npy')}" if path.name == "x.npy" else str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_raise_nothing_but_user_errors(tmp_path: Path, kind: str) -> None:
    path = valid_files(tmp_path / "f")[kind]
    assert opened(spec_of(path)).info.n_train == 24
    whole, chance = path.read_bytes(), random.Random(kind)
    for size in sorted({1, 3, 7, 20, len(whole) // 2, len(whole) - 1}):
        path.write_bytes(whole[:size])
        assert str(path) in refused(spec_of(path)), (kind, size)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        path.write_bytes(data)
        with suppress(UserError), opened(spec_of(path), classes=250) as dataset:
            everything(dataset.train)


# HDF5


def test_named_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        file["train/inputs"] = np.ones((6, 2))
        file["targets"] = np.arange(6)
        file["words"] = ["a"] * 6
    assert opened(f"{path}::train/inputs,targets").info.classes == 6
    text = refused(path)
    assert "array 'x' is missing" in text
    assert "train/inputs" in text
    assert "did you mean 'targets'?" in refused(f"{path}::train/inputs,target")
    assert "is missing" in refused(f"{path}::train,targets")
    assert "real numbers" in refused(f"{path}::words,targets")
    for names in ("x", "x,", "a,b,c"):
        assert "two, separated by a comma" in refused(f"{path}::{names}")


@pytest.mark.parametrize("write", [write_h5, write_npz])
def test_mismatched_and_empty_arrays(tmp_path: Path, write: Any) -> None:
    path = tmp_path / ("a.h5" if write is write_h5 else "a.npz")
    text = refused(write(path, np.ones((5, 2)), np.ones(6)))
    assert "5 samples" in text
    assert "has 6" in text
    assert "(0, 2)" in refused(write(path, np.ones((0, 2)), np.ones(0)))
    assert "(5, 0)" in refused(write(path, np.ones((5, 0)), np.ones(5)))
    assert "shape ()" in refused(write(path, 3.0, np.ones(5)))
    assert "complex" in refused(write(path, np.ones((5, 2)) * 1j, np.ones(5)))


def test_blocks_suit_batches_and_chunks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:  # 4 KB a sample: a block is about 1024 samples
        file.create_dataset("x", (9000, 1024), "f4", chunks=(100, 1024))
        file["y"] = np.zeros(9000, "f4")
    data = opened(tmp_path / "a.h5")
    assert data.train.block(30) == 900
    assert data.train.block(7) == 700
    assert data.train.block(1009) == 1009
    assert data.train.block(5000) == 5000
    pixels = write_h5(tmp_path / "c.h5", np.zeros((2000, 4096), "u1"), np.zeros(2000, "f4"))
    assert opened(pixels).train.block(30) == 1020  # bytes are kept as bytes
    assert opened("digits").train.block(32) == 0
    assert opened(write_h5(tmp_path / "b.h5", np.ones((50, 3)), np.ones(50))).train.block(32) == 64
    for batch in range(1, 64):
        assert data.train.block(batch) % batch == 0


# IDX


@pytest.mark.parametrize("dtype", IDX_CODES)
@pytest.mark.parametrize("suffixes", [("", ""), (".gz", ".gz"), ("", ".gz"), (".gz", "")])
def test_idx_finds_its_labels(tmp_path: Path, suffixes: tuple[str, str], dtype: str) -> None:
    x, y = (images(12) % 100).astype(dtype), (np.arange(12) % 3).astype(np.uint8)
    path = write_idx(tmp_path / f"train-images-idx3-ubyte{suffixes[0]}", x)
    write_idx(tmp_path / f"train-labels-idx1-ubyte{suffixes[1]}", y)
    data = opened(path, test_fraction=0)
    assert data.info.classes == 3
    got_x, got_y = everything(data.train)
    assert np.allclose(got_x, x / 255 if dtype == "u1" else x)
    assert np.array_equal(got_y, y)


def test_idx_folder(tmp_path: Path) -> None:
    for part, n in (("train", 12), ("t10k", 5)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images(n))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(n, dtype=np.uint8) % 2)
    data = opened(tmp_path)
    assert (data.info.n_train, data.info.n_test) == (12, 5)
    with_own = opened(tmp_path, test_dataset=str(tmp_path / "train-images-idx3-ubyte.gz"))
    assert with_own.info.n_test == 12
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "no labels beside" in refused(tmp_path)


def test_idx_with_named_labels(tmp_path: Path) -> None:
    write_idx(tmp_path / "a", images(12))
    write_idx(tmp_path / "b", np.arange(12, dtype=np.uint8) % 2)
    assert opened(f"{tmp_path}/a,{tmp_path}/b").info.classes == 2
    assert "images,labels" in refused(tmp_path / "a")
    assert "one array" in refused(f"{tmp_path}/a::x,y")


def write_svm(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
