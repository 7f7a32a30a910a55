"""Tables: who owns which row, ids of a step by server and row, sums, lists of places as bytes."""

import hashlib
import itertools
import json
import math

import numpy as np
import pytest

from mpips.errors import UserError
from mpips.kernels.row_groups import most_bytes, read_places, spread, write_places
from mpips.layout.tables import (
    Normal,
    Ownership,
    Table,
    Uniform,
    Zeros,
    as_array,
    combine,
    digests_of,
    rows_of,
)  # fmt: skip

SIZES = [1, 2, 3, 5, 31, 64, 65, 1000, 4097, 1_000_003]


def places(rows, name="item", ids=()):
    return Ownership(name, Table(rows, 4), 1).places(ids)


def zipf(rows, n, exponent=1.05, seed=0):
    """Return n row numbers of which k is as frequent as 1 / (k + 1)^exponent."""
    weights = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    uniform = np.random.default_rng(seed).random(n)
    return np.searchsorted(weights, uniform * weights[-1])


@pytest.mark.parametrize("rows", [*SIZES, 2**31 + 11, 50_000_000, 2**40])
def test_places_are_a_permutation_that_is_undone(rows):
    whole = rows in SIZES
    ids = np.arange(rows) if whole else np.random.default_rng(rows).integers(0, rows, 1000)
    found = places(rows, ids=ids)
    assert len(set(found)) == len(set(ids))
    assert ((found >= 0) & (found < rows)).all()
    assert (Ownership("item", Table(rows, 4), 1).rows_of(0, found) == ids).all()
    if not whole:
        assert (places(rows, "user", ids) != found).mean() > 0.9, "of another name they differ"


@pytest.mark.parametrize("how", ["hash", "blocks"])
@pytest.mark.parametrize("rows", SIZES)
def test_every_row_has_one_owner_and_places_are_dense(rows, how):
    """Blocks are rows in their order, as even as can be."""
    ids = np.arange(rows)
    for servers in (1, 2, 3, 7):
        ownership = Ownership("item", Table(rows, 4, ownership=how), servers)
        owners, local = ownership.locate(ids)
        for server in range(servers):
            mine = ids[owners == server]
            assert len(mine) == ownership.count(server)
            assert abs(len(mine) - rows / servers) < 1
            assert (np.sort(local[mine]) == np.arange(len(mine))).all()
            assert (ownership.rows_of(server, local[mine]) == mine).all()
        assert sum(map(ownership.count, range(servers))) == rows
        if how == "blocks":
            assert (ownership.places(ids) == ids).all()
            assert (np.diff(owners) >= 0).all()
    with pytest.raises(UserError, match=f"id {rows} at place 1"):
        ownership.places(np.array([0, rows]))


def test_spares_own_no_rows():
    ids, two = np.array([5, 3, 5, 999]), Ownership("item", Table(1000, 4), 2)
    with_standbys = Ownership("item", Table(1000, 4), 4, spares=2)
    assert [with_standbys.count(server) for server in range(4)] == [500, 500, 0, 0]
    for got, expected in zip(with_standbys.locate(ids), two.locate(ids), strict=True):
        assert (got == expected).all()
    grouped, expected = with_standbys.group(ids), two.group(ids)
    assert (grouped.local == expected.local).all()
    assert grouped.bounds.tolist() == [*expected.bounds.tolist(), 3, 3]


@pytest.mark.parametrize("rows", [100_000, 1_000_000])
def test_load_is_even_under_zipf(rows):
    """Of the rows that servers are asked for, each once a step."""
    ids = zipf(rows, 400_000)
    for servers in (2, 4, 8):
        for name in ("item", "user", "word"):
            ownership = Ownership(name, Table(rows, 4), servers)
            steps = [np.diff(ownership.group(part).bounds) for part in np.split(ids, 50)]
            load = np.sum(steps, 0)
            assert load.max() < 1.03 * load.mean()


@pytest.mark.parametrize("stride", [1, 2, 7, 64, 256, 4096])
def test_rows_in_a_sequence_are_spread(stride):
    ids = np.arange(4096) * stride
    owners, _ = Ownership("item", Table(50_000_000, 4), 8).locate(ids)
    assert np.abs(np.bincount(owners, minlength=8) - 512).max() < 128


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100, 8192])
@pytest.mark.parametrize(("servers", "how"), [(1, "hash"), (3, "hash"), (3, "blocks")])
def test_groups_hold_each_id_once(n, servers, how):
    ids = zipf(10_000, n)
    ownership = Ownership("item", Table(10_000, 4, ownership=how), servers)
    places, local, bounds, order, starts = ownership.group(ids)
    assert (np.sort(order) == np.arange(n)).all()
    assert len(local) == len(set(ids))
    assert (bounds[0], bounds[-1], starts[0], starts[-1]) == (0, len(local), 0, n)
    for server in range(servers):
        begin, end = bounds[server : server + 2]
        assert (np.diff(local[begin:end]) > 0).all()
        assert (
            np.repeat(local[begin:end], np.diff(starts[begin : end + 1]))
            == places[order[starts[begin] : starts[end]]] - ownership.begins[server]
        ).all()
        of_rows = ownership.rows_of(server, local[begin:end])
        for u, row in zip(range(begin, end), of_rows, strict=True):
            mine = order[starts[u] : starts[u + 1]]
            assert (ids[mine] == row).all()
            assert (np.diff(mine) > 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_combine_sums_in_the_order_of_ids(dtype):
    ids = zipf(1000, 4096)
    grads = np.random.default_rng(1).standard_normal((4096, 5)).astype(dtype)
    ownership = Ownership("item", Table(1000, 5), 2)
    grouped = ownership.group(ids)
    expected = np.zeros((1000, 5), dtype)
    np.add.at(expected, ids, grads)
    owners = np.repeat([0, 1], np.diff(grouped.bounds))
    rows = np.empty(len(owners), "i8")
    for server in (0, 1):
        rows[owners == server] = ownership.rows_of(server, grouped.local[owners == server])
    assert (combine(grouped, grads) == expected[rows]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_one_server_go_to_all_their_ids(dtype):
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


@pytest.mark.parametrize("rows", [1, 2, 128, 129, 1 << 14, (1 << 14) + 1, 1 << 40])
def test_places_come_back_in_the_bytes_foreseen(rows):
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


def test_only_the_last_place_may_need_the_most_bytes():
    data = np.empty(most_bytes(129), "u1")
    assert write_places(np.array([128]), data) == most_bytes(129) == 2
    assert write_places(np.array([127]), data) == most_bytes(128) == 1
    assert write_places(np.arange(500), np.empty(500, "u1")) == 500, "neighbours take a byte each"


def test_a_list_that_ends_too_early_is_seen():
    data = np.empty(6, "u1")
    used = write_places(np.array([5, 70_000]), data)
    found = np.empty(2, np.int64)
    assert read_places(data[: used - 1], np.zeros(2, np.int64), found) == 1
    assert found[0] == 5


def test_ids_of_other_integer_types_are_the_same():
    ownership, ids = Ownership("item", Table(100, 4), 2), np.array([5, 99, 5, 0])
    for dtype in ("i4", "u1", "u8", ">i8"):
        pairs = zip(ownership.group(ids.astype(dtype)), ownership.group(ids), strict=True)
        assert all((ours == expected).all() for ours, expected in pairs)


def test_what_is_no_row_is_refused():
    for ids, message in (
        ([3, -1, 5], "id -1 at place 1"),
        ([3, 5, 100], "id 100 at place 2 .* ids from 0 to 99"),
        ([1.0, 2.0], "dtype float64, expected an integer type"),
        ([True, False], "dtype bool"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        (np.array([2, 2**63], "u8"), "id 9223372036854775808 at place 1"),
        (np.array([1, 2**70]), "dtype object, expected an integer type; convert them"),
        (np.array([1, "b"], object), "dtype object, .*; give the table hashed"),
        (["a", "b"], "dtype <U1, expected an integer type; give the table hashed=True"),
    ):
        with pytest.raises(UserError, match=message):
            Ownership("item", Table(100, 4), 2).group(np.array(ids))
    for ids in ([1.5], [True], [b"a"], [None, "a"]):
        message = r"table 'item' of dtype .*, expected integers, or str"
        with pytest.raises(UserError, match=message):
            digests_of("item", np.asarray(ids))
    for ids in (["ann", 5], [["ann"], [5]], ("ann", 1.5)):  # of which NumPy makes words
        with pytest.raises(UserError, match="dtype object, expected integers, or str"):
            digests_of("item", as_array("item", ids))


def test_tables_that_cannot_be_are_refused():
    for options, message in (
        ({"rows": 0}, "rows=0"),
        ({"rows": 1.5}, "whole number"),
        ({"dim": 0}, "dim=0"),
        ({"init": 0.01}, "Normal, Uniform or Zeros"),
        ({"rows": None}, "a whole number"),
        ({"capacity": "half"}, "one of auto, full, lazy"),
        ({"ownership": "mine"}, "one of hash, blocks"),
        ({"hashed": 1}, "hashed=1 of a table, expected True or False"),
        ({"evict_after": 0}, "evict_after=0 of a table, expected evict_after from 1"),
        ({"evict_after": 1, "capacity": "full"}, "evict_after=1 of a table of capacity 'full'"),
    ):
        with pytest.raises(UserError, match=message):
            Table(**{"rows": 10, "dim": 4, **options})


def test_numbers_of_tables():
    """Those of NumPy are whole numbers, too; scales are finite."""
    found = Table(np.arange(64).max() + 1, np.int32(2), push_rows=np.uint8(9))
    assert json.dumps([found.rows, found.dim, found.push_rows]) == "[64, 2, 9]"
    assert Zeros().scale == 0
    for init, value in itertools.product((Normal, Uniform), (-1, math.nan, math.inf, "1")):
        with pytest.raises(UserError, match="a finite"):
            init(value)


def test_integers_are_the_same_id_in_all_types():
    values = np.array([0, 1, 5, 127])
    expected = digests_of("item", values)
    for dtype in ("i1", "u1", "i4", ">i8", "u8"):
        assert (digests_of("item", values.astype(dtype)) == expected).all()
    wide = np.array([2**63, 2**64 - 1], "u8")
    assert (digests_of("item", wide.astype("i8")) == digests_of("item", wide)).all()


def test_words_are_hashed_by_their_text():
    words = ["a", "été", "", "a"]
    expected = [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        for word in words
    ]
    for given in (np.array(words), np.array(words, object), np.array(words).reshape(2, 2)):
        found = digests_of("item", given)
        assert found.shape == given.shape
        assert found.reshape(-1).tolist() == expected
    assert digests_of("item", np.array(["\ud800"])).shape == (1,)


def test_rows_stay_as_they_are():
    """A run that is resumed, by another version as well, finds its rows."""
    assert rows_of(digests_of("item", np.array([3, -1])), 1000).tolist() == [856, 67]
    assert rows_of(digests_of("item", np.array(["cat", "dog"])), 1000).tolist() == [939, 465]


def test_rows_are_even():
    rows = rows_of(digests_of("item", np.arange(100_000) * 64), 100)
    assert np.abs(np.bincount(rows, minlength=100) - 1000).max() < 150
