"""Datasets of many files: one table of all of them, and what is wrong in one of them."""

import os
import re
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_datasets import config, everything, idx_bytes, opened, refused, write_h5, write_npz

from mpips.datasets import Files, count_file, describe, find_many, index, labels, many, open_parts
from mpips.datasets.index import Counted
from mpips.datasets.many import ManyTable
from mpips.errors import UserError

SIZES = (7, 1, 30, 12, 5)


def values(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(sum(SIZES), 3)).astype("f4"), np.arange(sum(SIZES)) % 4


def parts(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    edges = np.cumsum(SIZES)[:-1]
    return list(zip(np.split(x, edges), np.split(y, edges), strict=True))


def write_many(folder: Path, kind: str) -> str:
    """Write the samples of `values` into files of one kind; returns what names them."""
    for k, (x, y) in enumerate(parts(*values())):
        if kind == "h5":
            write_h5(folder / f"{k}.h5", x, y)
        elif kind == "npz":
            write_npz(folder / f"{k}.npz", x, y)
        elif kind == "npy":
            np.save(folder / f"x-{k}.npy", x)
            np.save(folder / f"y-{k}.npy", y)
        elif kind == "idx":
            (folder / f"{k}-images").write_bytes(idx_bytes(x))
            (folder / f"{k}-labels").write_bytes(idx_bytes(y.astype("u1")))
        else:
            rows = zip(y, x[:, : 1 + k % 3], strict=True)  # files of one to three features
            text = [" ".join([str(a), *(f"{i + 1}:{v}" for i, v in enumerate(b))]) for a, b in rows]
            (folder / f"{k}.svm").write_text("\n".join(text) + "\n")
    pattern = {"npy": "x-*.npy,{}/y-*.npy", "idx": "*-images,{}/*-labels"}.get(kind, f"*.{kind}")
    return f"{folder}/{pattern.format(folder)}"


@pytest.mark.parametrize("kind", ["h5", "npz", "npy", "idx", "svm"])
def test_samples_stand_one_behind_the_other(tmp_path: Path, kind: str) -> None:
    x, y = values()
    if kind == "svm":
        ends = np.cumsum(SIZES)
        for k, end in enumerate(ends):
            x[end - SIZES[k] : end, 1 + k % 3 :] = 0
    with opened(write_many(tmp_path, kind), test_fraction=0) as data:
        got_x, got_y = everything(data.train)
        np.testing.assert_array_equal(got_x, x)
        np.testing.assert_array_equal(got_y, y)
        assert data.train.in_memory == (kind != "h5")
        rows = np.array([54, 0, 7, 8, 7, 37, 20])
        for k, found in enumerate(data.train.table.gather(rows) if kind != "h5" else ()):
            np.testing.assert_array_equal(found, (x, y)[k][rows])
        where = [data.train.table.where(row)[1] for row in (0, 6, 7, 8, 37, 38, 54)]
        assert where == [0, 6, 0, 0, 29, 0, 4]
        path = data.train.table.where(8)[0]
        assert Path(path.partition(",")[0]).name == {"npy": "x-2.npy", "idx": "2-images"}.get(
            kind, f"2.{kind}"
        )


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    write_many(tmp_path, "h5")
    x, _ = values()
    name = f"{tmp_path}/4.h5,{tmp_path}/[01].h5::x,y"
    with opened(name, test_fraction=0) as data:
        np.testing.assert_array_equal(everything(data.train)[0], np.concatenate([x[50:], x[:8]]))
        assert data.info.name == "4.h5 and 2 more files"


def test_a_file_of_its_own_name_is_no_pattern(tmp_path: Path) -> None:
    x, y = values()
    path = write_h5(tmp_path / "a[1].h5", x, y)
    write_h5(tmp_path / "a1.h5", x[:9], y[:9])
    assert find_many(config(path)) == {}
    with opened(path, test_fraction=0) as data:
        assert data.info.n_train == len(x)


def test_a_file_may_move_from_a_folder_with_a_comma_in_its_name(tmp_path: Path) -> None:
    old, new = tmp_path / "old,1", tmp_path / "new,2"
    old.mkdir()
    (old / "0.svm").write_text("0 1:1\n1 2:1\n")

    def found(folder: Path) -> Files:
        return find_many(config(f"{folder}/0.svm::sparse"))["dataset"]

    before = found(old)
    kept = [count_file(before, path) for path in before.paths]
    old.rename(new)
    now = found(new)
    index.check_names(kept, now, tmp_path / "data.json")
    assert index.recognise(kept[0], now.paths[0], tmp_path / "data.json").path == now.paths[0]


def test_threads_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that reads ahead, and the one that evaluates, with fewer files open than they use."""
    monkeypatch.setattr(many, "OPEN_FILES", 2)
    name, (x, _), wrong = write_many(tmp_path, "h5"), values(), []
    with opened(name, test_fraction=0) as data:

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(60):
                begin, end = sorted(rng.integers(0, len(x), 2).tolist())
                if not np.array_equal(data.train.table.read(begin, end + 1)[0], x[begin : end + 1]):
                    wrong.append((begin, end))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
        assert 1 <= len([path for path in held if path.startswith(str(tmp_path))]) <= 2
    assert wrong == []


def test_chunks_count_where_every_file_holds_whole_ones(tmp_path: Path) -> None:
    for name, size in (("a", 8), ("b", 12), ("c", 6)):
        write_h5(tmp_path / f"{name}.h5", np.ones((size, 2)), np.ones(size), chunks=(4, 2))
    with opened(f"{tmp_path}/*.h5", test_fraction=0) as data:
        assert data.train.table.chunk == 4
    write_h5(tmp_path / "a.h5", np.ones((9, 2)), np.ones(9), chunks=(4, 2))
    with opened(f"{tmp_path}/*.h5", test_fraction=0) as data:
        assert data.train.table.chunk == 1


# What is wrong, and where.


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("{}/trian-*.h5::x,y", "trian-\\*.h5' matches no file in {}, expected at least one"),
        ("{}/trian-*.h5::x,y", "it has 0.h5, 1.h5, 2.h5 and "),
        ("{}/absent/*.h5", "check the folder"),
        ("{}/*.h5,{}/3.h5", "names {}/3.h5 twice"),
        ("{}/*", "names {}/x-0.npy beside {}/0.h5"),
        ("{}/x-*.npy,{}/y-[0-3].npy", "matches 5 files and .*y-.*.npy' 4, expected as many of ea"),
        ("{}/x-*.npy,{}/y-*.npy,{}/x-*.npy", "of 3 parts"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, names: str, told: str) -> None:
    write_many(tmp_path, "h5")
    write_many(tmp_path, "npy")
    assert re.search(told.replace("{}", str(tmp_path)), refused(names.replace("{}", str(tmp_path))))


@pytest.mark.parametrize(
    ("row", "value", "told"),
    [
        (4, "label", "array 'y', sample 4 has label -3, expected class numbers from 0"),
        (9, "input", r"array 'x', sample 9, element \(1,\) is inf in float32"),
        (0, "shape", r"samples of shape \(4,\), float32, expected samples of shape \(3,\), f"),
        (0, "type", r"array 'x' has samples of shape \(3,\), float64, expected samples of shape"),
        (0, "targets", r"array 'y' has samples of shape \(\), float32, expected samples of shape"),
        (0, "scale", "inputs of scale 0.5, expected 1, as in"),
        (0, "truncated", r"cannot be read \(Unable to"),
    ],
)
def test_one_bad_file_is_named(tmp_path: Path, row: int, value: str, told: str) -> None:
    """At the start; a number that is not finite when it is read, or where it is in memory."""
    name = write_many(tmp_path, "h5")
    spoil(tmp_path, value, row)
    if value != "input":
        assert re.search(f"{tmp_path}/3.h5.*{told}", refused(name))
        return
    with opened(name, test_fraction=0) as data, pytest.raises(UserError, match=told):
        everything(data.train)
    write_many(tmp_path, "npz")
    x, y = parts(*values())[3]
    x[row, 1] = np.inf
    write_npz(tmp_path / "3.npz", x, y)
    assert re.search(f"{tmp_path}/3.npz: {told}", refused(f"{tmp_path}/*.npz"))


def spoil(folder: Path, how: str, row: int = 0) -> None:
    """Spoil the file ``3.h5``."""
    path, (x, y) = folder / "3.h5", parts(*values())[3]
    if how == "truncated":
        os.truncate(path, path.stat().st_size - 40)
        return
    if how == "label":
        y[row] = -3
    elif how == "input":
        x[row, 1] = np.inf
    elif how == "shape":
        x = np.ones((12, 4), "f4")
    kinds = "f8" if how == "type" else "f4", "f4" if how == "targets" else "i8"
    scale = 0.5 if how == "scale" else None
    write_h5(path, x.astype(kinds[0]), y.astype(kinds[1]), scale=scale)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("targets", r"array 'y' is of shape \(12,\), float32, expected \(12,\), int64, as it was"),
        ("gone", "data file .*3.h5 does not exist"),
    ],
)
def test_a_file_that_changes_while_the_job_runs(tmp_path: Path, how: str, told: str) -> None:
    with opened(write_many(tmp_path, "h5")) as data:
        data.close()  # a job has others open
        (tmp_path / "3.h5").unlink() if how == "gone" else spoil(tmp_path, how)
        with pytest.raises(UserError, match=told):
            everything(data.train)


def test_samples_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """Damage amid a file is seen when it is read, by the filter that a chunk went through."""
    name = write_many(tmp_path, "h5")
    x, y = parts(*values())[3]
    path = write_h5(tmp_path / "3.h5", x, y, chunks=(4, 3), compression="gzip")
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(1).byte_offset
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 8)
    told = rf"{tmp_path}/3.h5: /x, samples 4 to 5 cannot be read \(.*\), expected a whole HDF5 file"
    with opened(name, test_fraction=0) as data, pytest.raises(UserError, match=told):
        data.train.table.read(42, 44)


# Very many targets.


def test_of_very_many_targets_a_part_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "MOST_LOOKED", 320)
    monkeypatch.setattr(labels, "STRETCH", 8)
    y = np.arange(4000) % 5
    y[3] = 5  # in the first stretch
    y[20] = 6  # between two of them, and one more than the last class
    for k in range(4):
        part = slice(1000 * k, 1000 * (k + 1))
        write_h5(tmp_path / f"{k}.h5", np.ones((1000, 2)), y[part])
    seen: list[int] = []
    read_y = ManyTable.read_y

    def spy(self: ManyTable, begin: int, end: int) -> np.ndarray:
        seen.extend(range(begin, end))
        return read_y(self, begin, end)

    monkeypatch.setattr(ManyTable, "read_y", spy)
    with opened(f"{tmp_path}/*.h5", test_fraction=0) as data:
        assert data.info.classes == 6
        assert len(seen) == 320
        assert {row // 1000 for row in seen} == {0, 1, 2, 3}
        assert "about 320 of 4,000 targets were looked at" in data.info.notes[1]
        told = r"0.h5: array 'y', sample 20 has label 6, expected whole numbers from 0 to 5"
        with pytest.raises(UserError, match=told):
            everything(data.train)
    bad = np.where(np.arange(1000) == 104, -2, y[:1000])  # in the second stretch
    write_h5(tmp_path / "0.h5", np.ones((1000, 2)), bad)
    text = refused(f"{tmp_path}/*.h5", test_fraction=0)
    assert "0.h5: array 'y', sample 104 has label -2" in text


# The index.


def indexed(folder: Path) -> tuple[Files, list[index.Entry]]:
    files = find_many(config(write_many(folder, "h5")))["dataset"]
    return files, [count_file(files, path) for path in files.paths]


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    files, entries = indexed(tmp_path)
    path = tmp_path / "data.json"
    assert index.load(path) == {}
    index.save(path, {"dataset": entries})
    assert index.load(path) == {"dataset": entries}
    again = [index.recognise(e, p, path) for e, p in zip(entries, files.paths, strict=True)]
    assert again == entries
    parts = open_parts(config(files.name), {"dataset": Counted(files, again)})
    assert describe(config(files.name), parts).n_train == 44
    parts.close()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("longer", r"2\.h5 .*: [\d,]+ bytes, expected [\d,]+ bytes; put it back"),
        ("later", r"2\.h5 is not what .*: changed 2001-.*, expected one of 20.*; put it back"),
        ("another", r"2\.h5 .*: others, expected the same first bytes; .* or remove .*data\.json"),
        ("gone", r"data file .*2\.h5 does not exist"),
        ("new", "of 6 files with 9.h5, which is new, expected the 5 of the run that is resumed"),
        ("fewer", "of 4 files with no 2.h5, expected the 5 of the run"),
    ],
)
def test_files_that_have_changed(tmp_path: Path, how: str, told: str) -> None:
    files, entries = indexed(tmp_path)
    path, index_path = tmp_path / "2.h5", tmp_path / "data.json"
    stat, data = path.stat(), path.read_bytes()
    if how in ("gone", "fewer"):
        path.unlink()
    elif how == "new":
        write_h5(tmp_path / "9.h5", *values())
    elif how == "later":
        os.utime(path, (10**9, 10**9))
    else:
        path.write_bytes(data + b"\0" if how == "longer" else data[:500] + b"!" + data[501:])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if how in ("new", "fewer"):
        now: Any = find_many(config(files.name))["dataset"]
        with pytest.raises(UserError, match=told):
            index.check_names(entries, now, index_path)
        return
    with pytest.raises(UserError, match=told):
        index.recognise(entries[2], entries[2].path, index_path)
