"""Hostile data files: each is refused in one line or read right; nothing else is opened or run."""

import gzip
import io
import json
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

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
from test_datasets import config, opened

from mpips.datasets import Counted, count_file, find_many, index, open_parts
from mpips.errors import UserError

__all__ = ["outside"]

X, Y = np.arange(16.0).reshape(8, 2) / 16, np.arange(8) % 2


def written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def repr_of(descr: Any) -> str:
    return repr({"descr": descr, "fortran_order": False, "shape": (2,)})


def npy_header(
    text: str = "", shape: Any = (2,), version: bytes = b"\1\0", descr: str = "<f8"
) -> bytes:
    """Return a .npy file of two numbers whose header is `text`, or tells of this shape and type."""
    about = text or repr({"descr": descr, "fortran_order": False, "shape": shape})
    head = f"{about}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(head)) + head + X[1].tobytes()


def read(dataset: str, **fields: Any) -> str:
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


# HDF5 ------------------------------------------------------------------------------------------


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


def multiplied(file: Any, _: Path) -> None:
    """Make soft links of which each follows the one before it five times."""
    for name, path in (("l0", "/"), ("l1", "/l0" * 5), ("l2", "/l1" * 5)):
        file[name] = h5py.SoftLink(path)


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


def typed(dtype: Any, value: Any = None) -> Change:
    def change(file: Any, _: Path) -> None:
        del file["x"]
        array = file.create_dataset("x", (8,), dtype)
        if value is not None:
            array[:] = value(file) if callable(value) else value

    return change


def scaled(value: Any) -> Change:
    return lambda file, _: file["x"].attrs.create("scale", value)


def huge(name: str, shape: tuple[int, ...], dtype: str = "f8") -> Change:
    def change(file: Any, _: Path) -> None:
        del file[name]
        chunks = min(shape[0], 1 << 20), *(2 for _ in shape[1:])
        file.create_dataset(name, shape, dtype, chunks=chunks)

    return change


LINKED, STORED = "links to the file .*secret", "has its data in the file .*secret"
HDF5: list[Case] = [
    ("as it should be", h5(), "^read$"),
    ("inputs by an external link", h5(external_link("x", "x")), LINKED),
    ("a group by an external link", h5(external_link("g", "/"), names="::g/x,y"), LINKED),
    ("a missing file by an external link", h5(external_link("x", "x", "no")), "links to the file"),
    (
        "soft links to an external one, in a group",
        h5(external_link("good/e", "/"), soft("good/s", "./e"), soft("x", "good/s/x")),
        LINKED,
    ),
    (
        "an external link by a relative path",
        h5(put("x", lambda outside: h5py.ExternalLink("../outside/secret.h5", "x"))),
        LINKED,
    ),
    ("an external link that nobody asked for", h5(external_link("other", "x")), "^read$"),
    ("a soft link inside", h5(soft("x", "/./good/x")), "^read$"),
    ("a soft link to itself", h5(soft("x", "/x")), "too many links"),
    ("a soft link to nothing", h5(soft("x", "/no")), "is missing"),
    ("soft links that multiply", h5(multiplied, names="::l2/good/x,y"), "too many links"),
    ("inputs stored outside", h5(stored_outside("x")), STORED),
    ("stored outside, by a soft link", h5(stored_outside("y"), soft("x", "y")), STORED),
    ("a virtual array", h5(virtual("x")), STORED),
    (
        "a virtual array of a missing file, allowed",
        h5(virtual("x", "missing.h5"), names="::x,y,external"),
        "without its file missing.h5",
    ),
    (
        "a virtual array of an external link here",
        h5(external_link("e", "x"), virtual("x", ".", "e")),
        LINKED,
    ),
    ("a virtual array of this file", h5(virtual("x", ".", "good/x")), "^read$"),
    ("a virtual array of itself", h5(virtual("x", ".")), "in 'x', no plain array"),
    (
        "a virtual array of a virtual one here",
        h5(virtual("v", ".", "good/x"), virtual("x", ".", "v")),
        "in 'v', no plain array",
    ),
    (
        "a virtual array of all arrays that a pattern names",
        h5(external_link("e0", "x"), of_pattern),
        "in 'e%b', no plain array",
    ),
    (
        "a virtual array of one stored outside",
        h5(stored_outside("y"), virtual("x", ".", "y")),
        "has its data in",
    ),
    ("references", h5(typed(h5py.ref_dtype, lambda f: f["good/x"].ref)), "holds"),
    ("text", h5(typed(h5py.string_dtype(), "7")), "holds text"),
    ("records", h5(typed([("a", "f8")])), "holds"),
    ("complex numbers", h5(typed("c16")), "holds"),
    ("a group in place of an array", h5(names="::good,y"), "is missing"),
    ("a path through an array", h5(names="::x/x,y"), "is missing"),
    ("a scale that is not a number", h5(scaled(np.nan)), "one finite number"),
    ("a scale that is text", h5(scaled("__import__('os').system('true')")), "one finite number"),
    ("a scale of lists", h5(scaled(np.ones(3))), "one finite number"),
    ("samples of a petabyte", h5(huge("x", (8, 1 << 47))), "cannot be read|too large"),
    ("samples without end", h5(huge("x", (1 << 40, 2)), huge("y", (1 << 40,), "i4")), "one label"),
    ("empty space", h5(put("x", lambda _: h5py.Empty("f8"))), "expected"),
]


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


# Images ----------------------------------------------------------------------------------------

POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\n"
    b"(%pipe%touch /tmp/mpips-was-here) (w) file closefile showpage\n%%EOF\n"
)


def png(width: int = 6, height: int = 4) -> bytes:
    """Return a PNG of one colour whose header may say what is not so."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    rows = b"".join(b"\0" + bytes([k]) * 18 for k in range(4))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def saved(suffix: str, **how: Any) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), 5, "u1")).save(stream, suffix, **how)
    return stream.getvalue()


NO_IMAGE = "cannot identify image file"
PICTURES: list[tuple[str, Callable[[], bytes], str]] = [
    ("a picture", png, "^read"),
    ("PostScript", lambda: POSTSCRIPT, NO_IMAGE),
    ("TIFF", lambda: saved("tiff"), NO_IMAGE),
    ("GIF", lambda: saved("gif"), "^read"),
    ("JPEG", lambda: saved("jpeg", comment=b"../../etc/passwd"), "^read"),
    ("BMP", lambda: saved("bmp"), "^read"),
    ("WebP", lambda: saved("webp", lossless=True), "^read"),
    ("a program", lambda: b"#!/bin/sh\ntouch /tmp/mpips-was-here\n", NO_IMAGE),
    ("a side of 4 billion", lambda: png(width=(1 << 31) - 1, height=(1 << 31) - 1), "expected"),
]


def folder_of(content: Callable[[], bytes], suffix: str) -> Callable[[Path, Path], str]:
    def write(folder: Path, _: Path) -> str:
        for number, name in enumerate("ab"):
            (folder / name).mkdir()
            data = content() if number else png()
            (folder / name / f"0.{suffix}").write_bytes(data)
        return f"{folder}"

    return write


FOLDERS: list[Case] = [
    (f"{name} as .{suffix}", folder_of(make, suffix), told)
    for name, make, told in PICTURES
    for suffix in (("png", "jpg") if "Post" in name else ("jpg",))
]


# Tar files -------------------------------------------------------------------------------------

Member = tuple[str, bytes | dict[str, Any]]


def tar(members: Callable[[Path], list[Member]], names: str = "") -> Callable[[Path, Path], str]:
    """Return what writes two good samples and these members; of a dictionary, with its fields."""

    def write(folder: Path, outside: Path) -> str:
        path = folder / "data.tar"
        good: list[Member] = [("0.npy", npy(X[0])), ("0.cls", b"0")]
        with tarfile.open(path, "w") as file:
            for name, data in [*good, *members(outside)]:
                info = tarfile.TarInfo(name)
                if isinstance(data, dict):
                    for field, value in data.items():
                        setattr(info, field, value)
                    data = b""
                else:
                    info.size = len(data)
                file.addfile(info, io.BytesIO(data))
        return f"{path}{names}"

    return write


def npy(array: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **how)
    return stream.getvalue()


def labelled(label: bytes) -> Callable[[Path, Path], str]:
    return tar(lambda _: [("1.npy", npy(X[1])), ("1.cls", label)])


def held(data: bytes | dict[str, Any], suffix: str = "npy") -> Callable[[Path, Path], str]:
    return tar(lambda _: [(f"1.{suffix}", data), ("1.cls", b"1")])


def patched(at: int, data: bytes) -> Callable[[Path, Path], str]:
    """Return what writes into the third member's header, whose sum is right then."""

    def write(folder: Path, outside: Path) -> str:
        path = Path(labelled(b"1")(folder, outside))
        whole = bytearray(path.read_bytes())
        begin = whole.index(b"1.npy")
        whole[begin + at : begin + at + len(data)] = data
        whole[begin + 148 : begin + 156] = b" " * 8
        whole[begin + 148 : begin + 156] = b"%06o\0 " % sum(whole[begin : begin + 512])
        path.write_bytes(whole)
        return str(path)

    return write


def damaged_sum(folder: Path, outside: Path) -> str:
    path = Path(labelled(b"1")(folder, outside))
    path.write_bytes(path.read_bytes().replace(b"1.npy", b"7.npy"))
    return str(path)


class Runs:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/mpips-was-here",)


TARGET = "has target .*, expected a whole number"
LABELS: list[tuple[bytes, str]] = [
    (b"1", "^read"),
    (b" 1\n", "^read"),
    (b"-1", "class|label"),
    (b"1_0", TARGET),
    (b"9223372036854775808", TARGET),
    (b"999999999999999999", "label"),
    (b"1e3", TARGET),
    (b"\xd9\xa1", TARGET),
    (b"\xff", TARGET),
    (b"1\0", TARGET),
    (b"", TARGET),
    (b"1" + b" " * 99 + b"2", TARGET),
    (b"7" * 100_000, TARGET),
    (b"__import__('os').system('true')", TARGET),
]
MINUS_512 = b"\xff" * 10 + b"\xfe\0"  # as a size: the next member is the same
BACK = "a size below 0|no member at byte"  # the second by Pythons that refuse it themselves
LACKS = "has cls and no|has .* and no"
TARS: list[Case] = [
    *((f"target {label[:20]!r}", labelled(label), told) for label, told in LABELS),
    ("a pickle", held(npy(np.array([Runs()]), allow_pickle=True)), "cannot be read"),
    ("a header that is a program", held(npy_header("__import__('os').system('true')")), "expected"),
    ("numbers of a petabyte", held(npy_header(shape=(1 << 47,))), "expected"),
    ("PostScript", held(POSTSCRIPT, "png"), "expected|sample 1"),
    ("a symbolic link", held({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), LACKS),
    ("a device", held({"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}), LACKS),
    ("a sparse file", patched(156, b"S"), "sparse|cannot be read"),
    (
        "names that lead out",
        tar(lambda o: [(f"{o}/1.npy", npy(X[1])), (f"{o}/1.cls", b"1")]),
        "^read",
    ),
    ("a size of exabytes", patched(124, b"\x80" + b"\0" * 3 + b"\x70" + b"\0" * 7), "cannot be"),
    ("a size below 0", patched(124, b"\xff" * 12), BACK),
    ("a size that leads back", patched(124, MINUS_512), BACK),
    ("a sparse file that leads back", patched(124, MINUS_512 + b"0" * 12 + b" " * 8 + b"S"), BACK),
    ("a size that is text", patched(124, b"__import__\0\0"), "no member at byte"),
    ("a sum that is text", damaged_sum, "no member at byte"),
    ("an unknown type", patched(156, b"Z"), LACKS),
    ("a long name without end", patched(156, b"L"), "expected"),
    ("more of its header", patched(156, b"x"), "expected"),
    ("names that are paths", tar(lambda _: [], "::../../etc,passwd"), "and no"),
]


# Columns ---------------------------------------------------------------------------------------

TABLE = "a,b,y\n" + "".join(f"{a},{b},{y}\n" for (a, b), y in zip(X.tolist(), Y, strict=True))


def csv(content: str | bytes, names: str = "::a,b,y", file: str = "data.csv") -> Any:
    def write(folder: Path, _: Path) -> str:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / file).write_bytes(data)
        return f"{folder}/{file}{names}"

    return write


def line(text: str, names: str = "::a,b,y") -> Any:
    """Return what writes a good table and a line behind it, which begins its second megabyte."""
    return csv(TABLE + text, names)


def truths(*words: str) -> str:
    """Return the good table, with whether `a` is above 0.5 in its place, and `y` as words too."""
    rows = zip(X.tolist(), Y.tolist(), strict=True)
    lines = [f"{words[a > 0.5]},{b},{words[y]}\n" for (a, b), y in rows]
    return "a,b,y\n" + "".join(lines)


NOT_READ = "cannot be read"
CSVS: list[Case] = [
    ("as it should be", csv(TABLE), "^read$"),
    ("quoted names", csv(TABLE.replace("a,b,y", '"a","b","y"', 1)), "^read$"),
    ("a comma in a name", csv(TABLE.replace("a,b,", '"a, 1",b,', 1), '::"a, 1",b,y'), "^read$"),
    ("a quote without end in the names", csv(TABLE.replace("a,b", '"a,b', 1)), "missing|cannot"),
    ("spaces behind commas", csv(TABLE.replace("a,b,y", 'a, "b", y', 1)), "^read$"),
    ("a mark of its encoding", csv("\ufeff" + TABLE), "^read$"),
    ("lines of Windows", csv(TABLE.replace("\n", "\r\n")), "^read$"),
    ("truths", csv(truths("false", "true")), r"^read \(8, 2\): \[0. .*0 1 0 1"),
    ("truths in capitals", csv(truths("False", "True"), "::b,a,y"), r"^read \(8, 2\)"),
    ("truths that are hashed", csv(truths("no", "yes"), names="::a,y"), "holds text"),
    ("a number among truths", csv(truths("false", "true") + "2,2,true\n"), "holds text"),
    ("a missing truth", csv(truths("false", "true") + ",1,true\n"), "has no value"),
    ("two columns of a name", csv("a,a,y\n1,2,0\n3,4,1\n", "::a,y"), "two columns"),
    ("no names asked for, of none", csv("\n1,2,0\n", ""), "without names"),
    ("zeros", csv(bytes(100)), "expected"),
    ("a zero byte", line("1\0,2,0\n"), "expected"),
    ("UTF-16", csv(TABLE.encode("utf-16")), "expected"),
    ("a line within quotes", line('"1\n2",2,0\n'), "expected"),
    ("a quote without end", line('"1,2,0\n'), "expected"),
    ("a huge number", line("1e999,2,0\n"), "finite"),
    ("not a number", line("nan,2,0\n"), "finite"),
    ("a target of exabytes", line("1,2,99999999999999999999\n"), "expected|^read"),
    ("a target that is negative", line("1,2,-9\n"), "label"),
    ("a name of a megabyte", csv("a" * (1 << 20) + ",b,y\n1,2,0\n"), "expected"),
    ("a comma in the file's name", csv(TABLE, file="a,1.csv"), "^read$"),
    ("a pattern for commas in names", csv(TABLE, file="a,1.csv", names=""), "without names"),
]


def patterned(name: str, pattern: str, names: str = "::a,b,y") -> Any:
    def write(folder: Path, outside: Path) -> str:
        csv(TABLE, file=name)(folder, outside)
        return f"{folder}/{pattern}{names}"

    return write


def pairs(x: str, y: str, pattern: str) -> Any:
    def write(folder: Path, _: Path) -> str:
        np.save(folder / x, X)
        np.save(folder / y, Y)
        return ",".join(f"{folder}/{each}" for each in pattern.split(" "))

    return write


CSVS += [
    ("a comma in a name that is found", patterned("a,1.csv", "*.csv"), "^read$"),
    ("an option in a name that is found", patterned("-o,--out.csv", "*.csv"), "^read$"),
    ("two colons in a name", patterned("a::b.csv", "*.csv"), "^read$"),
    ("a new line in a name", patterned("a\nb.csv", "*.csv"), "^read$"),
    ("pairs", pairs("x1.npy", "y1.npy", "x*.npy y*.npy"), "^read$"),
    ("a comma in a name of pairs", pairs("x,1.npy", "y,1.npy", "x*.npy y*.npy"), "comma"),
]


# NumPy's files ---------------------------------------------------------------------------------


def npys(x: bytes, y: bytes = b"") -> Any:
    def write(folder: Path, _: Path) -> str:
        (folder / "x.npy").write_bytes(x)
        (folder / "y.npy").write_bytes(y or npy(Y))
        return f"{folder}/x.npy,{folder}/y.npy"

    return write


def npz(*members: tuple[str, bytes], names: str = "", packing: int = zipfile.ZIP_DEFLATED) -> Any:
    def write(folder: Path, _: Path) -> str:
        with zipfile.ZipFile(folder / "data.npz", "w", packing) as file:
            for name, data in members:
                file.writestr(name, data)
        return f"{folder}/data.npz{names}"

    return write


GOOD_Y = ("y.npy", npy(Y))
PICKLE = npy(np.array([Runs()]), allow_pickle=True)
HEADERS: list[tuple[str, bytes, str]] = [
    ("a pickle", PICKLE, "holds objects"),
    ("a plain pickle", b"cos\nsystem\n(S'true'\ntR.", "does not begin as one|magic"),
    ("a type of objects", npy_header(descr="O"), "holds objects"),
    ("records of objects", npy_header(repr_of([("a", "O")])), "holds objects"),
    ("an expression", npy_header("{'descr': '<f8', 'shape': 2 ** 99, 'fortran_order': 1}"), "read"),
    ("brackets without end", npy_header("(" * 9000), NOT_READ),
    ("a header of 60 KB", npy_header(" " * 60_000), NOT_READ),
    ("a shape of petabytes", npy_header(shape=(1 << 47,)), NOT_READ),
    ("a shape whose product is 0", npy_header(shape=(1 << 40, 0)), "at least one sample|read"),
    ("a shape below 0", npy_header(shape=(-2,)), "expected"),
    ("a shape of text", npy_header(shape="ab"), NOT_READ),
    ("100 dimensions", npy_header(shape=(1,) * 100), NOT_READ),
    ("a type that is none", npy_header(descr="os.system"), NOT_READ),
    ("a type of a gigabyte", npy_header(descr="V1000000000"), NOT_READ),
    ("another version", npy_header(version=b"\x09\x09"), NOT_READ),
    ("nothing behind the header", npy_header(shape=(9, 9)), NOT_READ),
]
NUMPY: list[Case] = [
    ("as it should be", npys(npy(X)), "^read$"),
    ("as it should be, together", npz(("x.npy", npy(X)), GOOD_Y), "^read$"),
    *((f"{name}, .npy", npys(data), told) for name, data, told in HEADERS),
    *((f"{name}, .npz", npz(("x.npy", data), GOOD_Y), told) for name, data, told in HEADERS[2:9]),
    ("a pickle in .npz", npz(("x.npy", PICKLE), GOOD_Y), "holds objects"),
    ("targets that are a pickle", npys(npy(X), PICKLE), "holds objects"),
    ("names that lead out", npz(("../../x.npy", npy(X)), ("/y.npy", npy(Y))), "is missing"),
    (
        "names that lead out, asked for",
        npz(("../x.npy", npy(X)), ("/y.npy", npy(Y)), names="::../x,/y"),
        "^read$",
    ),
    ("no .npy", npz(("x", npy(X)), ("y", npy(Y))), NOT_READ),
    ("zeros of a gigabyte", npz(("x.npy", npy(X) + bytes(1 << 20)), GOOD_Y), "^read$|cannot"),
    ("not a zip", lambda folder, _: written(folder / "data.npz", b"M" * 99), NOT_READ),
]


# libsvm, plain text and IDX --------------------------------------------------------------------

SVM = "".join(f"{y} 1:{a} 2:{b}\n" for (a, b), y in zip(X.tolist(), Y, strict=True))
LINES: list[tuple[str, bytes, str]] = [
    ("an index in other digits", "1 ٣:1\n".encode(), "feature"),
    ("a value that is a program", b"1 3:__import__('os')\n", "feature"),
    ("a label that is a path", b"/etc/passwd 1:1\n", "label"),
    ("a label in other digits", "٣ 1:1\n".encode(), "label"),
    ("a label of exabytes", b"99999999999999999999 1:1\n", "label"),
    ("a zero byte", b"1 1:1\0\n", "feature"),
    ("a comment", b"# `touch /tmp/mpips-was-here`\n", "^read$"),
    ("a line of a megabyte", b"1 " + b"9" * (1 << 20) + b"\n", "feature"),
]
FLOOD = gzip.compress(bytes(1 << 24))


def svm(more: bytes, names: str = "") -> Any:
    return lambda folder, _: written(folder / "data.svm", SVM.encode() + more) + names


SVMS: list[Case] = [
    ("as it should be", svm(b""), "^read$"),
    ("an index of 2 billion", svm(b"1 2147483647:1\n"), "at most 16,777,216 in dense"),
    ("an index of 2 billion, sparse", svm(b"1 2147483647:1\n", "::sparse"), "^read"),
    *((name, svm(more), told) for name, more, told in LINES),
    *(
        (f"{name}, sparse", svm(more, "::sparse"), re.sub(r"\$", "", told))
        for name, more, told in LINES
    ),
    ("compressed", lambda f, _: written(f / "data.svm", gzip.compress(SVM.encode())), "^read$"),
    ("compressed zeros", lambda f, _: written(f / "data.svm", FLOOD), "label"),
    ("compressed, cut", lambda f, _: written(f / "data.svm", FLOOD[:99]), NOT_READ),
    ("compressed, sparse", lambda f, _: written(f / "data.svm", FLOOD) + "::sparse", "compressed"),
    ("arrays of it", svm(b"", "::../../etc,passwd"), "none"),
]


def idx(kind: int, shape: tuple[int, ...], data: bytes = b"", count: int | None = None) -> bytes:
    head = struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, count or len(shape), *shape)
    return head + data


def mnist(images: bytes, labels: bytes = b"", suffix: str = "") -> Any:
    def write(folder: Path, _: Path) -> str:
        labels_are = labels or idx(8, (8,), Y.astype("u1").tobytes())
        written(folder / f"train-labels-idx1-ubyte{suffix}", labels_are)
        return written(folder / f"train-images-idx3-ubyte{suffix}", images)

    return write


IMAGES = idx(0x0E, (8, 2), X.astype(">f8").tobytes())
IDXS: list[Case] = [
    ("as it should be", mnist(IMAGES), "^read$"),
    ("compressed", mnist(gzip.compress(IMAGES), suffix=".gz"), "^read$"),
    ("compressed zeros", mnist(FLOOD), "no known format"),
    ("compressed, cut", mnist(gzip.compress(IMAGES)[:-9]), NOT_READ),
    ("compressed, and more", mnist(gzip.compress(IMAGES) + b"M" * 9), NOT_READ),
    ("an unknown type", mnist(idx(0x4F, (8, 2), bytes(16))), "no known format"),
    ("255 dimensions", mnist(idx(8, (8, 2), bytes(16), 255)), NOT_READ),
    ("a shape beyond all", mnist(idx(8, ((1 << 32) - 1,) * 8, bytes(16))), NOT_READ),
    ("more than its shape", mnist(IMAGES + b"M"), NOT_READ),
    ("labels of two dimensions", mnist(IMAGES, idx(8, (8, 2), bytes(16))), "expected"),
]


# The index of many files, and where samples lie in them ----------------------------------------


def saved_run(change: Callable[[Any], Any], places: Callable[[bytes], bytes] = bytes) -> Any:
    """Return what writes two tar files with their index and places, of which these make others."""

    def write(folder: Path, outside: Path) -> str:
        for number in range(2):
            (folder / str(number)).mkdir()
            path = labelled(b"1")(folder / str(number), outside)
            os.rename(path, folder / f"{number}.tar")
        path, name = folder / "data.json", f"{folder}/*.tar"
        files = find_many(config(name))["dataset"]
        entries = [count_file(files, each) for each in files.paths]
        kept = index.save_places(path, "dataset", worker=0, entries=entries)
        index.save(path, {"dataset": kept})
        text = change(json.loads(path.read_text()))
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        binary = folder / "dataset.places.0"
        binary.write_bytes(places(binary.read_bytes()))
        return str(folder)

    return write


def entry(change: dict[str, Any], *place: str) -> Any:
    """Return what writes these fields into the first entry, or into what is at `place` in it."""

    def made(found: Any) -> Any:
        at = found["files"]["dataset"][0]
        for key in place:
            at = at[int(key) if key.isdigit() else key]
        at.update(change)
        return found

    return saved_run(made)


def resumed(folder: str) -> str:
    """Return what a resumed run is told of its data; ``read`` if all samples are read."""
    path, name = Path(folder) / "data.json", f"{folder}/*.tar"
    try:
        kept, files = index.load(path)["dataset"], find_many(config(name))["dataset"]
        index.check_names(kept, files, path)
        pairs = zip(kept, files.paths, strict=True)
        known = [index.recognise(each, file, path) for each, file in pairs]
        counted = Counted(files, known, partial(index.load_places, path, "dataset"))
        with closing(open_parts(config(name, test_fraction=0), {"dataset": counted})) as parts:
            x, y = parts.train.read(0, parts.train.n)
    except UserError as error:
        return str(error)
    same = np.array_equal(x, X[[0, 1, 0, 1]]) and np.array_equal(y, [0, 1, 0, 1])
    return "read" if same else f"read {x}, {y}"


UNREAD = r"data\.json cannot be read .* remove it: the files are counted again"
DEEP = "[" * 100_000 + "]" * 100_000
INDEXES: list[Case] = [
    ("as it should be", saved_run(lambda found: found), "^read$"),
    ("lists without end", saved_run(lambda _: DEEP), UNREAD),
    ("a program", saved_run(lambda _: "__import__('os').system('true')"), UNREAD),
    ("a list", saved_run(lambda _: []), UNREAD),
    ("entries that are text", saved_run(lambda f: f | {"files": {"dataset": ["x"]}}), UNREAD),
    ("a path of another file", entry({"path": "/etc/passwd"}), "expected the 2 of the run"),
    ("no stamps", entry({"stamps": []}), UNREAD),
    ("a stamp more", entry({"stamps": [{"size": 1, "time_s": 1, "head": 1}] * 2}), "2 stamps of"),
    ("a stamp that is text", entry({"size": "x"}, "stamps", "0"), UNREAD),
    ("a time beyond all", entry({"time_s": 1 << 70}, "stamps", "0"), "not what it was|" + UNREAD),
    ("a field more", entry({"run": "true"}, "held"), "^read$"),
    ("a type of objects", entry({"dtype": "O"}, "held", "x"), UNREAD),
    ("a type of records", entry({"dtype": "f4,O"}, "held", "x"), UNREAD),
    ("a shape below 0", entry({"shape": [-1, 2]}, "held", "x"), UNREAD),
    ("samples of petabytes", entry({"shape": [2, 1 << 47]}, "held", "x"), "expected"),
    ("another number of samples", entry({"shape": [3, 2]}, "held", "x"), "expected"),
    ("a name that is a number", entry({"name": 7}, "held", "x"), "^read$"),
    ("a scale that is not finite", entry({"scale": float("nan")}, "held"), UNREAD),
    ("a chunk of 0", entry({"chunk": 0}, "held"), UNREAD),
    ("no places", entry({"place": None}), "^read$"),
    ("places of another file", entry({"place": ["../../outside/secret", 0, 8]}), UNREAD),
    ("places below 0", entry({"place": [0, -8, 8]}), UNREAD),
    ("places of exabytes", entry({"place": [0, 0, 1 << 62]}), "^read$"),
    ("places of another worker", entry({"place": [7, 0, 8]}), "^read$"),
    ("places of an odd number", entry({"place": [0, 0, 7]}), "expected"),
    ("places that are cut", saved_run(lambda f: f, lambda data: data[:9]), "^read$"),
    ("places that are all 77", saved_run(lambda f: f, lambda data: b"M" * len(data)), "expected"),
    ("places below 0", saved_run(lambda f: f, lambda data: b"\xff" * len(data)), "expected"),
    ("places that are 0", saved_run(lambda f: f, lambda data: bytes(len(data))), "expected"),
]


# Parquet ---------------------------------------------------------------------------------------


def parquet(change: Callable[[Any, Path], Any], names: str = "::a,b,y", **how: Any) -> Any:
    """Return what writes a good table, which `change` makes another."""

    def write(folder: Path, outside: Path) -> str:
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table({"a": X[:, 0], "b": X[:, 1], "y": Y})
        parquet.write_table(change(table, outside), folder / "data.parquet", **how)
        return f"{folder}/data.parquet{names}"

    return write


def column(name: str, make: Callable[[Any], Any]) -> Callable[[Any, Path], Any]:
    def change(table: Any, _: Path) -> Any:
        import pyarrow as pa

        return table.set_column(table.column_names.index(name), name, make(pa))

    return change


def values(name: str, data: Any) -> Callable[[Any, Path], Any]:
    return column(name, lambda pa: pa.array(data))


def cut_footer(folder: Path, outside: Path) -> str:
    path = Path(parquet(lambda table, _: table, "")(folder, outside))
    data = path.read_bytes()
    path.write_bytes(data[:-8] + struct.pack("<I", 0xFFFFFFF) + data[-4:])
    return f"{path}::a,b,y"


PARQUETS: list[Case] = [
    ("as it should be", parquet(lambda table, _: table), "^read$"),
    ("an end of 256 MB", cut_footer, NOT_READ),
    ("truths", parquet(values("y", Y.astype(bool))), "^read$"),
    ("times", parquet(column("a", lambda pa: pa.array(Y, pa.timestamp("s")))), "holds"),
    ("lists beside columns", parquet(values("a", [[1.0]] * 8)), "lists"),
    ("lists of lists", parquet(values("a", [[[1.0]]] * 8), "::a,y"), "holds"),
    ("empty lists", parquet(values("a", [[1.0][:0]] * 8), "::a,y"), "expected"),
    ("names that are paths", parquet(lambda table, _: table, "::/etc/passwd,y"), "is missing"),
    (
        "text by name alone",
        lambda f, _: written(f / "data.parquet", b"PAR1 PAR1") + "::a,y",
        NOT_READ,
    ),
]


# All of them -----------------------------------------------------------------------------------

FORMATS: dict[str, tuple[list[Case], Callable[[str], str]]] = {
    "h5py": (HDF5, read), "PIL": (FOLDERS, read), "tarfile": (TARS, read), "pyarrow": (CSVS, read),
    "pyarrow.parquet": (PARQUETS, read), "numpy": (NUMPY, read), "gzip": (SVMS, read),
    "struct": (IDXS, read), "json": (INDEXES, resumed),
}  # fmt: skip


@pytest.mark.parametrize("module", FORMATS)
def test_hostile_files(module: str, tmp_path: Path, outside: Outside) -> None:
    pytest.importorskip(module)
    cases, reads = FORMATS[module]
    attack(cases, tmp_path, outside, reads)
    assert not Path("/tmp/mpips-was-here").exists()
