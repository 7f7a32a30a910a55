"""Rows of a checkpoint, read by who evaluates it: of tables larger than its memory, too."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoints import committed

from mpips.checkpoint import Checkpoint, TableRows, begin_step, open_checkpoint, write_rows
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.tables.saved_rows import SavedRows, find_rows

ROWS, DIM, OWNERS = 400_000, 32, 2
TOLD = {"hashed": False, "rows": ROWS, "dim": DIM, "init": "Normal", "scale": 0.1, "seed": 3}


def saved(directory: Path, step: int, changed: np.ndarray, base: int | None) -> Checkpoint:
    """Save rows whose numbers are those of the step and their own."""
    folder, lists = begin_step(directory, step), []
    for owner in range(OWNERS):
        numbers = changed[changed % OWNERS == owner]
        params = np.repeat(numbers[:, None] + step / 8, DIM, 1).astype("f4")
        some = TableRows(numbers, params, {"m": params})
        lists.append(write_rows(folder, owner, step, {"item": some}, base))
    layout, rows = Layout.of({"w": (1,)}), tuple(lists)
    committed(folder, step, layout, keep=9, rows=rows, tables={"item": TOLD})
    return open_checkpoint(folder)


def test_rows_are_read_as_they_are_wanted(tmp_path: Path) -> None:
    """From a chain, with those that nobody has changed; 51 MB of them are never in memory."""
    rng = np.random.default_rng(0)
    first, second = rng.permutation(ROWS)[: ROWS - 5], rng.permutation(ROWS)[:1000]
    saved(tmp_path, 1, first, None)
    found = saved(tmp_path, 2, second, 1)
    values = np.zeros(ROWS, "f4")
    values[first], values[second] = first + 1 / 8, second + 2 / 8
    untouched = np.setdiff1d(np.arange(ROWS), np.concatenate([first, second]))
    asked = [rng.integers(0, ROWS, (7, 30)), np.concatenate([second[:9], untouched, second[:9]])]
    tracemalloc.start()
    try:
        rows = SavedRows(found)
        each = [rows.pull("item", ids) for ids in asked]
        assert tracemalloc.get_traced_memory()[1] < 25e6, "51 MB are values, 3 are numbers"
    finally:
        tracemalloc.stop()
    for ids, ours in zip(asked, each, strict=True):
        np.testing.assert_array_equal(ours, find_rows(found, "item", ids), strict=True)
        changed = ~np.isin(ids, untouched)
        np.testing.assert_array_equal(ours[changed], np.repeat(values[ids[changed], None], DIM, 1))
        assert (np.abs(ours[~changed]) < 1).all()
        assert ours[~changed].all()
    assert rows.pull("item", []).shape == (0, DIM)
    assert rows.pull("item", np.zeros((3, 0))).shape == (3, 0, DIM)
    with pytest.raises(UserError, match="unknown table 'other'"):
        rows.pull("other", [1])
    with pytest.raises(UserError, match="'item' of several lengths"):
        find_rows(found, "item", [[1], [2, 3]])


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    found = saved(tmp_path, 1, np.arange(1000), None)
    file = found.path / found.rows[1].file
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 5000)
    with pytest.raises(UserError, match=r"rows-0001\.h5: cannot read .*use another checkpoint"):
        SavedRows(found).pull("item", [1])
