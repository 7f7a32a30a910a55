from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.config.jobfile import resolve
from mpips.errors import UserError
from mpips.layout import Shard
from mpips.layout.roles import (
    Roles,
    assign,
    roles_of,
    shares,
    training,
    with_portions,
    with_spares,
)


def one_node(mode: str, world: int, servers: int | None = None) -> Roles:
    return assign(mode, ["host"] * world, [0] * world, servers)


def test_table() -> None:
    for mode, world, servers, expected in (
        ("async", 2, None, (0,)),
        ("async", 7, None, (0,)),
        ("async", 8, None, (0, 1)),
        ("async", 41, None, tuple(range(10))),
        ("async", 8, 7, (0, 1, 2, 3, 4, 5, 6)),
        ("async", 2, 1, (0,)),
        ("sync", 1, None, ()),
        ("sync", 8, None, ()),
        ("sync", 1, 0, ()),
        ("local_sgd", 3, None, ()),
        ("easgd", 8, None, (0, 1)),
        ("local_sgd", 3, 1, (0,)),
        ("sync", 4, 3, (0, 1, 2)),
        ("async", 1, None, "at least 2 ranks"),
        ("async", 8, 8, "^servers=8 leaves no worker in a world of 8, expected servers <= 7; use "),
        ("sync", 1, 1, "servers <= 0"),
    ):
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                one_node(mode, world, servers)
            continue
        roles = one_node(mode, world, servers)
        assert roles.servers == expected
        assert roles.workers == tuple(r for r in range(world) if r not in expected)
        assert roles.owners == (expected or roles.workers)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data(), st.booleans())
def test_servers_are_spread_as_evenly_as_can_be(
    sizes: list[int], data: st.DataObject, shuffled: bool
) -> None:
    """No node has two servers more than another that had a rank to spare."""
    node_of = [n for n, size in enumerate(sizes) for _ in range(size)]
    if shuffled:  # as by mpirun --map-by node
        node_of = data.draw(st.permutations(node_of))
    world = len(node_of)
    servers = data.draw(st.integers(0, world - 1))
    roles = assign("sync", ["host"] * world, node_of, servers)
    assert len(roles.servers) == servers
    assert roles.servers == tuple(sorted(roles.servers))
    assert roles.workers == tuple(r for r in range(world) if r not in roles.servers)
    held = [sum(node_of[r] == n for r in roles.servers) for n in range(len(sizes))]
    for n, size in enumerate(sizes):
        assert held[n] >= max(held) - 1 or held[n] == size
        ranks = [r for r in range(world) if node_of[r] == n]
        assert [r for r in ranks if r in roles.servers] == ranks[: held[n]]


def test_placed_by_rank() -> None:
    roles = assign("async", ["h"] * 4, [0] * 4, server_ranks=(3, 1))
    assert roles == Roles((1, 3), (0, 2))
    assert roles.coordinator == 1
    assert [roles.name(r) for r in range(4)] == ["worker 0", "server 0", "worker 1", "server 1"]
    assert assign("async", ["h"] * 4, [0] * 4, 2, (3, 1)) == roles
    for ranks, error in (((4,), "ranks 0 to 3"), ((0, 1, 2, 3), "servers <= 3")):
        with pytest.raises(UserError, match=error):
            assign("async", ["h"] * 4, [0] * 4, server_ranks=ranks)


def test_placed_by_host() -> None:
    hosts, node_of = ["big1", "big1", "small1", "small1", "big2", "big2"], [0, 0, 1, 1, 2, 2]
    for pattern, servers, found in (
        ("big*", 2, (0, 4)),
        ("big*", 3, (0, 1, 4)),
        ("small?", 2, (2, 3)),
        ("big2, small1", 2, (2, 4)),
    ):
        assert assign("async", hosts, node_of, servers, server_hosts=pattern).servers == found
    with pytest.raises(UserError, match=r"matches 2 ranks.*hosts are big1, big2, small1"):
        assign("async", hosts, node_of, 3, server_hosts="small1")
    with pytest.raises(UserError, match="matches 0 ranks"):
        assign("async", hosts, node_of, server_hosts="none")


def test_spares_are_servers_that_own_nothing() -> None:
    """They come behind the others, also behind those that are placed by hand."""
    roles = with_spares(one_node("async", 6, 2), 1, [0] * 6)
    assert (roles.servers, roles.workers, roles.spares) == ((0, 1, 2), (3, 4, 5), 1)
    assert [roles.name(rank) for rank in (1, 2, 3)] == ["server 1", "spare 2", "worker 0"]
    assert shares(64, roles, 4) == (Shard(0, 32), Shard(32, 64), Shard(64, 64))
    by_hand = assign("async", ["host"] * 5, [0] * 5, server_ranks=[2])
    assert with_spares(by_hand, 1, [0] * 5).servers == (2, 3)
    assert with_spares(by_hand, 0, [0] * 5) is by_hand
    for world, servers, spares in ((3, 2, 1), (3, 1, 2), (2, 1, 1)):
        with pytest.raises(UserError, match=f"spares={spares} with "):
            with_spares(one_node("async", world, servers), spares, [0] * world)


def test_servers_and_spares_are_spread() -> None:
    """Each node has one, before any has two; spares are beside servers."""
    for nodes, servers, placed, spares in (
        (2, 2, (0, 4), (1, 5)),
        (2, 2, (0, 4), (1,)),
        (2, 1, (0,), (1,)),
        (2, 1, (0,), (1, 2)),
        (2, 4, (0, 1, 4, 5), (2, 6)),
        (4, 2, (0, 4), (1, 5)),
        (4, 4, (0, 2, 4, 6), (1, 5)),
        (8, 2, (0, 4), (5, 6)),  # behind servers that are alone on their nodes
    ):
        node_of = [rank * nodes // 8 for rank in range(8)]
        roles = assign("async", ["host"] * 8, node_of, servers)
        assert roles.servers == placed
        assert with_spares(roles, len(spares), node_of).servers == (*placed, *spares)


def test_evaluators_are_the_last_ranks() -> None:
    assert [training(4, k) for k in (0, 1, 3)] == [4, 3, 1]
    with pytest.raises(UserError, match="evaluators=4 in a world of 4, expected evaluators <= 3"):
        training(4, 4)
    with pytest.raises(UserError, match=r"world of 2 beside evaluators=1, .* use mpirun -n 4$"):
        assign("async", ["h"] * 2, [0] * 2, 2, evaluators=1)


def divided(n: int, k: int, ranks: int = 1, **options: Any) -> list[float]:
    """Return what each of n nodes of workers and then each of k of servers owns."""
    node_of = [node for node in range(n + k) for _ in range(ranks)]
    servers = tuple(range(n * ranks, (n + k) * ranks))
    config = resolve({"mode": "sync", "server_ranks": servers, **options})
    roles = roles_of(config, ["host"] * len(node_of), node_of)
    found, whole = np.zeros(n + k), with_portions(roles, config, node_of)
    for rank, part in zip(whole.owners, whole.portions, strict=True):
        found[node_of[rank]] += part
    return [float(each) for each in found]


@pytest.mark.parametrize("ranks", [1, 3])
def test_nodes_without_workers_own_what_shortens_rounds(ranks: int) -> None:
    for n, k, each, spare in (
        *((2, 1, 1 / 2, 0), (4, 2, 1 / 10, 3 / 10), (3, 1, 1 / 5, 2 / 5), (8, 2, 6 / 76, 14 / 76)),
        *((2, 2, 1 / 2, 0), (3, 3, 0, 1 / 3), (3, 5, 0, 1 / 5), (1, 2, 1, 0)),
    ):
        assert divided(n, k, ranks) == pytest.approx([each] * n + [spare] * k)


def test_servers_own_nothing_where_results_come_after_all_sums() -> None:
    for options in ({"codec": "int8"}, {"pull_codec": "fp16"}, {"codec": "auto"}, {"clip": 1.0}):
        assert divided(4, 2, **options) == pytest.approx([1 / 4] * 4 + [0] * 2), options


def test_only_rounds_in_slices_are_divided() -> None:
    for options in (
        *({"mode": mode} for mode in ("async", "hybrid", "local_sgd")),
        *({"reduce": "allreduce"}, {"codec": "powersgd"}, {"backup_workers": 1}),
        {"server_ranks": (0, 5)},
    ):
        config = resolve({"mode": "sync", "server_ranks": (4, 5), **options})
        node_of = [0, 0, 1, 1, 2, 2]
        roles = with_portions(roles_of(config, ["host"] * 6, node_of), config, node_of)
        assert bool(roles.portions) == (config.mode == "local_sgd"), options
        assert roles.owners == (roles.servers + roles.workers if roles.portions else roles.servers)
        assert with_portions(roles, config, node_of, tables=True).owners == roles.servers


def test_unequal_portions_begin_on_cache_lines() -> None:
    roles = Roles((2,), (0, 1), portions=(0.5, 0.25, 0.25))
    edges = [(shard.begin, shard.end) for shard in shares(1000, roles, 4)]
    assert edges == [(0, 512), (512, 752), (752, 1000)]
    assert [shard.size for shard in shares(3, roles, 4)] == [0, 3, 0]
