"""Datasets of many files: one table of all of them, and what is wrong in one of them."""

import dataclasses
import functools
import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from operator import getitem
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_arrays import write_idx
from test_datasets import config, everything, opened, refused, write_h5, write_npz

from mpips.datasets import Files, count_file, describe, find_many, index, labels, many, open_parts
from mpips.datasets.index import Counted
from mpips.datasets.many import ManyTable
from mpips.errors import UserError

SIZES = (7, 1, 30, 12, 5)
Pair = tuple[np.ndarray, np.ndarray]


def values() -> Pair:
    rng = np.random.default_rng(0)
    return rng.normal(size=(sum(SIZES), 3)).astype("f4"), np.arange(sum(SIZES)) % 4


def parts() -> list[Pair]:
    edges, (x, y) = np.cumsum(SIZES)[:-1], values()
    return list(zip(np.split(x, edges), np.split(y, edges), strict=True))


def write_many(folder: Path, kind: str) -> str:
    """Write the samples of `values` into files of one kind; returns what names them."""
    for k, (x, y) in enumerate(parts()):
        if kind in ("h5", "npz"):
            {"h5": write_h5, "npz": write_npz}[kind](folder / f"{k}.{kind}", x, y)
        elif kind == "npy":
            np.save(folder / f"x-{k}.npy", x)
            np.save(folder / f"y-{k}.npy", y)
        elif kind == "idx":
            write_idx(folder / f"{k}-images", x)
            write_idx(folder / f"{k}-labels", y.astype("u1"))
        else:
            rows = zip(y, x[:, : 1 + k % 3], strict=True)  # files of one to three features
            text = [" ".join([str(a), *(f"{i + 1}:{v}" for i, v in enumerate(b))]) for a, b in rows]
            (folder / f"{k}.svm").write_text("\n".join(text) + "\n")
    pattern = {"npy": "x-*.npy,{}/y-*.npy", "idx": "*-images,{}/*-labels"}.get(kind, f"*.{kind}")
    return f"{folder}/{pattern.format(folder)}"


@pytest.mark.parametrize("kind", ["h5", "npz", "npy", "idx", "svm"])
def test_samples_stand_one_behind_the_other(tmp_path: Path, kind: str) -> None:
    x, y = values()
    for k, end in enumerate(np.cumsum(SIZES)) if kind == "svm" else ():
        x[end - SIZES[k] : end, 1 + k % 3 :] = 0
    with opened(write_many(tmp_path, kind), test_fraction=0) as data:
        got_x, got_y = everything(data.train)
        np.testing.assert_array_equal(got_x, x)
        np.testing.assert_array_equal(got_y, y)
        table, rows = data.train.table, np.array([54, 0, 7, 8, 7, 37, 20])
        assert data.train.in_memory == (kind != "h5")
        for k, found in enumerate(table.gather(rows) if kind != "h5" else ()):
            np.testing.assert_array_equal(found, (x, y)[k][rows])
        places = [table.where(row)[1] for row in (0, 6, 7, 8, 37, 38, 54)]
        assert places == [0, 6, 0, 0, 29, 0, 4]
        name = {"npy": "x-2.npy", "idx": "2-images"}.get(kind, f"2.{kind}")
        assert Path(table.where(8)[0].partition(",")[0]).name == name


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    write_many(tmp_path, "h5")
    x, _ = values()
    with opened(f"{tmp_path}/4.h5,{tmp_path}/[01].h5::x,y", test_fraction=0) as data:
        np.testing.assert_array_equal(everything(data.train)[0], np.concatenate([x[50:], x[:8]]))
        assert data.info.name == "4.h5 and 2 more files"


def test_threads_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that reads ahead, and the one that evaluates, with fewer files open than they use."""
    monkeypatch.setattr(many, "OPEN_FILES", 2)
    (x, _), wrong = values(), []
    with opened(write_many(tmp_path, "h5"), test_fraction=0) as data:

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
    for first, chunk in ((8, 4), (9, 1)):
        for name, size in (("a", first), ("b", 12), ("c", 6)):
            write_h5(tmp_path / f"{name}.h5", np.ones((size, 2)), np.ones(size), chunks=(4, 2))
        with opened(f"{tmp_path}/*.h5", test_fraction=0) as data:
            assert data.train.table.chunk == chunk


# What is wrong, and where.


def test_names_that_are_refused(tmp_path: Path) -> None:
    write_many(tmp_path, "h5")
    write_many(tmp_path, "npy")
    for names, told in (
        ("{}/trian-*.h5::x,y", "trian-\\*.h5' matches no file in {}, expected at least one"),
        ("{}/trian-*.h5::x,y", "it has 0.h5, 1.h5, 2.h5 and "),
        ("{}/absent/*.h5", "check the folder"),
        ("{}/*.h5,{}/3.h5", "names {}/3.h5 twice"),
        ("{}/*", "names {}/x-0.npy beside {}/0.h5"),
        ("{}/x-*.npy,{}/y-[0-3].npy", "matches 5 files and .*y-.*.npy' 4, expected as many of ea"),
        ("{}/x-*.npy,{}/y-*.npy,{}/x-*.npy", "of 3 parts"),
    ):
        here = str(tmp_path)
        assert re.search(told.replace("{}", here), refused(names.replace("{}", here)))


def spoil(folder: Path, how: str) -> None:
    """Spoil the file ``3.h5``."""
    path, (x, y) = folder / "3.h5", parts()[3]
    if how == "truncated":
        os.truncate(path, path.stat().st_size - 40)
        return
    y[4] = -3 if how == "label" else y[4]
    x = np.ones((12, 4), "f4") if how == "shape" else x
    kinds = "f8" if how == "type" else "f4", "f4" if how == "targets" else "i8"
    scale = 0.5 if how == "scale" else None
    write_h5(path, x.astype(kinds[0]), y.astype(kinds[1]), scale=scale)


SPOILED = {
    "label": "array 'y', sample 4 has label -3, expected class numbers from 0",
    "shape": r"samples of shape \(4,\), float32, expected samples of shape \(3,\), f",
    "type": r"array 'x' has samples of shape \(3,\), float64, expected samples of shape",
    "targets": r"array 'y' has samples of shape \(\), float32, expected samples of shape",
    "scale": "inputs of scale 0.5, expected 1, as in",
    "truncated": r"cannot be read \(Unable to",
}


@pytest.mark.parametrize("how", SPOILED)
def test_one_bad_file_is_named_at_the_start(tmp_path: Path, how: str) -> None:
    name = write_many(tmp_path, "h5")
    spoil(tmp_path, how)
    assert re.search(f"{tmp_path}/3.h5.*{SPOILED[how]}", refused(name))


def test_a_file_that_changes_while_the_job_runs(tmp_path: Path) -> None:
    for change, told in (
        (spoil, r"array 'y' is of shape \(12,\), float32, expected \(12,\), int64, as it was"),
        (lambda folder, _: (folder / "3.h5").unlink(), "data file .*3.h5 does not exist"),
    ):
        with opened(write_many(tmp_path, "h5")) as data:
            data.close()  # a job has others open
            change(tmp_path, "targets")
            with pytest.raises(UserError, match=told):
                everything(data.train)


def test_samples_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """Damage amid a file is seen when it is read, by the filter that a chunk went through."""
    name = write_many(tmp_path, "h5")
    path = write_h5(tmp_path / "3.h5", *parts()[3], chunks=(4, 3), compression="gzip")
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(1).byte_offset
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 8)
    told = rf"{tmp_path}/3.h5: /x, samples 4 to 5 cannot be read \(.*\), expected a whole HDF5 file"
    with opened(name, test_fraction=0) as data, pytest.raises(UserError, match=told):
        data.train.table.read(42, 44)


def test_of_very_many_targets_a_part_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "MOST_LOOKED", 320)
    monkeypatch.setattr(labels, "STRETCH", 8)
    y = np.arange(4000) % 5
    y[3] = 5  # in the first stretch
    y[20] = 6  # between two of them, and one more than the last class
    for k, part in enumerate(np.split(y, 4)):
        write_h5(tmp_path / f"{k}.h5", np.ones((1000, 2)), part)
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


def test_a_part_of_whole_numbers_may_have_others_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "MOST_LOOKED", 320)
    monkeypatch.setattr(labels, "STRETCH", 8)
    y = np.arange(4000.0) % 5
    y[80] = 0.5  # in a stretch of 3,200 targets, and in none of 4,000
    with opened(write_h5(tmp_path / "0.h5", np.ones((4000, 2)), y), test_fraction=0.2) as data:
        assert (data.info.classes, data.info.countable) == (None, 5)


# The index.


def indexed(name: str) -> tuple[Files, list[index.Entry]]:
    files = find_many(config(name))["dataset"]
    return files, [count_file(files, path) for path in files.paths]


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    files, entries = indexed(write_many(tmp_path, "h5"))
    path = tmp_path / "data.json"
    assert index.load(path) == {}
    path.write_text(index.to_text({"dataset": entries}))
    assert index.load(path) == {"dataset": entries}
    again = [index.recognise(e, p, path) for e, p in zip(entries, files.paths, strict=True)]
    assert again == entries
    parts = open_parts(config(files.name), {"dataset": Counted(files, again)})
    assert describe(config(files.name), parts).n_train == 44
    parts.close()


DAMAGE: list[tuple[dict[str, Any], tuple[str | int, ...]]] = [  # fields, and where they are put
    ({"stamps": []}, ()),
    ({"size": "x"}, ("stamps", 0)),
    ({"time_s": 1 << 70}, ("stamps", 0)),
    ({"dtype": "O"}, ("held", "x")),
    ({"shape": [-1, 2]}, ("held", "x")),
    ({"scale": float("nan")}, ("held",)),
    ({"chunk": 0}, ("held",)),
    ({"place": ["../../elsewhere", 0, 8]}, ()),
    ({"place": [0, -8, 8]}, ()),
]


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    _, entries = indexed(write_many(tmp_path, "h5"))
    path, texts = tmp_path / "data.json", ["[" * 100_000 + "]" * 100_000, "[]", "no JSON"]
    path.write_text(index.to_text({"dataset": entries}))
    for fields, place in DAMAGE:
        found = json.loads(path.read_text())
        functools.reduce(getitem, place, found["files"]["dataset"][1]).update(fields)
        texts.append(json.dumps(found))
    for text in texts:
        path.write_text(text)
        with pytest.raises(UserError, match=r"data\.json cannot be read .*: the files are counted"):
            index.load(path)
    two = dataclasses.replace(entries[0], stamps=entries[0].stamps * 2)
    with pytest.raises(UserError, match=r"data\.json has 2 stamps of .*0\.h5, expected 1"):
        index.recognise(two, two.path, path)


def test_a_file_may_move_from_a_folder_with_a_comma_in_its_name(tmp_path: Path) -> None:
    old, new = tmp_path / "old,1", tmp_path / "new,2"
    old.mkdir()
    (old / "0.svm").write_text("0 1:1\n1 2:1\n")
    _, kept = indexed(f"{old}/0.svm::sparse")
    old.rename(new)
    now, _ = indexed(f"{new}/0.svm::sparse")
    index.check_names(kept, now, tmp_path / "data.json")
    assert index.recognise(kept[0], now.paths[0], tmp_path / "data.json").path == now.paths[0]


def changed(path: Path, data: bytes) -> None:
    """Write a file, and leave its time as it was."""
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], Any]] = {  # what is said of a change of 2.h5
    r"2\.h5 .*: [\d,]+ bytes, expected [\d,]+ bytes; put it back":
        lambda path: changed(path, path.read_bytes() + b"\0"),
    r"2\.h5 is not what .*: changed 2001-.*, expected one of 20.*; put it back":
        lambda path: os.utime(path, (10**9, 10**9)),
    r"2\.h5 .*: others, expected the same first bytes; .* or remove .*data\.json":
        lambda path: changed(path, path.read_bytes()[:500] + b"!" + path.read_bytes()[501:]),
    r"data file .*2\.h5 does not exist": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("told", CHANGES)
def test_files_that_have_changed(tmp_path: Path, told: str) -> None:
    _, entries = indexed(write_many(tmp_path, "h5"))
    CHANGES[told](tmp_path / "2.h5")
    with pytest.raises(UserError, match=told):
        index.recognise(entries[2], entries[2].path, tmp_path / "data.json")


def test_files_that_come_and_go(tmp_path: Path) -> None:
    name = write_many(tmp_path, "h5")
    _, entries = indexed(name)
    for change, told in (
        (lambda path: write_h5(path, *values()), "6 files with 9.h5, which is new, expected the 5"),
        (Path.unlink, ""),
        (lambda path: path.with_name("2.h5").unlink(), "4 files with no 2.h5, expected the 5 of"),
    ):
        change(tmp_path / "9.h5")
        now = find_many(config(name))["dataset"]
        with pytest.raises(UserError, match=told) if told else nullcontext():
            index.check_names(entries, now, tmp_path / "data.json")
