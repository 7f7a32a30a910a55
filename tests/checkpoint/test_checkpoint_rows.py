"""Rows of tables in a checkpoint: written by owners, read by whoever wants them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mpips.checkpoint import (
    TableRows,
    begin_step,
    commit,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
    verify,
    write_rows,
    write_shard,
)
from mpips.checkpoint import rows as rows_module
from mpips.checkpoint.__main__ import main
from mpips.checkpoint.fits import check_tables
from mpips.errors import UserError
from mpips.layout import Layout, cut

LAYOUT = Layout.of({"w": (13,)})
OWNERS, STEP, DIM = 3, 5, 4
TOLD = {"item": {"rows": 90, "dim": DIM}, "user": {"rows": 7, "dim": DIM}}


def rows(owner: int, table: str) -> TableRows:
    """Every third row of one table, and of the other none."""
    numbers = np.arange(owner, 90 if table == "item" else 0, OWNERS)
    rng = np.random.default_rng(owner)
    steps = rng.integers(0, 9, len(numbers))
    params = rng.standard_normal((len(numbers), DIM)).astype("f4")
    return TableRows(numbers, params, {"m": -params, "steps": steps})


def save(directory: Path, step: int = STEP, keep: int = 2) -> Path:
    folder = begin_step(directory, step)
    params = np.arange(LAYOUT.size, dtype="f4")
    shards = [
        write_shard(folder, k, s, step, params[s.range], {})
        for k, s in enumerate(cut(LAYOUT.size, OWNERS, 4))
    ]
    lists = [
        write_rows(folder, k, step, {name: rows(k, name) for name in TOLD})
        for k in reversed(range(OWNERS))
    ]
    commit(
        folder, step=step, layout=LAYOUT, dtype="f4", shards=shards, slots=(), config="",
        state={}, arrays={}, keep=keep, rows=lists, tables=TOLD,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("piece", [rows_module.PIECE_BYTES, 40])
def test_rows_are_read_as_they_were_written(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpips.checkpoint.files.PIECE_BYTES", piece)
    found = open_checkpoint(save(tmp_path))
    assert found.tables == TOLD
    pieces = list(found.read_table("item"))
    assert len(pieces) == (OWNERS if piece > 40 else 45)
    for name in ("rows", "params", "slots/m", "slots/steps"):
        got = np.concatenate([piece.arrays[name] for piece in pieces])
        wanted = np.concatenate([rows(k, "item").arrays[name] for k in range(OWNERS)])
        np.testing.assert_array_equal(got, wanted, strict=True)
    assert not any(len(piece.rows) for piece in found.read_table("user"))
    with pytest.raises(UserError, match=r"unknown table 'itm', .*did you mean 'item'"):
        next(found.read_table("itm"))


def test_rows_are_shown_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "tables/item: 90 rows of 4, 90 changed" in told
    assert "rows-0001.h5 rows of owner 1" in told
    main(["export", str(tmp_path), "-o", str(tmp_path / "all.npz")])
    main(["export", str(tmp_path), "-o", str(tmp_path / "all.safetensors")])
    with np.load(tmp_path / "all.npz") as found:
        names = [name for name in found.files if name.startswith("tables/item/")]
        assert names == [f"tables/item/{k}" for k in ("rows", "params", "slots/m", "slots/steps")]
        for name in names:
            column = name.removeprefix("tables/item/")
            wanted = np.concatenate([rows(k, "item").arrays[column] for k in range(OWNERS)])
            np.testing.assert_array_equal(found[name], wanted, strict=True)
        held = safetensors.numpy.load_file(tmp_path / "all.safetensors")
        assert set(held) == {"w", *(f"tables/{t}/{c}" for t in TOLD for c in ("rows", "params"))}
        np.testing.assert_array_equal(held["tables/item/params"], found["tables/item/params"])


def test_what_is_damaged_or_missing_is_found(tmp_path: Path) -> None:
    whole, damaged = save(tmp_path), save(tmp_path, STEP + 1)
    assert not verify(damaged)
    path = damaged / "rows-0001.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert ["rows-0001.h5" in text for text in verify(damaged)] == [True]
    path.unlink()
    assert ["rows-0001.h5: missing" in text for text in verify(damaged)] == [True]
    found, complaints = newest_whole(tmp_path)
    assert found is not None
    assert found.path == whole
    assert len(complaints) == 1


def test_old_rows_are_removed_with_their_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    newest = save(tmp_path, STEP + 1, keep=1)
    assert list_checkpoints(tmp_path) == [newest]
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]


def test_rows_of_other_lengths_are_refused(tmp_path: Path) -> None:
    folder, good = begin_step(tmp_path, STEP), rows(0, "item")
    bad = TableRows(good.rows, good.params[1:], {})
    with pytest.raises(ValueError, match="table item of lengths"):
        write_rows(folder, 0, STEP, {"item": bad})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"rows": 91}, None),
        ({"rows": 89}, "table 'item' of 89 rows on resume, expected at least 90, as in"),
        ({"dim": 5}, "table 'item' of dim 5 on resume, expected 4, as in"),
    ],
)
def test_tables_on_resume(change: dict[str, Any], told: str | None) -> None:
    wanted = TOLD | {"item": TOLD["item"] | change}
    if told is None:
        check_tables(Path("there"), TOLD, wanted)
    else:
        with pytest.raises(UserError, match=told):
            check_tables(Path("there"), TOLD, wanted)


def test_a_table_on_one_side_alone_is_refused_on_resume() -> None:
    item = {"item": TOLD["item"]}
    with pytest.raises(UserError, match="table 'user' of the checkpoint there, and not of the run"):
        check_tables(Path("there"), TOLD, item)
    with pytest.raises(UserError, match="table 'user' of the run, and not of the checkpoint there"):
        check_tables(Path("there"), item, TOLD)
