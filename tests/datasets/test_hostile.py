"""Hostile data files: each is refused in one line or read right; nothing else is opened or run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hostile import SECRET, Case, Outside, attack, outside
from test_datasets import opened

from mpips.errors import UserError

__all__ = ["outside"]

X, Y = np.arange(16.0).reshape(8, 2) / 16, np.arange(8) % 2


def read(dataset: str, **fields: Any) -> str:
    """Return what a job is told of a dataset, or ``read`` where its samples are `X` and `Y`."""
    try:
        with opened(dataset, test_fraction=0, dtype="float64", **fields) as data:
            x, y = data.train.load(0, min(8, data.train.n), np.dtype("f8"))
    except UserError as error:
        return str(error)
    assert not (np.asarray(x) == SECRET).any(), "the secret was read"
    same = x.shape == X.shape and np.array_equal(x, X) and np.array_equal(y.reshape(-1), Y)
    return "read" if same else f"read {x.shape}: {x.reshape(-1)[:4]}, {y.reshape(-1)[:4]}"


# HDF5 ------------------------------------------------------------------------------------------


def h5(make: Callable[[Any, Path], None], names: str = "") -> Callable[[Path, Path], str]:
    """Return what writes a file of `X` and `Y`, which `make` changes then."""

    def write(folder: Path, outside: Path) -> str:
        with h5py.File(folder / "data.h5", "w") as file:
            file["good/x"], file["good/y"] = X, Y
            file["x"], file["y"] = file["good/x"], file["good/y"]
            make(file, outside)
        return f"{folder}/data.h5{names}"

    return write


def put(name: str, make: Callable[[Path], Any]) -> Callable[[Any, Path], None]:
    def change(file: Any, outside: Path) -> None:
        if name in file:
            del file[name]
        file[name] = make(outside)

    return change


def external_link(name: str, item: str, file: str = "secret.h5") -> Callable[[Any, Path], None]:
    return put(name, lambda outside: h5py.ExternalLink(str(outside / file), item))


def stored_outside(name: str, dtype: str, *places: int) -> Callable[[Any, Path], None]:
    """Return what puts an array of 8 rows into the file `secret`, from these bytes on."""

    def change(file: Any, outside: Path) -> None:
        del file[name]
        shape = (8, 2) if name == "x" else (8,)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize // len(places)
        parts = [(str(outside / "secret"), place, size) for place in places]
        file.create_dataset(name, shape, dtype, external=parts)

    return change


def virtual(name: str, source: str = "", item: str = "x", long: bool = False) -> Any:
    """Return what makes an array virtual; of the file `secret.h5`, unless another is named."""

    def change(file: Any, outside: Path) -> None:
        del file[name]
        target = source or str(outside / "secret.h5")
        free, end = (None, 2), h5py.h5s.UNLIMITED
        if long:
            layout = h5py.VirtualLayout((8, 2), "f8", maxshape=free)
            layout[:end] = h5py.VirtualSource(target, item, (8, 2), maxshape=free)[:end]
        else:
            layout = h5py.VirtualLayout((8, 2), "f8")
            layout[:] = h5py.VirtualSource(target, item, (8, 2), "f8")
        file.create_virtual_dataset(name, layout)

    return change


def both(*changes: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    def change(file: Any, outside: Path) -> None:
        for each in changes:
            each(file, outside)

    return change


def filtered(file: Any, _: Path) -> None:
    """Ask for a filter that a plugin, a library, would have to bring."""
    del file["x"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((8, 2))
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (1,))
    space = h5py.h5s.create_simple((8, 2))
    array = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, space, plist)
    array.write_direct_chunk((0, 0), X.tobytes())


def typed(name: str, dtype: Any, value: Any = None) -> Callable[[Any, Path], None]:
    def change(file: Any, _: Path) -> None:
        del file[name]
        array = file.create_dataset(name, (8,), dtype)
        if value is not None:
            array[:] = value(file) if callable(value) else value

    return change


def scaled(value: Any, dtype: Any = None) -> Callable[[Any, Path], None]:
    def change(file: Any, _: Path) -> None:
        file["x"].attrs.create("scale", value(file) if callable(value) else value, dtype=dtype)

    return change


def huge(name: str, shape: tuple[int, ...], dtype: str = "f8") -> Callable[[Any, Path], None]:
    def change(file: Any, _: Path) -> None:
        del file[name]
        chunks = min(shape[0], 1 << 20), *(2 for _ in shape[1:])
        file.create_dataset(name, shape, dtype, chunks=chunks)

    return change


LINKED, STORED = "links to the file .*secret", "has its data in the file .*secret"
HDF5: list[Case] = [
    ("as it should be", h5(lambda file, outside: None), "^read$"),
    ("inputs by an external link", h5(external_link("x", "x")), LINKED),
    ("targets by an external link", h5(external_link("y", "y")), LINKED),
    ("a group by an external link", h5(external_link("g", "/"), "::g/x,y"), LINKED),
    ("a folder as an external link", h5(external_link("x", "x", "")), "links to the file"),
    ("text by an external link", h5(external_link("x", "x", "secret.txt")), LINKED),
    ("a missing file by an external link", h5(external_link("x", "x", "no")), "links to the file"),
    (
        "a soft link to an external one",
        h5(both(external_link("g", "/"), put("x", lambda _: h5py.SoftLink("/g/x")))),
        LINKED,
    ),
    (
        "soft links to an external one, in a group",
        h5(
            both(
                external_link("good/e", "/"),
                put("good/s", lambda _: h5py.SoftLink("./e")),
                put("x", lambda _: h5py.SoftLink("good/s/x")),
            )
        ),
        LINKED,
    ),
    (
        "an external link by a relative path",
        h5(put("x", lambda outside: h5py.ExternalLink("../outside/secret.h5", "x"))),
        LINKED,
    ),
    (
        "an external link that nobody asked for",
        h5(external_link("other", "x")),
        "^read$",
    ),
    (
        "a missing array beside external links",
        h5(external_link("other", "x"), "::nothing,y"),
        "array 'nothing' is missing",
    ),
    ("a soft link", h5(put("x", lambda _: h5py.SoftLink("good/../x"))), "missing"),
    ("a soft link inside", h5(put("x", lambda _: h5py.SoftLink("/./good/x"))), "^read$"),
    ("a soft link to itself", h5(put("x", lambda _: h5py.SoftLink("/x"))), "too many links"),
    ("a soft link to nothing", h5(put("x", lambda _: h5py.SoftLink("/no"))), "is missing"),
    (
        "two soft links in a circle",
        h5(both(put("x", lambda _: h5py.SoftLink("z")), put("z", lambda _: h5py.SoftLink("x")))),
        "too many links",
    ),
    ("inputs stored outside", h5(stored_outside("x", "u1", 0)), STORED),
    ("targets stored outside", h5(stored_outside("y", "u1", 0)), STORED),
    ("inputs stored in two parts", h5(stored_outside("x", "u1", 0, 100)), STORED),
    ("inputs as text outside", h5(stored_outside("x", "S1", 0)), STORED),
    ("numbers behind a file's end", h5(stored_outside("x", "f8", 250)), STORED),
    (
        "stored outside, by a soft link",
        h5(both(stored_outside("y", "u1", 0), put("x", lambda _: h5py.SoftLink("y")))),
        STORED,
    ),
    (
        "stored outside, in a group",
        h5(
            lambda file, outside: file.create_dataset(
                "g/x", (8, 2), "u1", external=[(f"{outside}/secret", 0, 16)]
            ),
            "::g/x,y",
        ),
        STORED,
    ),
    ("a virtual array", h5(virtual("x")), STORED),
    ("virtual targets", h5(virtual("y", item="y")), STORED),
    ("a virtual array of any length", h5(virtual("x", long=True)), STORED),
    ("a virtual array of a missing file", h5(virtual("x", "missing.h5")), "in the file missing"),
    (
        "a virtual array of a missing file, allowed",
        h5(virtual("x", "missing.h5"), "::x,y,external"),
        "without its file missing.h5",
    ),
    (
        "a virtual array of an external link here",
        h5(both(external_link("e", "x"), virtual("x", ".", "e"))),
        "has its data in",
    ),
    (
        "a virtual array of one stored outside",
        h5(both(stored_outside("y", "u1", 0), virtual("x", ".", "y"))),
        "has its data in",
    ),
    ("references", h5(typed("x", h5py.ref_dtype, lambda f: f["good/x"].ref)), "holds"),
    ("regions", h5(typed("x", h5py.regionref_dtype)), "holds"),
    ("text", h5(typed("x", h5py.string_dtype(), "7")), "holds text"),
    ("lists", h5(typed("x", h5py.vlen_dtype("f8"))), "holds"),
    ("records", h5(typed("x", [("a", "f8"), ("b", "O")][:1])), "holds"),
    ("bytes of any kind", h5(typed("x", "V8")), "holds"),
    ("complex numbers", h5(typed("x", "c16")), "holds"),
    ("targets that are text", h5(typed("y", h5py.string_dtype(), "7")), "holds text"),
    ("arrays as numbers", h5(typed("y", np.dtype(("f8", (3,))))), "at least one sample|holds|read"),
    ("a type in place of an array", h5(put("x", lambda _: np.dtype("f8"))), "is missing"),
    ("a group in place of an array", h5(lambda f, _: None, "::good,y"), "is missing"),
    ("a path through an array", h5(lambda f, _: None, "::x/x,y"), "is missing"),
    ("the file itself", h5(lambda f, _: None, "::/,y"), "is missing"),
    ("a scale that is not a number", h5(scaled(np.nan)), "one finite number"),
    ("a scale that is text", h5(scaled("__import__('os').system('true')")), "one finite number"),
    ("a scale that is a reference", h5(scaled(lambda f: f["y"].ref, h5py.ref_dtype)), "finite"),
    ("a scale of lists", h5(scaled(np.ones(3))), "one finite number"),
    ("an empty scale", h5(scaled(h5py.Empty("f8"))), "one finite number"),
    ("a filter that is a plugin", h5(filtered), "cannot be read"),
    ("samples of a petabyte", h5(huge("x", (8, 1 << 47))), "cannot be read|too large"),
    (
        "samples without end",
        h5(both(huge("x", (1 << 40, 2)), huge("y", (1 << 40,), "i4"))),
        "one label",
    ),
    ("no dimension", h5(put("x", lambda _: 1.0)), "at least one sample"),
    ("no samples", h5(put("x", lambda _: np.zeros((0, 2)))), "at least one sample"),
    ("samples of nothing", h5(put("x", lambda _: np.zeros((8, 0)))), "at least one sample"),
    ("empty space", h5(put("x", lambda _: h5py.Empty("f8"))), "expected"),
]


def test_hdf5_files(tmp_path: Path, outside: Outside) -> None:
    attack(HDF5, tmp_path, outside, read)


def test_hdf5_files_that_are_trusted(tmp_path: Path, outside: Outside) -> None:
    """With the word for it, other files are read, as HDF5 does."""
    for name, change in (("link", external_link("x", "x")), ("virtual", virtual("x"))):
        (tmp_path / name).mkdir()
        file = h5(change)(tmp_path / name, outside.folder)
        with opened(f"{file}::x,y,external", test_fraction=0) as data:
            np.testing.assert_array_equal(data.train.read_block(0, 8)[0], np.full((8, 2), SECRET))
        with opened(f"{file}::external", test_fraction=0) as data:
            assert data.info.n_train == 8
        assert outside.opens(), "inotify tells of it"
