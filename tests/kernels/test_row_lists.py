"""Lists of places as bytes, and rows copied to where their ids stand."""

import numpy as np
import pytest

from mpips.kernels.row_groups import most_bytes, read_places, spread, write_places
from mpips.layout.tables import Ownership, Table


@pytest.mark.parametrize("rows", [1, 2, 128, 129, 1 << 14, (1 << 14) + 1, 1 << 40])
def test_places_come_back_in_the_bytes_foreseen(rows: int) -> None:
    rng = np.random.default_rng(rows)
    edges = {0, rows - 1, min(127, rows - 1), min(128, rows - 1)}
    places = np.unique([*edges, *rng.integers(0, rows, 1000).tolist()])
    data = np.empty(len(places) * most_bytes(rows), "u1")
    used = write_places(places, data)
    cursor, found = np.zeros(2, np.int64), np.empty(len(places), np.int64)
    parts = np.array_split(found, 3)
    assert [read_places(data[:used], cursor, part) for part in parts] == list(map(len, parts))
    np.testing.assert_array_equal(found, places)
    assert cursor.tolist() == [used, rows]
    assert read_places(data[:used], cursor, found) == 0, "there are no more"


def test_only_the_last_place_may_need_the_most_bytes() -> None:
    data = np.empty(most_bytes(129), "u1")
    assert write_places(np.array([128]), data) == most_bytes(129) == 2
    assert write_places(np.array([127]), data) == most_bytes(128) == 1
    assert write_places(np.arange(500), np.empty(500, "u1")) == 500, "neighbours take a byte each"


def test_a_list_that_ends_too_early_is_seen() -> None:
    data = np.empty(6, "u1")
    used = write_places(np.array([5, 70_000]), data)
    found = np.empty(2, np.int64)
    assert read_places(data[: used - 1], np.zeros(2, np.int64), found) == 1
    assert found[0] == 5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_one_server_go_to_all_their_ids(dtype: str) -> None:
    ownership = Ownership("t", Table(rows=50, dim=3), 3)
    ids = np.random.default_rng(0).integers(0, 50, 200)
    grouped = ownership.group(ids)
    values = np.arange(150.0).reshape(50, 3).astype(dtype)
    out = np.full((200, 3), -1.0, dtype)
    for server in (0, 2):
        part = grouped.of(server)
        given = values[ownership.rows_of(server, grouped.local[part])]
        spread(given, grouped.order, grouped.starts[part.start : part.stop + 1], out)
    theirs = ownership.locate(ids)[0] == 1
    assert 0 < theirs.sum() < 200
    np.testing.assert_array_equal(out[~theirs], values[ids[~theirs]])
    assert (out[theirs] == -1).all(), "those of others stay as they are"
