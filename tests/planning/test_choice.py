"""Which codecs are chosen: the formula by hand, and what holds whatever was measured."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.config import Config
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.planning import choice, traffic
from mpips.planning.choice import RAW, Candidate, Choice, Speeds, choose, predict, work_s
from mpips.planning.explain import Topology, assumed, codec_ratios
from mpips.planning.traffic import Case
from mpips.session.probe import neighbours_of, streams

M = 64 * 2**16  # bytes of parameters
FP16 = Candidate("fp16", 0.5, 4e9, 5e9)
BF16 = Candidate("bf16", 0.5, 4e9, 6e9)
INT8 = Candidate("int8", 0.252, 2e9, 5e9)
ALL = (RAW, FP16, BF16, INT8)
SLOW, FAST = 12.5e6, math.inf
PATIENT = settings(deadline=None, max_examples=40)


def case(node_of: list[int], servers: int = 1, **options: Any) -> Case:
    roles = assign("async", ["host"] * len(node_of), node_of, servers)
    shards = tuple(4 * shard.size for shard in cut(M // 4, servers, 4))
    return Case(roles, tuple(node_of), shards, **options)


def speeds(rate: float, nodes: int, cores: float = 2.0) -> Speeds:
    return Speeds(rate, 1e-4, (cores,) * nodes)


def pair(found: Choice) -> tuple[str, str]:
    return found.push, found.pull


def test_an_exchange_with_one_remote_worker() -> None:
    """The link carries both directions at once; the worker's core and the server's work too."""
    found = predict(case([0, 1]), speeds(1e8, 2), INT8, FP16)
    worker = M / INT8.pack + M / FP16.unpack
    server = M / INT8.unpack + M / FP16.pack
    assert found == pytest.approx(0.5 * M / 1e8 + 2e-4 + max(worker, server))
    assert predict(case([0, 1]), speeds(1e8, 2), RAW, RAW) == pytest.approx(M / 1e8 + 2e-4)


def test_ranks_share_the_cores_of_their_node() -> None:
    where = case([0, 1, 1, 1, 1])
    assert work_s(where, speeds(1e8, 2, cores=4), RAW, RAW) == 0
    one = work_s(where, speeds(1e8, 2, cores=0.5), INT8, RAW)
    assert one == pytest.approx(4 * M / INT8.pack / 0.5)
    assert work_s(where, speeds(1e8, 2, cores=4), INT8, RAW) == pytest.approx(4 * M / INT8.unpack)
    shared = work_s(case([0, 0, 1, 1], 2), speeds(1e8, 2, cores=8), INT8, RAW)
    # A server and a worker on each node: of each shard one push comes from other nodes.
    assert shared == pytest.approx(M / 2 / INT8.pack)
    roles = assign("async", ["host"] * 4, [0, 0, 1, 1], 2, (0, 1))  # two servers beside each other
    servers = work_s(Case(roles, (0, 0, 1, 1), (M // 2,) * 2), speeds(1e8, 2, 0.25), RAW, INT8)
    assert servers == pytest.approx(2 * 2 * M / 2 / INT8.pack / 0.25)


def test_the_ranks_of_a_node_share_the_work_of_a_round() -> None:
    roles = assign("sync", ["host"] * 4, [0, 0, 1, 1])
    where = Case(roles, (0, 0, 1, 1), (M // 4,) * 4, rounds=True)
    # Half of the parameters are remote: a rank packs half of that, and unpacks one other sum of its
    # own quarter; the sums and the results cross one after the other.
    work = work_s(where, speeds(1e8, 2), INT8, RAW)
    assert work == pytest.approx(M / 4 / INT8.pack + M / 4 / INT8.unpack)
    assert work == pytest.approx(work_s(where, speeds(1e8, 2, cores=8), INT8, RAW))
    found = predict(where, speeds(1e8, 2), INT8, RAW)
    assert found == pytest.approx((INT8.ratio + 1) * M / 2 / 1e8 + 2e-4 + work)
    assert pair(choose(where, speeds(SLOW, 2), ALL, ALL)) == ("int8", "int8")


def test_a_fast_link_and_one_node_are_worth_none_and_a_given_option_stays() -> None:
    assert pair(choose(case([0, 1]), speeds(100e9, 2), ALL, ALL)) == ("none", "none")
    assert pair(choose(case([0, 0, 0]), speeds(SLOW, 1), ALL, ALL)) == ("none", "none")
    found = choose(case([0, 1]), speeds(SLOW, 2), (INT8,), ALL)
    assert pair(found) == ("int8", "int8")
    assert set(found.predicted) == {("int8", name) for name in ("none", "fp16", "bf16", "int8")}
    for codec, taken in (("auto", "none"), ("topk", "topk")):
        found = choice.without(Config(codec=codec, pull_codec="auto"), "one node")
        assert pair(found) == (taken, "none")


RATES = st.floats(1e4, 1e11)
CANDIDATES = st.lists(
    st.builds(Candidate, st.sampled_from(["a", "b", "c", "d"]), st.floats(0.02, 1), RATES, RATES),
    max_size=4,
    unique_by=lambda c: c.name,
)


@PATIENT
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), RATES, CANDIDATES, CANDIDATES)
def test_no_slower_prediction_is_ever_chosen(
    nodes: list[int], rate: float, pushes: list[Candidate], pulls: list[Candidate]
) -> None:
    order = sorted(set(nodes))
    where = case([order.index(node) for node in sorted(nodes)])
    found = choose(where, speeds(rate, len(order)), (RAW, *pushes), (RAW, *pulls))
    taken, none = found.predicted[pair(found)], found.predicted["none", "none"]
    assert taken <= none
    assert taken < choice.GAIN * none or pair(found) == ("none", "none")
    assert min(found.predicted.values()) >= choice.GAIN * taken
    bound = traffic.link_s(where, rate)
    assert none == pytest.approx(bound + 2e-4) or none > bound


@pytest.mark.parametrize(
    ("n", "nodes", "found"),
    [
        (M // 4, [0, 1, 2], ("int8", "int8")),
        # The two push a gradient each and share a pull, so that less will do for it.
        (M // 4, [0, 1, 1], ("int8", "fp16")),
        (M // 4, [0, 0, 0], ("none", "none")),
        (1000, [0, 1, 2], ("none", "none")),
    ],
)
def test_an_explanation_takes_packing_to_cost_nothing(
    n: int, nodes: list[int], found: tuple[str, str]
) -> None:
    topology = Topology(["host"] * 3, nodes, n, SLOW, codecs=codec_ratios(n, "float32"))
    for codec in ("auto", "int8"):
        settled = assumed(Config(codec=codec, pull_codec="auto"), topology)
        assert settled.codec == (found[0] if codec == "auto" else codec)
        assert settled.pull_codec == found[1]


@PATIENT
@given(st.lists(st.integers(0, 4), min_size=2, max_size=24).filter(lambda v: len(set(v)) > 1))
def test_every_link_carries_the_same_both_ways(nodes: list[int]) -> None:
    order = sorted(set(nodes))
    node_of = [order.index(node) for node in nodes]
    pairs = {rank: neighbours_of(rank, node_of) for rank in range(len(nodes))}
    sending = {rank: found for rank, found in pairs.items() if found}
    for node in range(len(order)):
        assert sum(node_of[rank] == node for rank in sending) == streams(node_of)
    for rank, (dest, source) in sending.items():
        assert node_of[dest] != node_of[rank] != node_of[source]
        assert sending[dest][1] == sending[source][0] == rank
