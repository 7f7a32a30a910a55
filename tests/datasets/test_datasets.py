"""Datasets: their parts, scales and types, what targets are, and what is told of all that."""

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hostile import SECRET

from mpips.config import Config
from mpips.datasets import Dataset, describe, iterate, open_dataset, open_parts
from mpips.datasets.built_in import ARMS, TURNS
from mpips.errors import UserError

X, Y = np.arange(16.0).reshape(8, 2) / 16, np.arange(8) % 2
TEN = np.random.default_rng(0).permutation(np.arange(200) % 10)


def config(dataset: Any, **fields: Any) -> Config:
    return Config(**{"dataset": str(dataset), "test_fraction": 0.2, "batch_size": 1, **fields})


def opened(dataset: Any, **fields: Any) -> Dataset:
    return open_dataset(config(dataset, **fields))


def refused(dataset: Any, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(dataset, **fields)
    assert ", expected " in str(caught.value)
    return str(caught.value)


def fails(dataset: Any, words: str) -> None:
    """Assert that data can be opened, and that `words` are said as it is read."""
    with opened(dataset, test_fraction=0) as data, pytest.raises(UserError, match=words):
        everything(data.train)


def everything(source: Any, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    batches = list(iterate(source, 0, source.n, 7, dtype))
    return np.concatenate([b.x for b in batches]), np.concatenate([b.y for b in batches])


def told(dataset: str, **fields: Any) -> str:
    """Return what a job is told of a dataset, or ``read`` where its samples are `X` and `Y`."""
    try:
        with opened(dataset, test_fraction=0, dtype="float64", **fields) as data:
            x, y = data.train.load(0, min(16, data.train.n), np.dtype("f8"))
    except UserError as error:
        return str(error)
    x = getattr(x, "values", x)  # of sparse ones
    assert not (x == SECRET).any(), "the secret was read"
    same = x.shape == X.shape and np.array_equal(x, X) and np.array_equal(y.reshape(-1), Y)
    return "read" if same else f"read {x.shape}: {x.reshape(-1)[:4]}, {y.reshape(-1)[:4]}"


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


def write_svm(path: Path, x: Any, y: Any) -> Path:
    """Write one feature, 1; `x` says nothing more."""
    path.write_text("".join(f"{label} 1:1\n" for label in y))
    return path


def images(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 4, 3), dtype=np.uint8)


WRITE = {"h5": write_h5, "npz": write_npz, "svm": write_svm}
both = pytest.mark.parametrize("kind", ["h5", "npz"])
every = pytest.mark.parametrize("kind", WRITE)


# The bundled ones, and splitting


def test_digits() -> None:
    data = opened("digits", classes=10, batch_size=32)
    info = data.info
    assert (info.name, info.n_train, info.n_test, info.x_shape) == ("digits", 1438, 359, (8, 8))
    assert (info.classes, info.y_shape, data.train.in_memory) == (10, (), True)
    x, y = everything(data.train)
    assert (x.dtype, x.min(), x.max(), y.dtype) == (np.float32, 0, 1, np.int64)
    assert info.notes == ("labels 0 to 9: 10 classes, 128 to 160 training samples each",)


def test_spirals_lie_on_their_arms() -> None:
    data = opened("spirals", batch_size=32, test_fraction=0)
    assert (data.info.n_train, data.info.classes, data.info.x_shape) == (6000, ARMS, (2,))
    x, y = everything(data.train)
    radius, angle = np.hypot(*x.T), np.arctan2(x[:, 1], x[:, 0])
    off = angle / (2 * np.pi) - y / ARMS - TURNS * radius
    assert np.quantile(np.abs(off - np.round(off)), 0.99) < TURNS * 0.05, "along the circle"


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_split_in_memory_is_random_disjoint_and_complete(tmp_path: Path, fraction: float) -> None:
    path = write_npz(tmp_path / "a.npz", np.arange(50.0).reshape(50, 1), np.arange(50.0))
    data, again = (opened(path, test_fraction=fraction) for _ in range(2))
    train, test = everything(data.train)[1], everything(data.test)[1]
    assert sorted([*train, *test]) == list(range(50))
    assert len(test) == data.info.n_test == min(49, max(1, round(50 * fraction)))
    assert fraction != 0.5 or sorted(test) != list(range(25, 50))
    assert np.array_equal(everything(again.test)[1], test)


def test_split_of_hdf5_is_the_tail(tmp_path: Path) -> None:
    y = np.arange(50.0)
    data = opened(write_h5(tmp_path / "a.h5", y, y), test_fraction=0.3)
    assert everything(data.train)[1].tolist() == list(range(35))
    assert everything(data.test)[1].tolist() == list(range(35, 50))
    assert data.info.x_shape == (1,)
    for _ in range(2):
        data.close()


def test_own_test_dataset(tmp_path: Path) -> None:
    train = write_npz(tmp_path / "a.npz", np.ones((9, 2)), np.arange(9) % 3)
    test = write_h5(tmp_path / "b.h5", np.ones((4, 2)), [0, 4, 1, 1])
    data = opened(train, test_dataset=str(test))
    assert (data.info.n_train, data.info.n_test, data.info.classes) == (9, 4, 5)
    assert everything(data.test)[1].tolist() == [0, 4, 1, 1]
    assert re.search(r"\(8, 8\).*\(2,\)", refused(test, test_dataset="digits"))


def test_batch_larger_than_the_data(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", np.ones((10, 2)), np.arange(10) % 2)
    assert opened(path, batch_size=8).info.n_train == 8
    assert re.search("batch_size=9, .*at most 8", refused(path, batch_size=9))
    one = write_npz(tmp_path / "one.npz", np.ones((1, 2)), [0])
    assert "has 1 sample, expected at least 2" in refused(one)
    assert opened(one, test_dataset=str(path), classes=2).info.n_test == 10


# Scaling and types


@both
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
@both
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
    if (kind, np.dtype(stored)) == ("npz", np.dtype(dtype)):
        assert not batch.x.flags.writeable


# Labels


@both
def test_labels_are_classes(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    few = rng.integers(0, 1000, 500)
    for labels, classes, expected in (
        (np.array([0, 3, 1, 2, 0], "u1"), 0, 4),
        (np.array([[0], [3], [1], [2], [0]], "i8"), 0, 4),
        (np.array([0.0, 3, 1, 2, 0]), 4, 4),
        (np.array([0, 4, 2, 1, 9]), 0, 10),
        (few, 0, few.max() + 1),  # few samples of many classes
        (rng.permutation(60), 0, 60),
        (np.minimum(rng.zipf(1.5, 5000), 400) - 1, 0, 400),  # some are rare
    ):
        path = WRITE[kind](tmp_path / f"a.{kind}", np.ones((len(labels), 2)), labels)
        with opened(path, test_fraction=0, classes=classes) as data:
            assert (data.info.classes, data.info.y_shape) == (expected, ())
            found = everything(data.train)[1]
        assert found.dtype == np.int64
        assert np.array_equal(found, labels.reshape(-1))


@both
def test_labels_that_are_refused(tmp_path: Path, kind: str) -> None:
    for labels, classes, words in (
        ([0, 1, 0, 1, -1, 0, -7], 0, "sample 4 has label -1, expected class numbers .* floats"),
        (np.array([0, 1, 2**64 - 1, 2], "u8"), 0, "18,?446,?744,?073,?709,?551,?61[56]"),
        (np.array([0, 1, 2**64 - 1, 2], "u8"), 3, "sample 2 has label 18446744073709551615"),
        ([0, 1, 2**63 - 1, 2], 3, "sample 2 has label 9223372036854775807"),
        ([0, 1, 1.5, 1], 3, "sample 2 has label 1.5"),
        ([0, 1, np.nan, 1], 3, "sample 2 has label nan"),
        ([0, 1, np.inf, 1], 3, "sample 2 has label inf"),
        (np.eye(4, dtype=int), 0, r"\(4, 4\)"),
        (np.eye(4), 4, r"\(4, 4\)"),
    ):
        path = WRITE[kind](tmp_path / f"a.{kind}", np.ones((len(labels), 2)), np.array(labels))
        assert re.search(words, refused(path, classes=classes, test_fraction=0))


def noted(dataset: Any, **fields: Any) -> tuple[str, ...]:
    with opened(dataset, **fields) as data:
        return data.info.notes


@every
def test_labels_that_are_no_class_numbers(tmp_path: Path, kind: str) -> None:
    for labels, problem, classes in (
        (np.zeros(200, int), "has one label alone, 0", 2),
        (np.full(200, -1), "has one label alone, -1", 2),
        (np.full(200, 7), "has one label alone, 7", 8),
        (TEN[TEN < 5] * 10, "has labels that are all multiples of 10", 41),
        (TEN * 100_000, "has labels that are all multiples of 100000", 900_001),
        (TEN * 1000 + 3, "has 10 labels up to 9,003", 9004),
        (TEN % 2 * 50, "has 2 labels up to 50", 51),
    ):
        path = WRITE[kind](tmp_path / f"a.{kind}", np.ones((len(labels), 1)), labels)
        text = refused(path)
        assert f"array 'labels' {problem}" in text.replace("'y'", "'labels'")
        assert f"or give --classes {classes} if that is meant" in text
        assert opened(path, classes=classes).info.classes == classes
        found = describe(config(path), open_parts(config(path)), strict=False)
        assert problem in found.notes[1], "a run that was begun before is only told"


def test_labels_that_count_from_1(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", np.ones((200, 1)), TEN + 1)
    first, hint = noted(path)
    assert first.startswith("labels 1 to 10: 10 of 11 classes, 1")
    assert hint == (
        "no sample has label 0: if labels count from 1, take 1 off each, or give --classes 11 if "
        "that is meant"
    )
    assert len(noted(path, classes=11)) == 1
    text = refused(path, classes=10)
    assert "expected whole numbers from 0 to 9; labels count from 0: take 1" in text


@every
def test_signs_are_classes_in_every_format(tmp_path: Path, kind: str) -> None:
    path = WRITE[kind](tmp_path / f"a.{kind}", np.ones((6, 1)), np.array([-1, 1, 1, -1, 1, 1]))
    for classes in (0, 2):
        with opened(path, classes=classes, test_fraction=0) as data:
            assert (data.info.classes, data.info.signs) == (2, True)
            assert everything(data.train)[1].tolist() == [0, 1, 1, 0, 1, 1]
            assert data.info.notes[0].startswith("labels -1 and +1 (taken as 0 and 1): 2 classes,")
    ones = WRITE[kind](tmp_path / f"b.{kind}", np.ones((3, 1)), np.array([1, 1, 1]))
    assert everything(opened(path, test_dataset=str(ones)).test)[1].tolist() == [1, 1, 1]


def test_a_file_sorted_by_class(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a.h5", np.ones((200, 2)), np.sort(TEN))
    text, problem = refused(path), "is sorted by class, and its last 40 samples are held out"
    assert f"a.h5 {problem}, expected" in text
    assert "shuffle the samples, give others as --test-dataset, or give --classes 10" in text
    assert noted(path, classes=10)[1].startswith(f"{path} {problem}: ")
    other = write_h5(tmp_path / "b.h5", np.ones((200, 2)), TEN)
    assert len(noted(path, test_dataset=str(other))) == len(noted(other)) == 1
    wide = write_h5(tmp_path / "c.h5", np.ones((200, 1 << 13)), np.sort(TEN))
    assert "read in blocks, so that steps see few classes" in noted(wide, test_dataset=str(wide))[1]
    assert len(noted(write_npz(tmp_path / "a.npz", np.ones((200, 2)), np.sort(TEN)))) == 1


def test_held_out_labels_that_training_has_not(tmp_path: Path) -> None:
    few, all_ten, most = (
        str(write_npz(tmp_path / f"{k}.npz", np.ones((len(labels), 1)), labels))
        for k, labels in enumerate((TEN[TEN < 4], TEN, TEN[TEN != 9]))
    )
    part = "of 200 held-out samples have labels that training has not"
    text = refused(few, test_dataset=all_ten)
    assert re.search(f"120 {part}: 4, 5, 6, 7, 8 and 1.*--classes 10", text)
    assert opened(few, test_dataset=all_ten, classes=10).info.classes == 10
    assert noted(most, test_dataset=all_ten)[1] == f"20 {part}: 9"


def test_targets_are_told(tmp_path: Path) -> None:
    real, x = np.random.default_rng(0).normal(size=200), np.ones((200, 1))
    for kind in ("npz", "h5"):
        path = WRITE[kind](tmp_path / f"a.{kind}", x, real)
        line = f"targets {real.min():.4g} to {real.max():.4g}, mean {real.mean():.4g}"
        assert noted(path) == (line,)
        path = WRITE[kind](tmp_path / f"a.{kind}", x, TEN.astype("f4"))
        assert noted(path) == (
            "targets 0 to 9, mean 4.5",
            "they are whole numbers: if they are class labels, give --classes 10",
        )
        assert opened(path).info.countable == 10
        assert len(noted(path, classes=10)) == 1
    for labels, countable in ((TEN % 2 * 2.0 - 1, 2), (TEN * 1e5, 0)):
        assert opened(write_npz(tmp_path / "b.npz", x, labels)).info.countable == countable


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("array", ["x", "y"])
def test_not_finite(tmp_path: Path, array: str, value: float) -> None:
    """Refused as data in memory is opened; of a file single targets alone, and others when read."""
    seen = np.inf if value == 1e39 else value
    for row in (0, 17, 39):
        arrays = {"x": np.ones((40, 2)), "y": np.ones((40, 2))}
        arrays[array][row, 1] = value
        text = f"array {array!r}, sample {row}, element (1,) is {seen} in float32, expected finite"
        assert text in refused(write_npz(tmp_path / "a.npz", **arrays))
        data = opened(write_h5(tmp_path / "a.h5", **arrays))
        source = data.train if row < data.info.n_train else data.test
        with pytest.raises(UserError, match=re.escape(text)):
            everything(source)
        data.close()
        arrays["y"] = arrays["y"][:, 1]
        if array == "y" and value != 1e39:
            text = f"array 'y', sample {row} is {value} in float64, expected finite numbers"
            assert text in refused(write_h5(tmp_path / "b.h5", **arrays))


# Names

ENDINGS = (".h5", ".npz", ".svm", "", ".gz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", "unknown dataset 'digit', .*did you mean 'digits'?"),
        ("nothing-like-it", r"expected one of .*\.npz"),
        ("{}/folder.h5", "neither MNIST's files nor folders of images"),
        ("{}/x.npy", "write it as x.npy,y.npy"),
        ("{}/x.npy,{}/z.npy", "z.npy does not exist"),
        ("{}/a.npz", "array 'x' is missing, expected one of its arrays: inputs, targets"),
        ("{}/a.npz::input,targets", "did you mean 'inputs'?"),
        *((f"{{}}/trainin{end}", f"not exist.*'training{end}'") for end in ENDINGS),
        ("digits {}/no/such.h5", "does not exist"),
    ],
)  # fmt: skip
def test_names_that_are_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.h5").mkdir()
    np.save(tmp_path / "x.npy", images(10))
    np.save(tmp_path / "y.npy", np.arange(10))
    np.savez_compressed(tmp_path / "a.npz", inputs=images(10), targets=np.arange(10))
    for end in ENDINGS:
        (tmp_path / f"training{end}").write_bytes(b"x")
    train, _, test = name.replace("{}", str(tmp_path)).partition(" ")
    assert re.search(words, refused(train, test_dataset=test))
    for good in (f"{tmp_path}/x.npy,{tmp_path}/y.npy", f"{tmp_path}/a.npz::inputs,targets"):
        info = opened(good).info
        assert (info.classes, info.n_train, info.x_shape) == (10, 8, (4, 3))
