"""Bytes over links: `mpips.planning.traffic` against what the papers and a count by hand say."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.config.jobfile import resolve
from mpips.layout import cut
from mpips.layout.roles import Roles, assign
from mpips.planning.explain import Topology, case_of
from mpips.planning.tables import rows_of_area
from mpips.planning.traffic import (
    GRADS,
    IN,
    OUT,
    PARAMS,
    Case,
    Rows,
    busy_s,
    flows,
    link_s,
    pull_s,
    step_s,
)

M = 64 * 3600  # bytes: as many cache lines for each of up to 6, or 8, 10 or 12 owners
PATIENT = settings(deadline=None, max_examples=50)


def case(mode: str, node_of: list[int], servers: int | tuple[int, ...], **options: object) -> Case:
    """Return the case of M bytes in a world; servers by number or by their ranks."""
    by_hand = () if isinstance(servers, int) else servers
    count = servers if isinstance(servers, int) else None
    roles = assign(mode, ["host"] * len(node_of), node_of, count, by_hand)
    shards = tuple(4 * s.size for s in cut(M // 4, len(roles.owners)))
    made = Case(roles, tuple(node_of), shards, rounds=mode == "sync")
    return dataclasses.replace(made, **options)  # type: ignore[arg-type]


def each_way(found: Case) -> list[tuple[float, float]]:
    return [tuple(way) for way in flows(found).sum(axis=(1, 2)).tolist()]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_plain_allreduce_carries_the_broadcasts_too(n: int) -> None:
    found = case("sync", list(range(n)), 0, allreduce=True)
    around = 2 * (n - 1) * M / n
    assert [received for _, received in each_way(found)] == [around + (n - 1) * M / n] * n
    assert link_s(found, 1.0) > link_s(dataclasses.replace(found, allreduce=False), 1.0)
    apart = flows(case("sync", list(range(n + 1)), (0,), allreduce=True)).sum(axis=(2, 3))
    assert (apart > 0).tolist() == [[False, True], *[[True, False]] * n]  # by role


ROUNDS = [(2, 0), (3, 0), (6, 0), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (6, 3), (5, 4)]


@pytest.mark.parametrize(("n", "k"), ROUNDS)
def test_nodes_without_workers_shorten_rounds(n: int, k: int) -> None:
    """2 n (n - 1) / (n^2 + k n - 2 k) each way on all links (Jiang et al., OSDI 2020)."""
    config = resolve({"mode": "sync", "server_ranks": tuple(range(n, n + k))})
    node_of = list(range(n + k))
    topology = Topology(["host"] * (n + k), node_of, 10_000_000, 1e9)
    found = case_of(config, topology)
    expected = 2 * n * (n - 1) * found.vector / (n * n + k * n - 2 * k)
    assert link_s(found, 1.0) == pytest.approx(expected, rel=1e-4)
    busy = [expected] * n + [expected * (n > 2)] * k
    assert each_way(found) == [pytest.approx((each, each), rel=1e-4) for each in busy]
    roles = flows(found).sum(axis=(2, 3))
    assert (roles > 0).tolist() == [[True, False]] * n + [[False, n > 2]] * k


def worlds(mode: str) -> st.SearchStrategy[Case]:
    """Any roles on up to 4 nodes, a node without a rank left out."""

    @st.composite
    def make(draw: st.DrawFn) -> Case:
        nodes = sorted(draw(st.lists(st.integers(0, 3), min_size=2, max_size=9)))
        node_of = [sorted(set(nodes)).index(node) for node in nodes]
        least = 1 if mode == "async" else 0
        servers = draw(st.integers(least, len(nodes) - 1))
        ranks = draw(st.permutations(range(len(nodes))))[:servers]
        roles = Roles(tuple(sorted(ranks)), tuple(r for r in range(len(nodes)) if r not in ranks))
        shards = tuple(4 * s.size for s in cut(draw(st.integers(1, 9999)), len(roles.owners)))
        one_push, one_pull = draw(st.booleans()), draw(st.booleans())
        return Case(roles, tuple(node_of), shards, mode == "sync", False, one_push, one_pull)

    return make()


@PATIENT
@given(worlds("async") | worlds("sync"), st.integers(1, 5))
def test_what_is_sent_is_received(found: Case, every: int) -> None:
    moved = flows(found).sum(axis=1)
    assert (moved[..., OUT].sum(axis=0) == moved[..., IN].sum(axis=0)).all()
    seldom = flows(dataclasses.replace(found, every=every, grads=0.5, params=0.25)).sum(axis=1)
    assert seldom[:, GRADS] == pytest.approx(0.5 * moved[:, GRADS] / every)
    assert seldom[:, PARAMS] == pytest.approx(0.25 * moved[:, PARAMS] / every)


@PATIENT
@given(worlds("async") | worlds("sync"), st.integers(1, 4))
def test_bytes_by_going_through_all_pairs(found: Case, every: int) -> None:
    """Each worker and each remote owner, one by one; or one of a node's workers for all."""
    owners, workers = found.roles.owners, found.roles.workers
    dense, of_rows = np.zeros((2, found.nodes, 2, 2))
    pushing, pulling = set[tuple[int, int]](), set[tuple[int, int]]()
    for worker in workers:
        for owner, size in zip(owners, found.shards, strict=True):
            a, b = found.node_of[worker], found.node_of[owner]
            if a == b:
                continue
            if not (found.one_push and (a, owner) in pushing):
                dense[[a, b], GRADS, [OUT, IN]] += size
            if not (found.one_pull and (a, owner) in pulling):
                dense[[a, b], PARAMS, [IN, OUT]] += size
            pushing.add((a, owner))
            pulling.add((a, owner))
            of_rows[a] += [[6, 0], [0, 5]]
            of_rows[b] += [[0, 6], [5, 0]]
    assert found.rounds or (flows(found).sum(axis=1) == dense).all()
    rows = Rows(grads=6.0 * len(owners), params=5.0 * len(owners))
    without = dataclasses.replace(found, every=every)
    before, after = (
        flows(each).sum(axis=1) for each in (without, dataclasses.replace(without, rows=rows))
    )
    assert after == pytest.approx(before + of_rows)


def test_rows_of_tables() -> None:
    """Ten rows of a hundred take a byte each in either list, of a million two or three."""
    whole = lambda dim: 1.0  # noqa: E731
    assert Rows.of(((100, 8, 10.0),), 4, lambda dim: dim / 16, whole) == Rows(160.0 + 20, 320.0)
    found = Rows.of(((100, 8, 10.0), (1_000_000, 1, 100.0)), 8, whole, whole)
    assert found == Rows(1440.0 + 20 + 400, 1440.0)
    # Of a push 16 MiB or 1,024 rows, but no more than 256 MiB, and one row in any case.
    sizes = [rows_of_area(1 << bits) for bits in (10, 15, 20, 30)]
    assert sizes == [1 << 14, 1 << 10, 256, 1]


def test_rounds_add_up_and_served_modes_overlap() -> None:
    apart = (0,)
    sync, served = case("sync", [0, 1, 2], apart), case("async", [0, 1, 2], apart)
    assert each_way(sync) == each_way(served)
    assert link_s(served, M) == 2
    assert link_s(sync, M) == 4  # the results come after the sums
    assert busy_s(sync, np.array([[[3, 5], [7, 1]]]), 1.0) == 12
    assert busy_s(served, np.array([[[3, 5], [7, 1]]]), 1.0) == 10
    assert step_s(sync, M, 3.0) == 7
    assert step_s(served, M, 3.0) == 4  # computing, and the pull before it
    assert step_s(served, M, 0.5) == 2
    assert pull_s(served, M) == 1
    ahead = dataclasses.replace(served, prefetch=True)
    assert (pull_s(ahead, M), step_s(ahead, M, 3.0)) == (0, 3)
