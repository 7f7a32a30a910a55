"""HDF5, NumPy and IDX files: what is read of them, and what is refused; hostile ones too."""

import gzip
import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hostile import (
    SECRET,
    Case,
    Change,
    Outside,
    attack,
    external_link,
    outside,
    put,
    stored_outside,
    virtual,
)
from test_datasets import (
    WRITE,
    X,
    Y,
    both,
    everything,
    images,
    opened,
    refused,
    told,
    write_h5,
    write_npz,
)

from mpips.errors import UserError

__all__ = ["outside"]

IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
NOT_READ = "cannot be read"
FLOOD = gzip.compress(bytes(1 << 24))


def files(dataset: str, contents: dict[str, bytes]) -> Callable[[Path, Path], str]:
    """Return what writes files of such names; a dataset is of them, with {} for their folder."""

    def write(folder: Path, _: Path) -> str:
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        return dataset.replace("{}", str(folder))

    return write


def npy(array: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **how)
    return stream.getvalue()


def idx(kind: int, shape: tuple[int, ...], data: bytes = b"", count: int | None = None) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, kind, count or len(shape), *shape) + data


def idx_of(array: np.ndarray) -> bytes:
    data = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return idx(IDX_CODES[array.dtype.str[1:]], array.shape, data)


def write_idx(path: Path, array: np.ndarray) -> Path:
    path.write_bytes(gzip.compress(idx_of(array)) if path.suffix == ".gz" else idx_of(array))
    return path


# Damage, of each format


def valid_files(folder: Path) -> dict[str, str]:
    folder.mkdir()
    x, y = images(30), (np.arange(30) % 3).astype(np.uint8)
    write_idx(folder / "l-labels-idx1", y)
    np.save(folder / "y.npy", y)
    np.save(folder / "x.npy", x)
    zipped = {"compression": "gzip", "chunks": (8, 4, 3)}
    return {
        "h5": str(write_h5(folder / "a.h5", x, y)),
        "gzipped h5": str(write_h5(folder / "b.h5", x, y, **zipped)),
        "npz": str(write_npz(folder / "a.npz", x, y)),
        "npy": f"{folder}/x.npy,{folder}/y.npy",
        "idx": str(write_idx(folder / "l-images-idx3", x)),
        "idx.gz": str(write_idx(folder / "l-images-idx3.gz", x)),
    }


@pytest.mark.parametrize("kind", ["h5", "gzipped h5", "npz", "npy", "idx", "idx.gz"])
def test_damaged_files_raise_nothing_but_user_errors(tmp_path: Path, kind: str) -> None:
    name = valid_files(tmp_path / "f")[kind]
    assert opened(name).info.n_train == 24
    path, chance = Path(name.partition(",")[0]), random.Random(kind)
    whole = path.read_bytes()
    for size in sorted({0, 1, 3, 7, 20, len(whole) // 2, len(whole) - 1}):
        path.write_bytes(whole[:size])
        assert str(path) in refused(name), (kind, size)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        path.write_bytes(data)
        with suppress(UserError), opened(name, classes=250) as dataset:
            everything(dataset.train)


@both
def test_mismatched_and_empty_arrays(tmp_path: Path, kind: str) -> None:
    path, x = tmp_path / f"a.{kind}", np.ones((5, 2))
    for inputs, targets, words in (
        (x, np.ones(6), "has 5 samples and 'y' has 6"),
        (x[:0], np.ones(0), "(0, 2)"),
        (x[:, :0], np.ones(5), "(5, 0)"),
        (3.0, np.ones(5), "shape ()"),
        (x * 1j, np.ones(5), "complex"),
    ):
        assert words in refused(WRITE[kind](path, inputs, targets))


# HDF5


def h5(*changes: Change, names: str = "") -> Callable[[Path, Path], str]:
    """Return what writes a file of `X` and `Y`, and changes it then."""

    def write(folder: Path, outside: Path) -> str:
        with h5py.File(folder / "data.h5", "w") as file:
            file["good/x"], file["good/y"] = X, Y
            file["x"], file["y"] = file["good/x"], file["good/y"]
            for change in changes:
                change(file, outside)
        return f"{folder}/data.h5{names}"

    return write


def soft(name: str, path: str) -> Change:
    return put(name, lambda _: h5py.SoftLink(path))


def of_pattern(file: Any, _: Path) -> None:
    """Make `x` of the arrays e0, e1 and so on, each of which is 8 rows of it."""
    del file["x"]
    endless, block = h5py.h5s.UNLIMITED, (8, 2)
    space = h5py.h5s.create_simple(block, (endless, 2))
    space.select_hyperslab((0, 0), (endless, 1), block, block)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_virtual(space, b".", b"e%b", h5py.h5s.create_simple(block))
    whole = h5py.h5s.create_simple(block, (endless, 2))
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, whole, plist)


def made(name: str, shape: tuple[int, ...], dtype: Any = "f8", value: Any = None) -> Change:
    """Return what makes an array anew, in chunks where nothing is written into it."""

    def change(file: Any, _: Path) -> None:
        del file[name]
        chunks = True if value is None else None
        array = file.create_dataset(name, shape, dtype, chunks=chunks)
        if value is not None:
            array[:] = value(file)

    return change


def scaled(value: Any) -> Change:
    return lambda file, _: file["x"].attrs.create("scale", value)


LINKED, STORED = "links to the file .*secret", "has its data in the file .*secret"
AROUND = external_link("good/e", "/"), soft("good/s", "./e"), soft("x", "good/s/x")
MULTIPLIED = soft("l0", "/"), soft("l1", "/l0" * 5), soft("l2", "/l1" * 5)
HDF5: list[Case] = [
    ("as it should be", h5(), "^read$"),
    ("inputs by an external link", h5(external_link("x", "x")), LINKED),
    ("a group by an external link", h5(external_link("g", "/"), names="::g/x,y"), LINKED),
    ("soft links to an external one, in a group", h5(*AROUND), LINKED),
    ("an external link that nobody asked for", h5(external_link("other", "x")), "^read$"),
    ("a soft link inside", h5(soft("x", "/./good/x")), "^read$"),
    ("a soft link to itself", h5(soft("x", "/x")), "too many links"),
    ("a soft link to nothing", h5(soft("x", "/no")), "is missing"),
    ("soft links that multiply", h5(*MULTIPLIED, names="::l2/good/x,y"), "too many links"),
    ("stored outside, by a soft link", h5(stored_outside("y"), soft("x", "y")), STORED),
    ("a virtual array", h5(virtual("x")), STORED),
    ("of a missing file", h5(virtual("x", "no.h5"), names="::x,y,external"), "its file no.h5"),
    ("of an external link here", h5(external_link("e", "x"), virtual("x", ".", "e")), LINKED),
    ("of this file", h5(virtual("x", ".", "good/x")), "^read$"),
    ("of itself", h5(virtual("x", ".")), "in 'x', no plain array"),
    ("of a pattern", h5(external_link("e0", "x"), of_pattern), "in 'e%b', no plain array"),
    ("of one stored outside", h5(stored_outside("y"), virtual("x", ".", "y")), STORED),
    ("references", h5(made("x", (8,), h5py.ref_dtype, lambda f: f["good/x"].ref)), "holds"),
    ("text", h5(made("x", (8,), h5py.string_dtype(), lambda _: "7")), "holds text"),
    ("a group in place of an array", h5(names="::good,y"), "is missing"),
    ("a name that is nearly right", h5(names="::good/xx,y"), "of its arrays: good/x, .*'good/x'"),
    *(("names", h5(names=f"::{n}"), "two, separated by a comma") for n in ("x", "x,", "a,b,c")),
    ("a scale that is not a number", h5(scaled(np.nan)), "one finite number"),
    ("a scale that is text", h5(scaled("__import__('os').system('true')")), "one finite number"),
    ("samples of a petabyte", h5(made("x", (8, 1 << 47))), "cannot be read|too large"),
    ("samples without end", h5(made("x", (1 << 40, 2)), made("y", (1 << 40,), "i4")), "one label"),
    ("empty space", h5(put("x", lambda _: h5py.Empty("f8"))), "expected"),
]


def test_hdf5_files_that_are_trusted(tmp_path: Path, outside: Outside) -> None:
    """With the word for it, other files are read, as HDF5 does."""
    for name, change in (("link", external_link("x", "x")), ("virtual", virtual("x"))):
        (tmp_path / name).mkdir()
        file = h5(change)(tmp_path / name, outside.folder)
        for names in ("x,y,external", "external"):
            with opened(f"{file}::{names}", test_fraction=0) as data:
                np.testing.assert_array_equal(everything(data.train)[0], np.full((8, 2), SECRET))
        assert outside.opens(), "inotify tells of it"


def test_blocks_suit_batches_and_chunks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:  # 4 KB a sample: a block is about 1024 samples
        file.create_dataset("x", (9000, 1024), "f4", chunks=(100, 1024))
        file["y"] = np.zeros(9000, "f4")
    block = opened(tmp_path / "a.h5").train.block
    assert [block(batch) for batch in (30, 7, 1009, 5000)] == [900, 700, 1009, 5000]
    assert all(block(batch) % batch == 0 for batch in range(1, 64))
    with h5py.File(tmp_path / "d.h5", "w") as file:  # each read of a part would unpack 16 MB
        file.create_dataset("x", (9000, 1024), "f4", chunks=(4096, 1024), compression="gzip")
        file["y"] = np.zeros(9000, "f4")
    assert [opened(tmp_path / "d.h5").train.block(batch) for batch in (32, 30)] == [4096, 4080]
    pixels = write_h5(tmp_path / "c.h5", np.zeros((2000, 4096), "u1"), np.zeros(2000, "f4"))
    assert opened(pixels).train.block(30) == 1020  # bytes are kept as bytes
    assert opened("digits").train.block(32) == 0
    assert opened(write_h5(tmp_path / "b.h5", np.ones((50, 3)), np.ones(50))).train.block(32) == 64


# NumPy's files


def npys(x: bytes, y: bytes = npy(Y)) -> Any:
    return files("{}/x.npy,{}/y.npy", {"x.npy": x, "y.npy": y})


def npz(x: bytes, y: bytes = npy(Y), form: str = "{}.npy", names: str = "") -> Any:
    """Return what writes a zip file of members for `x` and `y`, whose names are of this form."""

    def write(folder: Path, _: Path) -> str:
        with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(form.format("x"), x)
            file.writestr(form.format("y"), y)
        return f"{folder}/data.npz{names}"

    return write


def npy_header(
    text: str = "", shape: Any = (2,), version: bytes = b"\1\0", descr: Any = "<f8"
) -> bytes:
    """Return a .npy file of two numbers whose header is `text`, or tells of this shape and type."""
    about = text or repr({"descr": descr, "fortran_order": False, "shape": shape})
    head = f"{about}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(head)) + head + X[1].tobytes()


class Runs:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/mpips-was-here",)


PICKLE = npy(np.array([Runs()]), allow_pickle=True)
HEADERS: list[tuple[str, bytes, str]] = [
    ("a pickle", PICKLE, "holds objects"),
    ("a type of objects", npy_header(descr="O"), "holds objects"),
    ("brackets without end", npy_header("(" * 9000), NOT_READ),
    ("a shape of petabytes", npy_header(shape=(1 << 47,)), NOT_READ),
    ("another version", npy_header(version=b"\x09\x09"), NOT_READ),
]
NUMPY: list[Case] = [
    ("as it should be", npys(npy(X)), "^read$"),
    ("as it should be, together", npz(npy(X)), "^read$"),
    *((f"{name}, .npy", npys(data), words) for name, data, words in HEADERS),
    *((f"{name}, .npz", npz(data), words) for name, data, words in HEADERS),
    ("a plain pickle", npys(b"cos\nsystem\n(S'true'\ntR."), "does not begin as one"),
    ("targets that are a pickle", npys(npy(X), PICKLE), "holds objects"),
    ("names that lead out", npz(npy(X), form="../../{}.npy"), "is missing"),
    ("asked for", npz(npy(X), form="../{}.npy", names="::../x,../y"), "^read$"),
    ("no .npy", npz(npy(X), form="{}"), NOT_READ),
    ("zeros of a gigabyte", npz(npy(X) + bytes(1 << 20)), "^read$|cannot"),
    ("not a zip", files("{}/a.npz", {"a.npz": b"M" * 99}), NOT_READ),
]


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


def test_idx_folders_and_named_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, n in (("train", 12), ("t10k", 5)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images(n))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(n, dtype=np.uint8) % 2)
    info = opened(tmp_path).info
    assert (info.n_train, info.n_test) == (12, 5)
    own = str(tmp_path / "train-images-idx3-ubyte.gz")
    assert opened(tmp_path, test_dataset=own).info.n_test == 12
    assert opened(own, test_dataset=str(tmp_path)).info.n_test == 5, "the test images"
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "no labels beside" in refused(tmp_path)
    write_idx(tmp_path / "a", images(12))
    write_idx(tmp_path / "b", np.arange(12, dtype=np.uint8) % 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened("~/a,~/b").info.classes == 2
    assert "images,labels" in refused(tmp_path / "a")
    assert "one array" in refused(f"{tmp_path}/a::x,y")


def mnist(images: bytes, labels: bytes = idx_of(Y.astype("u1"))) -> Any:
    return files("{}/train-images", {"train-images": images, "train-labels": labels})


GOOD = idx_of(X)
IDXS: list[Case] = [
    ("as it should be", mnist(GOOD), "^read$"),
    ("compressed zeros", mnist(FLOOD), "no known format"),
    ("compressed, cut", mnist(gzip.compress(GOOD)[:-9]), NOT_READ),
    ("compressed, and more", mnist(gzip.compress(GOOD) + b"M" * 9), NOT_READ),
    ("an unknown type", mnist(idx(0x4F, (8, 2), bytes(16))), "no known format"),
    ("255 dimensions", mnist(idx(8, (8, 2), bytes(16), 255)), NOT_READ),
    ("a shape beyond all", mnist(idx(8, ((1 << 32) - 1,) * 8, bytes(16))), NOT_READ),
    ("more than its shape", mnist(GOOD + b"M"), NOT_READ),
    ("labels of two dimensions", mnist(GOOD, idx(8, (8, 2), bytes(16))), "expected"),
]


@pytest.mark.parametrize("cases", [HDF5, NUMPY, IDXS], ids=["HDF5", "NumPy", "IDX"])
def test_hostile_files(cases: list[Case], tmp_path: Path, outside: Outside) -> None:
    attack(cases, tmp_path, outside, told)
