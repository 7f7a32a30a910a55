"""What is noted of a worker's rows: the load of each server, and the rows that are pushed most."""

import numpy as np
import pytest

from mpips.layout.tables import Ownership, Table
from mpips.tables.load import COUNTERS, STEP, RowLoad, hot_rows, rows_by_server

ROWS = 5000


def noted(lists: list[np.ndarray], servers: int = 3) -> RowLoad:
    ownership = Ownership("a", Table(ROWS, 2), servers)
    load = RowLoad(ownership)
    for ids in lists:
        load.pull(ownership.places(ids))
        load.push(ids, ownership.group(ids).bounds)
    return load


@pytest.mark.parametrize("size", [7, 1000])
def test_load_of_servers(size: int) -> None:
    """Rows pushed are each once a step and exact; what is read is within what a sample tells."""
    rng = np.random.default_rng(0)
    lists = list(rng.integers(ROWS, size=(600_000 // size, size)))
    stats = noted(lists).stats()
    ownership = Ownership("a", Table(ROWS, 2), 3)
    exact = sum(np.bincount(ownership.locate(np.unique(ids))[0], minlength=3) for ids in lists)
    assert stats["rows_pushed"] == exact.tolist()
    total = size * len(lists)
    assert abs(sum(stats["rows_pulled"]) - total) <= STEP
    assert np.abs(np.array(stats["rows_pulled"]) / total - 1 / 3).max() < 0.05
    both = rows_by_server([stats, stats], "rows_pushed")
    assert both == [2 * each for each in exact.tolist()]


def test_rows_that_are_pushed_most() -> None:
    """Of a table of many rows those of a share that is worth naming, whatever else comes."""
    rng = np.random.default_rng(1)
    lists = []
    for _ in range(400):
        ids = rng.integers(ROWS, size=2048)
        ids[rng.random(2048) < 0.2] = 17
        ids[rng.random(2048) < 0.1] = 4711
        lists.append(ids.astype("i4")[::-1])  # of another type, and not in a row
    stats = [noted(lists[k::2]).stats() for k in range(2)]
    assert all(len(each["counters"]) == COUNTERS for each in stats)
    found = hot_rows(stats)
    assert [each["row"] for each in found[:2]] == [17, 4711]
    for each, share in zip(found[:2], (0.18, 0.1), strict=True):
        assert share - 0.04 < each["share"] < share + 0.03
    assert all(each["share"] < 0.02 for each in found[2:])
    assert hot_rows([noted(list(rng.integers(ROWS, size=(40, 2048)))).stats()]) == []


def test_no_period_of_a_batch_is_taken_for_hot() -> None:
    """Ids in eight columns, of which each has rows of its own."""
    rng = np.random.default_rng(2)
    ids = [(rng.integers(40, size=(256, 8)) + 40 * np.arange(8)).reshape(-1) for _ in range(300)]
    columns = np.zeros(8, int)
    for row, count, _ in noted(ids).stats()["counters"]:
        columns[row // 40] += count
    assert columns.min() > 0.7 * columns.mean()
