"""Tar files of samples: what is read of them, and what is refused."""

import functools
import io
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import Case, Outside, attack, outside
from test_arrays import PICKLE, npy, npy_header
from test_datasets import X, config, everything, fails, opened, refused, told
from test_images import POSTSCRIPT, encoded, pixels

from mpips.datasets import Counted, count_file, find_many, index, open_parts, tar
from mpips.errors import UserError

__all__ = ["outside"]

SIZES = (5, 1, 9)
Member = tuple[str, bytes | dict[str, Any]]  # a name; the content, or fields of one without
TWO: list[Member] = [
    ("0.npy", npy(X[0])), ("0.cls", b"0"), ("1.npy", npy(X[1])), ("1.cls", b"1"),
]  # fmt: skip


def write_tar(path: Path, members: list[Member]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info, fields = tarfile.TarInfo(name), data if isinstance(data, dict) else {}
            for field, value in fields.items():
                setattr(info, field, value)
            content = b"" if isinstance(data, dict) else data
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def sample(k: int) -> list[Member]:
    name = f"train/{k:04d}"
    return [
        (f"{name}.png", encoded(pixels(k % 3, k))),
        (f"{name}.json", b"{}"),
        (f"{name}.cls", f"{k % 3}\n".encode()),
    ]


def shards(folder: Path, make: Callable[[int], list[Member]] = sample) -> str:
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


def test_arrays_are_inputs_and_targets(tmp_path: Path) -> None:
    expected = np.random.default_rng(0).normal(size=(15, 2, 3)).astype("f4")

    def make(k: int) -> list[Member]:
        return [(f"{k}.x.npy", npy(expected[k])), (f"{k}.y.npy", npy(np.float64(k)))]

    with opened(f"{shards(tmp_path, make)}::x.npy,y.npy", test_fraction=0) as data:
        assert (data.info.x_shape, data.info.classes) == ((2, 3), None)
        x, y = everything(data.train, "float64")
        np.testing.assert_array_equal(y, np.arange(15))
        np.testing.assert_array_equal(x, expected)


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    name, path, words = shards(tmp_path), tmp_path / "2.tar", "expected a whole uncompressed tar"
    with tarfile.open(path) as file:
        last = file.getmembers()[-1].offset_data
    whole = path.read_bytes()
    for cut in (40, last + 1, last + 512):  # in a header, in a member, and at the end
        path.write_bytes(whole[:cut])
        assert f"{path} cannot be read" in (text := refused(name))
        assert words in text
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as file:
        file.add(__file__, "1.png")
    assert words in refused(tmp_path / "c.tar.gz")
    assert "it has no members" in refused(write_tar(tmp_path / "d.tar", []))
    path.write_bytes(whole + whole)  # of which tarfile reads the first alone
    assert "no member at byte" in refused(name)
    path.write_bytes(whole)
    for names in ("png", "png,", "png,cls,64", "a,b,c,d"):
        assert str(tmp_path) in refused(f"{name}::{names}")


GOOD = encoded(pixels(0, 0))
ODD = {
    "shape": (GOOD, encoded(pixels(0, 0, (5, 5, 3))), "an image of 5x5x3, expected 4x6x3"),
    "truncated": (GOOD, GOOD[:60], r"cannot be read \(.*\), expected a whole image file"),
    "array": (npy(np.zeros(3)), npy(np.zeros(4)), r"an array of shape \(4,\), float64, expected"),
    "kind": (npy(np.zeros(3)), GOOD, r"cannot be read \(.*\), expected a whole \.npy file"),
    "depth": (GOOD, encoded(np.full((4, 6), 999, "u2")), "an image of mode I;16, expected 8 bits"),
}


@pytest.mark.parametrize("how", ODD)
def test_another_shape_or_kind_is_named_when_it_is_read(tmp_path: Path, how: str) -> None:
    first, odd, words = ODD[how]

    def make(k: int) -> list[Member]:
        name = f"{k}.{'npy' if how in ('array', 'kind') else 'png'}"
        return [(name, odd if k == 8 else first), (f"{k}.cls", b"%d" % (k % 2))]

    fit = "::png,cls,4x6x1" if how == "depth" else ""
    fails(shards(tmp_path, make) + fit, rf"{tmp_path}/2\.tar, sample 2:? {words}")


def test_places_are_kept_beside_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is gone through once; without its places, which may be lost, once more."""
    files = find_many(config(shards(tmp_path)))["dataset"]
    counted = [count_file(files, path) for path in files.paths]
    path, gone_through, entries = tmp_path / "data.json", list[str](), [*counted]
    for worker in range(2):
        part = counted[worker::2]
        entries[worker::2] = index.save_places(path, "dataset", worker=worker, entries=part)
    path.write_text(index.to_text({"dataset": entries}))
    assert '"places": null' in path.read_text()
    kept = index.load(path)["dataset"]
    assert kept == entries

    def spy(path: str, wanted: tar.MemberNames) -> np.ndarray:
        gone_through.append(Path(path).name)
        return scan(path, wanted)

    def read() -> None:
        again = Counted(files, kept, functools.partial(index.load_places, path, "dataset"))
        with closing(open_parts(config(files.name), {"dataset": again})) as parts:
            x, y = parts.train.read(0, 15)
        np.testing.assert_array_equal(y, np.arange(15) % 3)
        np.testing.assert_array_equal(x[:, 0, 0, 1], np.arange(15))

    scan = tar.scan
    monkeypatch.setattr(tar, "scan", spy)
    read()
    assert gone_through == []
    places = tmp_path / "dataset.places.1"
    whole = places.read_bytes()
    for damaged in (b"M" * len(whole), b"\xff" * len(whole), bytes(len(whole))):
        places.write_bytes(damaged)
        with pytest.raises(UserError, match="expected"):
            read()
    assert gone_through == []
    places.write_bytes(whole[:9])
    read()
    assert gone_through == ["1.tar"]


# Hostile ones


def packed(members: Callable[[Path], list[Member]], names: str = "") -> Any:
    """Return what writes a good sample and these members."""

    def write(folder: Path, outside: Path) -> str:
        return f"{write_tar(folder / 'data.tar', [*TWO[:2], *members(outside)])}{names}"

    return write


def labelled(label: bytes) -> Any:
    return packed(lambda _: [("1.npy", npy(X[1])), ("1.cls", label)])


def member(data: bytes | dict[str, Any], suffix: str = "npy") -> Any:
    return packed(lambda _: [(f"1.{suffix}", data), ("1.cls", b"1")])


def patched(at: int, data: bytes, mended: bool = True) -> Callable[[Path, Path], str]:
    """Return what writes into the third member's header, whose sum is right then, if `mended`."""

    def write(folder: Path, outside: Path) -> str:
        path = Path(labelled(b"1")(folder, outside))
        whole = bytearray(path.read_bytes())
        begin = whole.index(b"1.npy")
        whole[begin + at : begin + at + len(data)] = data
        if mended:
            whole[begin + 148 : begin + 156] = b" " * 8
            whole[begin + 148 : begin + 156] = b"%06o\0 " % sum(whole[begin : begin + 512])
        path.write_bytes(whole)
        return str(path)

    return write


TARGET, KINDS = "has target .*, expected a whole number", "expected a member of each kind"
LACKS = r"data.tar: sample 1 \(1\) has .* and no"
LABELS: dict[bytes, str] = {
    b" 1\n": "^read", b"-1": "class|label", b"1_0": TARGET, b"9223372036854775808": TARGET,
    b"999999999999999999": "label", b"cat": TARGET, b"\xd9\xa1": TARGET, b"\xff": TARGET,
    b"1\0": TARGET, b"": TARGET, b"1" + b" " * 99 + b"2": TARGET, b"7" * 100_000: TARGET,
}  # fmt: skip
MINUS_512 = b"\xff" * 10 + b"\xfe\0"  # as a size: the next member is the same
BACK = "a size below 0|no member at byte"  # the second by Pythons that refuse it themselves
SPARSE_BACK = MINUS_512 + b"0" * 12 + b" " * 8 + b"S"
LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
TARS: list[Case] = [
    *((f"target {label[:20]!r}", labelled(label), words) for label, words in LABELS.items()),
    ("no target", packed(lambda _: TWO[2:3]), f"{LACKS} cls, {KINDS}"),
    ("no input", packed(lambda _: TWO[3:]), f"{LACKS} image or .npy, {KINDS}"),
    ("another target", packed(lambda _: [], "::npy,y"), r"sample 0 \(0\) has npy, cls and no y"),
    ("a pickle", member(PICKLE), "cannot be read"),
    ("numbers of a petabyte", member(npy_header(shape=(1 << 47,))), "expected"),
    ("PostScript", member(POSTSCRIPT, "png"), "expected|sample 1"),
    ("a symbolic link", member(LINK), LACKS),
    ("out", packed(lambda o: [(f"{o}/1.npy", npy(X[1])), (f"{o}/1.cls", b"1")]), "^read"),
    ("a sparse file", patched(156, b"S"), "sparse|cannot be read"),
    ("a size of exabytes", patched(124, b"\x80" + b"\0" * 3 + b"\x70" + b"\0" * 7), "cannot be"),
    ("a size below 0", patched(124, b"\xff" * 12), BACK),
    ("a size that leads back", patched(124, MINUS_512), BACK),
    ("a sparse file that leads back", patched(124, SPARSE_BACK), BACK),
    ("a wrong sum", patched(0, b"7", mended=False), "no member at byte"),
    ("an unknown type", patched(156, b"Z"), LACKS),
    ("more of its header", patched(156, b"x"), "expected"),
    ("names that are paths", packed(lambda _: [], "::../../etc,passwd"), "and no ../../etc"),
]


def test_hostile_tar_files(tmp_path: Path, outside: Outside) -> None:
    attack(TARS, tmp_path, outside, told)
