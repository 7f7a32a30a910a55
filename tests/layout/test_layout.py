import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.errors import UserError
from mpips.layout import CACHE_LINE_BYTES, Layout, Shard, check_alike, cut
from mpips.layout.tables import Table
from mpips.problems.rows import tables_of_problem

SHAPES = st.dictionaries(
    st.text("abcw_0123/", min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    max_size=6,
)


@given(shapes=SHAPES)
def test_arrays_tile_the_vector_in_their_order(shapes: dict[str, tuple[int, ...]]) -> None:
    """Views are the vector itself, and a description goes through JSON and back."""
    layout = Layout.of(shapes)
    assert layout.names == tuple(shapes)
    vector = np.zeros(layout.size, "f4")
    for k, (name, view) in enumerate(layout.views(vector).items()):
        assert view.shape == shapes[name]
        assert view.dtype == vector.dtype
        view[...] = k + 1
    expected = [k + 1 for k, s in enumerate(shapes.values()) for _ in range(math.prod(s))]
    assert vector.tolist() == expected
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_the_size_of_many_arrays_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, calls = Layout.of({f"w{k}": (k, 2) for k in range(9)}), Mock(side_effect=math.prod)
    monkeypatch.setattr(math, "prod", calls)
    assert [layout.size for _ in range(3)] == [72] * 3
    assert calls.call_count == 9
    assert layout == replace(layout)


def test_a_vector_of_another_size_is_refused() -> None:
    for shape in ((4,), (6,), (5, 1), ()):
        with pytest.raises(ValueError, match=r"expected \(5,\)"):
            Layout.of({"w": (5,)}).views(np.zeros(shape))


def assert_tiled(shards: list[Shard], n: int, parts: int) -> None:
    assert len(shards) == parts
    edges = [0, *(shard.end for shard in shards)]
    assert edges[-1] == n
    assert shards == [Shard(*pair) for pair in itertools.pairwise(edges)]


@given(n=st.integers(0, 5000), parts=st.integers(1, 70), itemsize=st.sampled_from([4, 8]))
def test_shards_tile_the_vector_on_cache_lines(n: int, parts: int, itemsize: int) -> None:
    shards, line = cut(n, parts, itemsize), CACHE_LINE_BYTES // itemsize
    assert_tiled(shards, n, parts)
    assert all(shard.begin % line == 0 or shard.size == 0 for shard in shards)
    sizes = [shard.size for shard in shards]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) < 2 * line
    assert sizes == sorted(sizes, reverse=True) or max(sizes) - min(sizes) <= line
    empty = [size == 0 for size in sizes]
    assert empty == sorted(empty)  # only at the tail
    assert bool(sizes[0]) == bool(n)


def test_shards_are_cut_between_arrays() -> None:
    edges = [0, 10, 11, 60, 100, 200, 1000]
    for parts in range(1, 9):
        shards = cut(1000, parts, 4, edges)
        assert_tiled(shards, 1000, parts)
        assert shards[0].size > 0
        assert {shard.end for shard in shards} <= set(edges)
    assert [shard.end for shard in cut(1000, 3, 4, [0, 330, 331, 700, 1000])] == [331, 700, 1000]


def test_tables_lie_beside_the_vector() -> None:
    item = Table(rows=10, dim=3)
    layout = Layout.of({"w": (2,)}, tables={"item": item})
    assert (layout.size, layout.tables) == (2, {"item": item})
    assert layout != Layout.of({"w": (2,)})
    assert Layout.of({"w": (2,)}).tables == {}
    assert Layout.from_json(layout.to_json()) == Layout.of({"w": (2,)})


def test_layouts_of_all_ranks_are_alike() -> None:
    first, table = Layout.of({"w": (2,)}), {"item": Table(rows=10, dim=3)}
    check_alike([first, Layout.of({"w": (2,)})])
    for other, told in (
        (Layout.of({"w": (3,)}), r"params {'w': \(3,\)} on rank 1, expected names and shapes as"),
        (Layout.of({"w": (2,)}, tables=table), "tables .*rows=10.* on rank 1, expected {}, as on"),
    ):
        with pytest.raises(UserError, match=told):
            check_alike([first, other])
    with pytest.raises(UserError, match="array name 'w', expected a name that is not another's"):
        check_alike([Layout.of({"w": (2,), "w/b": (3,)})])


def test_a_problem_has_its_tables_in_one_place() -> None:
    item, layout = {"item": Table(rows=10, dim=3)}, Layout.of({"w": (2,)})
    tabled = Layout.of({"w": (2,)}, tables=item)
    for problem in (
        SimpleNamespace(layout=layout, tables=item),
        SimpleNamespace(layout=tabled),
        SimpleNamespace(layout=tabled, tables=dict(item)),
    ):
        assert tables_of_problem(problem) == item
    assert not tables_of_problem(SimpleNamespace(layout=layout))
    other = SimpleNamespace(layout=tabled, tables={"item": Table(rows=11, dim=3)})
    with pytest.raises(UserError, match=r"rows=11.* beside .*rows=10.* in its layout"):
        tables_of_problem(other)
