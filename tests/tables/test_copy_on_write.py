"""Rows at a snapshot: as they were, whatever is done to them later, and never all of them twice."""

import tracemalloc
from pathlib import Path
from threading import Event, Thread

import h5py  # noqa: F401  (else `write_rows` imports it while its memory is measured)
import numpy as np
import pytest

from mpips.checkpoint import TableRows, write_rows
from mpips.checkpoint.rows import RowsFile
from mpips.layout.tables import Normal, Table
from mpips.library.optimizers import Adagrad
from mpips.optim.row_rules import make_row_rule
from mpips.planning.tables import JobTable
from mpips.tables import copy_on_write
from mpips.tables.server import ServedTable, table_fields

ROWS, DIM = 8_000, 4
MB = 1e6


def served(
    rows: int = ROWS, dim: int = DIM, capacity: str = "lazy", server: int = 0, servers: int = 1
) -> ServedTable:
    """Return a table at a server, of which no row was touched."""
    table = Table(rows, dim, Normal(0.5), capacity=capacity)
    made = JobTable("item", table, make_row_rule(Adagrad(0.1)), 5, rows, lambda step: 0.1)
    fields = table_fields(made, servers, server, "f4")
    memory = {field.name: np.zeros(field.shape, field.dtype) for field in fields}
    return ServedTable(made, servers, server, memory)


def touch(rng: np.random.Generator, count: int, *tables: ServedTable) -> np.ndarray:
    """Update rows of tables alike, of the first in blocks; returns the numbers of the rows."""
    table, dim = tables[0].table, tables[0].table.dim
    local = np.unique(rng.integers(table.table.rows, size=count))
    grads = rng.standard_normal((len(local), dim), "f4")
    for each in tables:
        for block in each.blocks(grads, 1 << 14 if each is tables[0] else None):
            each.shard.apply(local[block], grads[block], 0.1)
    return table.owned_by(1).rows_of(0, local)


def columns(pieces: list[TableRows]) -> list[np.ndarray]:
    """Return the rows of all pieces, by their numbers."""
    by_column = zip(*(piece.arrays.values() for piece in pieces), strict=True)
    numbers, *others = (np.concatenate(some) for some in by_column)
    order = np.argsort(numbers)
    return [array[order] for array in (numbers, *others)]


def same(pieces: list[TableRows], expected: list[np.ndarray]) -> None:
    for found, wanted in zip(columns(pieces), expected, strict=True):
        np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("capacity", ["full", "lazy"])
@pytest.mark.parametrize("since", [False, True])
def test_a_snapshot_is_as_it_was_whatever_is_changed_between_its_pieces(
    since: bool, capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_on_write, "PIECE_BYTES", 100 * 2 * DIM * 4)
    monkeypatch.setattr("mpips.tables.server.BLOCK_ROWS", 64)
    (table, twin), rng = (served(capacity=capacity) for _ in range(2)), np.random.default_rng(0)
    table.shard.begin_marking()
    changed = touch(rng, 1500, table, twin)
    for _ in range(3):
        expected = columns([twin.changed_rows()])
        if since:
            expected = [array[np.isin(expected[0], changed)] for array in expected]
        snapshot, pieces, changed = table.snapshot(since), list[TableRows](), np.zeros(0, np.int64)
        assert snapshot.count == len(expected[0])
        for piece in snapshot.pieces():
            pieces.append(piece)
            changed = np.union1d(changed, touch(rng, 500, table, twin))
        assert max(len(piece.rows) for piece in pieces) < 100 + 500, "with what a push has changed"
        same(pieces, expected)
        assert table.shard.marked == len(changed), "which are in the next one"


@pytest.mark.parametrize("capacity", ["full", "lazy"])
def test_a_thread_writes_a_snapshot_beside_updates(capacity: str) -> None:
    table, rng = served(200_000, 16, capacity), np.random.default_rng(0)
    touch(rng, 150_000, table)
    expected, snapshot = columns([table.changed_rows()]), table.snapshot()
    begun, pieces = Event(), list[TableRows]()

    def write() -> None:
        for piece in snapshot.pieces():
            pieces.append(piece)
            begun.set()

    thread = Thread(target=write)
    thread.start()
    begun.wait()
    while thread.is_alive():
        touch(rng, 1000, table)
    thread.join()
    same(pieces, expected)


@pytest.mark.parametrize(("since", "beside"), [(False, 0), (True, 0), (False, 2000)])
def test_a_checkpoint_never_holds_the_rows_twice(since: bool, beside: int, tmp_path: Path) -> None:
    """Beside 47 MB there are a piece, a byte a line, and what is changed while one is written."""
    rng, table = np.random.default_rng(0), served(400_000, 16)
    table.shard.begin_marking()
    touch(rng, 1_000_000, table)
    if not since:
        expected = columns([table.changed_rows()])
    snapshot = table.snapshot(since)

    class Beside:
        """The snapshot's rows, each piece behind an update."""

        count = snapshot.count

        def pieces(self):
            for piece in snapshot.pieces():
                yield piece
                if beside:
                    touch(rng, beside, table)

    tracemalloc.start()
    try:
        record = write_rows(tmp_path, 0, 1, {"item": Beside()})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert record.size == snapshot.count > 45 * MB / 128
    assert peak < 5 * MB
    if not since:
        same(list(RowsFile(tmp_path, record, 1, "item").pieces()), expected)


def test_a_snapshot_that_was_let_go_keeps_nothing() -> None:
    table, rng = served(), np.random.default_rng(0)
    touch(rng, 3000, table)
    snapshot = table.shard.snapshot()
    next(pieces := snapshot.pieces())
    touch(rng, 3000, table)
    assert snapshot._aside
    snapshot.close()
    snapshot.close()
    touch(rng, 3000, table)
    assert not snapshot._aside
    assert not list(pieces)
    assert len(table.changed_rows().rows) == table.shard.touched


@pytest.mark.parametrize("capacity", ["full", "lazy"])
def test_a_snapshot_of_a_server_without_rows(capacity: str, tmp_path: Path) -> None:
    """As a spare has none, and of a table of one row all servers but one."""
    for server in range(2):
        snapshot = served(1, DIM, capacity, server, 2).snapshot()
        record = write_rows(tmp_path, server, 1, {"item": snapshot})
        assert record.size == 0
        assert sum(len(part.rows) for part in RowsFile(tmp_path, record, 1, "item").pieces()) == 0
