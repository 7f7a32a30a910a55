"""Rows of tables in a checkpoint: written by owners, read by whoever wants them."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import committed
from test_checkpoint import flip

from mpips.checkpoint import (
    TableRows,
    begin_step,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
    verify,
    write_rows,
    write_shard,
)
from mpips.checkpoint import rows as rows_module
from mpips.checkpoint.__main__ import main
from mpips.checkpoint.reader import check_tables
from mpips.errors import UserError
from mpips.layout import Layout, Shard
from mpips.layout.tables import Table
from mpips.optim.row_rules import Adagrad, Ftrl, RowRule
from mpips.planning.tables import JobTable

LAYOUT = Layout.of({"w": (13,)})
PARAMS = np.arange(13, dtype="f4")
OWNERS, STEP, DIM = 3, 5, 4
TOLD = {
    "item": {"hashed": False, "rows": 90, "dim": DIM},
    "user": {"hashed": False, "rows": 7, "dim": DIM},
}


def rows(owner: int, table: str) -> TableRows:
    """Every third row of one table, and of the other none."""
    numbers = np.arange(owner, 90 if table == "item" else 0, OWNERS)
    rng = np.random.default_rng(owner)
    steps = rng.integers(0, 9, len(numbers))
    params = rng.standard_normal((len(numbers), DIM)).astype("f4")
    return TableRows(numbers, params, {"m": -params, "steps": steps})


def columns() -> dict[str, np.ndarray]:
    """All that is saved of the table."""
    of_owners = [rows(k, "item").arrays for k in range(OWNERS)]
    return {name: np.concatenate([each[name] for each in of_owners]) for name in of_owners[0]}


def save(directory: Path) -> Path:
    folder, owners = begin_step(directory, STEP), reversed(range(OWNERS))
    lists = [write_rows(folder, k, STEP, {name: rows(k, name) for name in TOLD}) for k in owners]
    shard = write_shard(folder, 0, Shard(0, LAYOUT.size), STEP, PARAMS, {"ema": -PARAMS})
    return committed(folder, STEP, LAYOUT, [shard], slot_names=("ema",), rows=lists, tables=TOLD)


@pytest.fixture(params=[rows_module.READ_BYTES, 96])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that are read at a time."""
    monkeypatch.setattr(rows_module, "READ_BYTES", request.param)
    monkeypatch.setattr("mpips.checkpoint.files.PIECE_BYTES", request.param)
    return int(request.param)


def test_rows_are_read_as_they_were_written(piece: int, tmp_path: Path) -> None:
    found = open_checkpoint(save(tmp_path))
    assert found.tables == TOLD
    pieces = list(found.read_table("item"))
    assert len(pieces) == (OWNERS if piece > 96 else 45), "two rows of 48 bytes in a piece"
    for name, wanted in columns().items():
        got = np.concatenate([piece.arrays[name] for piece in pieces])
        np.testing.assert_array_equal(got, wanted, strict=True)
    some = list(found.read_table("item", lambda numbers: numbers % 9 == 1))  # of owner 1
    assert len(some) == (1 if piece > 96 else 10)
    for name, wanted in columns().items():
        got = np.concatenate([piece.arrays[name] for piece in some])
        np.testing.assert_array_equal(got, wanted[columns()["rows"] % 9 == 1], strict=True)
    assert not any(len(piece.rows) for piece in found.read_table("user"))
    with pytest.raises(UserError, match=r"unknown table 'itm', .*did you mean 'item'"):
        next(found.read_table("itm"))


def test_rows_are_shown_and_exported(
    piece: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the parameters and their slots, or one table by itself."""
    save(tmp_path / "checkpoints")
    wanted, parquet = columns(), pytest.importorskip("pyarrow.parquet")

    def export(name: str, *more: str) -> int:
        return main(["export", str(tmp_path), *more, "-o", str(tmp_path / name)])

    assert main(["inspect", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "tables/item: 90 rows of 4, 90 changed" in told
    assert "rows-0001.h5 rows of owner 1" in told
    for name in ("all.npz", "all.safetensors"):
        assert export(name) == 0
    assert export("mean.npz", "--ema") == 0
    for name in ("item.npz", "item.safetensors", "item.parquet"):
        assert export(name, "--table", "item") == 0, capsys.readouterr().err
    with np.load(tmp_path / "all.npz") as of_all, np.load(tmp_path / "item.npz") as found:
        names = [name for name in of_all if name.startswith("tables/item/")]
        assert names == [f"tables/item/{k}" for k in ("rows", "params", "slots/m", "slots/steps")]
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(of_all[f"tables/item/{name}"], array, strict=True)
            np.testing.assert_array_equal(found[name], array, strict=True)
    held = safetensors.numpy.load_file(tmp_path / "all.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "item.safetensors")
    of_tables = {f"tables/{t}/{c}" for t in TOLD for c in ("rows", "params")}
    assert set(held) == {"w"} | of_tables
    assert set(found) == {"rows", "params"}
    for array in (held["tables/item/params"], found["params"]):
        np.testing.assert_array_equal(array, wanted["params"], strict=True)
    lines = parquet.read_table(tmp_path / "item.parquet").to_pylist()
    assert [line["rows"] for line in lines] == wanted["rows"].tolist()
    np.testing.assert_array_equal([line["params"] for line in lines], wanted["params"])
    with np.load(tmp_path / "mean.npz") as found:
        assert set(found) == {"params/w"} | of_tables
        np.testing.assert_array_equal(found["params/w"], -PARAMS)
        np.testing.assert_array_equal(found["tables/item/params"], wanted["params"], strict=True)
    for name in ("user.npz", "user.parquet"):
        assert export(name, "--table", "user") == 0
    with np.load(tmp_path / "user.npz") as found:
        assert found["params"].shape == (0, DIM)
    capsys.readouterr()
    assert export("itm.npz", "--table", "itm") == export("item.csv", "--table", "item") == 2
    told = capsys.readouterr().err
    assert "unknown table 'itm'" in told
    assert export("item-mean.npz", "--table", "item", "--ema") == 2
    assert "average of table 'item', expected none: it has" in capsys.readouterr().err
    assert "expected a name that ends in .npz, .safetensors, .parquet" in told
    assert not (tmp_path / "item.csv").exists()


@pytest.mark.parametrize("more", [-1, 1])
def test_columns_of_other_lengths_are_damaged(more: int, tmp_path: Path) -> None:
    found = open_checkpoint(save(tmp_path))
    with h5py.File(found.path / "rows-0000.h5", "r+") as file:
        group = file["tables/item"]
        params = np.resize(group["params"][:], (len(group["rows"]) + more, 4))
        del group["params"]
        group["params"] = params
    with pytest.raises(UserError, match=r"params of table item of length \d+, expected 90"):
        list(found.columns("item")["params"].buffers())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"rows": 91}, None),
        ({"rows": 89}, "table 'item' of rows 89 on resume, expected at least 90, as in"),
        ({"dim": 5}, "table 'item' of dim 5 on resume, expected 4, as in"),
        ({"hashed": True}, "table 'item' of hashed True on resume, expected False, as in"),
        ({"hashed": True, "rows": 91}, "table 'item' of hashed True on resume, expected False"),
    ],
)
def test_tables_on_resume(change: dict[str, Any], told: str | None) -> None:
    wanted = TOLD | {"item": TOLD["item"] | change}
    with nullcontext() if told is None else pytest.raises(UserError, match=told):
        check_tables(Path("there"), TOLD, wanted)
    item = {"item": TOLD["item"]}
    for sides, kind in (((TOLD, item), "of the checkpoint there"), ((item, TOLD), "of the run")):
        with pytest.raises(UserError, match=f"table 'user' {kind}, and not of the"):
            check_tables(Path("there"), *sides)


def test_slots_of_ftrl_belong_to_its_numbers() -> None:
    """Of other rules rows go on with others."""

    def told(rule: RowRule) -> dict[str, dict[str, object]]:
        table = JobTable("item", Table(90, DIM), rule, 0, 1, lambda version: 1.0)
        return {"item": table.description}

    check_tables(Path("there"), told(Ftrl()), told(Ftrl(0.1)))
    check_tables(Path("there"), told(Adagrad(0.1)), told(Adagrad(0.2)))
    for other, was in ((Ftrl(0.2), "lr 0.2 on resume, expected 0.1"), (Ftrl(l1=1.0), "l1 1.0 on")):
        with pytest.raises(UserError, match=f"table 'item' of {was}"):
            check_tables(Path("there"), told(Ftrl()), told(other))


# Chains: rows that add to those of the checkpoint before ------------------------------------


def some_rows(numbers: Any, value: float) -> TableRows:
    numbers = np.asarray(numbers, np.int64)
    params = np.full((len(numbers), DIM), value, "f4")
    return TableRows(numbers, params, {"m": -params})


def link(
    directory: Path, step: int, rows_of: dict[int, TableRows], bases: dict[int, int | None],
    keep: int = 1,
) -> Path:  # fmt: skip
    """Save the rows of two owners, each of which may add to a checkpoint before."""
    folder = begin_step(directory, step)
    lists = [write_rows(folder, k, step, {"item": some}, bases[k]) for k, some in rows_of.items()]
    told = {"item": TOLD["item"]}
    return committed(folder, step, LAYOUT, keep=keep, rows=lists, tables=told)


def chain(directory: Path) -> list[Path]:
    """Four checkpoints: all rows, two that add to them, and one in which an owner has all again."""
    none = {0: None, 1: None}
    return [
        link(directory, 1, {0: some_rows([0, 2, 4], 1), 1: some_rows([1, 3], 1)}, none),
        link(directory, 2, {0: some_rows([2, 6], 2), 1: some_rows([], 2)}, {0: 1, 1: 1}),
        link(directory, 3, {0: some_rows([4, 2], 3), 1: some_rows([5], 3)}, {0: 2, 1: 2}),
        link(directory, 4, {0: some_rows([0, 2, 4, 6], 4), 1: some_rows([3], 4)}, {0: None, 1: 3}),
    ]


VALUES = {
    1: {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, 2: {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 6: 2},
    3: {0: 1, 1: 1, 2: 3, 3: 1, 4: 3, 5: 3, 6: 2}, 4: {0: 4, 1: 1, 2: 4, 3: 4, 4: 4, 5: 3, 6: 4},
}  # fmt: skip


@pytest.mark.usefixtures("piece")
def test_a_chain_has_each_row_once_as_it_was_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in chain(tmp_path):
        found = open_checkpoint(folder)
        assert not verify(folder)
        numbers = found.columns("item")["rows"].whole()
        pieces = list(found.read_table("item"))
        np.testing.assert_array_equal(np.concatenate([each.rows for each in pieces]), numbers)
        params = np.concatenate([each.params for each in pieces])
        expected = VALUES[found.step]
        assert sorted(numbers.tolist()) == sorted(expected)
        assert {n: p[0] for n, p in zip(numbers.tolist(), params, strict=True)} == expected
        even = [n for each in found.read_table("item", lambda n: n % 2 == 0) for n in each.rows]
        assert sorted(even) == [n for n in sorted(expected) if n % 2 == 0]
        np.testing.assert_array_equal(found.columns("item")["slots/m"].whole(), -params)
        np.testing.assert_array_equal(np.concatenate([each.slots["m"] for each in pieces]), -params)
    assert main(["inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "90 rows of 4, 7 changed" in told
    assert "rows-0001.h5 rows of owner 1, since step 3 " in told
    assert "rows-0000.h5 rows of owner 0 " in told
    main(["export", str(tmp_path), "-o", str(tmp_path / "all.npz")])
    with np.load(tmp_path / "all.npz") as arrays:
        np.testing.assert_array_equal(arrays["tables/item/rows"], numbers)
        np.testing.assert_array_equal(arrays["tables/item/params"], params)


def test_links_stay_as_long_as_a_newer_checkpoint_adds_to_them(tmp_path: Path) -> None:
    folders = chain(tmp_path)  # each kept one checkpoint
    assert list_checkpoints(tmp_path) == folders
    link(tmp_path, 5, {0: some_rows([1], 5), 1: some_rows([2], 5)}, {0: None, 1: None}, keep=2)
    assert len(list_checkpoints(tmp_path)) == 5, "the fourth stays, with all that it needs"
    newest = link(tmp_path, 6, {0: some_rows([], 6), 1: some_rows([], 6)}, {0: 5, 1: 5})
    assert [folder.name[-1] for folder in list_checkpoints(tmp_path)] == ["5", "6"]
    assert not verify(newest)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda second: (second / "index.h5").unlink(), "that is missing: with it"),
        (lambda second: (second / "rows-0001.h5").unlink(), r".*rows-0001.h5: missing"),
        (lambda second: flip(second / "rows-0001.h5", -1), r".*rows-0001.h5: sha256"),
        (
            lambda second: link(
                second.parent, 2, {0: some_rows([2], 2), 1: some_rows([1], 2)}, {0: 1, 1: 1}
            ),
            "it is another checkpoint",
        ),
    ],
)
def test_a_link_that_is_not_as_it_was_is_named(
    harm: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    first, second, third, newest = chain(tmp_path)
    harm(second)
    told = f"rows add to those of .*step-000000000002, and {told}"
    for folder in (third, newest):
        (problem,) = verify(folder)
        assert str(folder) in problem
        assert re.search(told, problem), problem
    if "sha256" not in told:
        with pytest.raises(UserError, match=told):
            open_checkpoint(newest)
    whole = second if "another" in told else first
    found, complaints = newest_whole(tmp_path)
    assert found.path == whole
    assert len(complaints) >= 2
    assert not verify(whole)


def test_rows_add_to_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    rows_of = {0: some_rows([1], 1)}
    with pytest.raises(UserError, match=r"step-000000000004.*index.h5: cannot be read"):
        link(tmp_path, 5, rows_of, {0: 4})
    assert newest_whole(tmp_path)[0] is None
    with pytest.raises(ValueError, match="rows that add to those of steps"):
        link(tmp_path, 6, {**rows_of, 1: some_rows([2], 1)}, {0: 4, 1: 3})
