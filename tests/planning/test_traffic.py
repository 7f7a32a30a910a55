"""Bytes over links beside papers and a count by hand, the codecs chosen, and ``--explain``."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT

from mpips.config import Config
from mpips.config.command_line import Question, parse_command_line
from mpips.config.jobfile import resolve
from mpips.errors import UserError, human_bytes
from mpips.layout import cut
from mpips.layout.roles import Roles, assign
from mpips.planning import choice, explain
from mpips.planning.choice import RAW, Candidate, Choice, Speeds, choose, predict, work_s
from mpips.planning.explain import (
    Explanation,
    Topology,
    assumed,
    case_of,
    codec_ratios,
    explain_alone,
    explanation_text,
)
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
from mpips.planning.world import server_counts
from mpips.session.probe import neighbours_of, streams

N = 16 * 3600  # parameters: as many cache lines for each of up to 6, or 8, 10 or 12 owners
M = 4 * N
RATE = 1e6
PATIENT = settings(deadline=None, max_examples=50)
GUIDE = (ROOT / "mpips" / "tools" / "guide" / "slow-links.md").read_text()
CLICKS = str(ROOT / "jobs" / "clicks.svm")
SEVERAL = re.compile("accumulate|local_sgd|easgd")


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
@given(worlds("async") | worlds("sync"), st.integers(1, 4))
def test_bytes_by_going_through_all_pairs(found: Case, every: int) -> None:
    """Each worker and each remote owner, one by one; or one of a node's workers for all.

    As rounds have it: a node sends its sums once and gets the results once.
    """
    owners, workers = found.roles.owners, found.roles.workers
    dense, of_rows = np.zeros((2, found.nodes, 2, 2))
    pushing, pulling = set[tuple[int, int]](), set[tuple[int, int]]()
    for worker in workers:
        for owner, size in zip(owners, found.shards, strict=True):
            a, b = found.node_of[worker], found.node_of[owner]
            if a == b:
                continue
            if not ((found.one_push or found.rounds) and (a, owner) in pushing):
                dense[[a, b], GRADS, [OUT, IN]] += size
            if not ((found.one_pull or found.rounds) and (a, owner) in pulling):
                dense[[a, b], PARAMS, [IN, OUT]] += size
            pushing.add((a, owner))
            pulling.add((a, owner))
            of_rows[a] += [[6, 0], [0, 5]]
            of_rows[b] += [[0, 6], [5, 0]]
    assert (flows(found).sum(axis=1) == dense).all()
    seldom = flows(dataclasses.replace(found, every=every, grads=0.5, params=0.25)).sum(axis=1)
    assert seldom == pytest.approx(dense * [[0.5], [0.25]] / every)
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


FP16 = Candidate("fp16", 0.5, 4e9, 5e9)
BF16 = Candidate("bf16", 0.5, 4e9, 6e9)
INT8 = Candidate("int8", 0.252, 2e9, 5e9)
ALL = (RAW, FP16, BF16, INT8)
SLOW = 12.5e6


def speeds(rate: float, nodes: int, cores: float = 2.0) -> Speeds:
    return Speeds(rate, 1e-4, (cores,) * nodes)


def pair(found: Choice) -> tuple[str, str]:
    return found.push, found.pull


def test_an_exchange_with_one_remote_worker() -> None:
    """The link carries both directions at once; the worker's core and the server's work too."""
    found = predict(case("async", [0, 1], 1), speeds(1e8, 2), INT8, FP16)
    worker = M / INT8.pack + M / FP16.unpack
    server = M / INT8.unpack + M / FP16.pack
    assert found == pytest.approx(0.5 * M / 1e8 + 2e-4 + max(worker, server))
    assert predict(case("async", [0, 1], 1), speeds(1e8, 2), RAW, RAW) == pytest.approx(
        M / 1e8 + 2e-4
    )


def test_ranks_share_the_cores_of_their_node() -> None:
    where = case("async", [0, 1, 1, 1, 1], 1)
    assert work_s(where, speeds(1e8, 2, cores=4), RAW, RAW) == 0
    one = work_s(where, speeds(1e8, 2, cores=0.5), INT8, RAW)
    assert one == pytest.approx(4 * M / INT8.pack / 0.5)
    assert work_s(where, speeds(1e8, 2, cores=4), INT8, RAW) == pytest.approx(4 * M / INT8.unpack)
    shared = work_s(case("async", [0, 0, 1, 1], 2), speeds(1e8, 2, cores=8), INT8, RAW)
    # A server and a worker on each node: of each shard one push comes from other nodes.
    assert shared == pytest.approx(M / 2 / INT8.pack)
    beside = case("async", [0, 0, 1, 1], (0, 1))
    servers = work_s(beside, speeds(1e8, 2, 0.25), RAW, INT8)
    assert servers == pytest.approx(2 * 2 * M / 2 / INT8.pack / 0.25)


def test_the_ranks_of_a_node_share_the_work_of_a_round() -> None:
    where = case("sync", [0, 0, 1, 1], 0)
    # Half of the parameters are remote: a rank packs half of that, and unpacks one other sum of its
    # own quarter; the sums and the results cross one after the other.
    work = work_s(where, speeds(1e8, 2), INT8, RAW)
    assert work == pytest.approx(M / 4 / INT8.pack + M / 4 / INT8.unpack)
    assert work == pytest.approx(work_s(where, speeds(1e8, 2, cores=8), INT8, RAW))
    found = predict(where, speeds(1e8, 2), INT8, RAW)
    assert found == pytest.approx((INT8.ratio + 1) * M / 2 / 1e8 + 2e-4 + work)
    assert pair(choose(where, speeds(SLOW, 2), ALL, ALL)) == ("int8", "int8")


def test_a_fast_link_and_one_node_are_worth_none_and_a_given_option_stays() -> None:
    assert pair(choose(case("async", [0, 1], 1), speeds(100e9, 2), ALL, ALL)) == ("none", "none")
    assert pair(choose(case("async", [0, 0, 0], 1), speeds(SLOW, 1), ALL, ALL)) == ("none", "none")
    found = choose(case("async", [0, 1], 1), speeds(SLOW, 2), (INT8,), ALL)
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
    where = case("async", [order.index(node) for node in sorted(nodes)], 1)
    found = choose(where, speeds(rate, len(order)), (RAW, *pushes), (RAW, *pulls))
    taken, none = found.predicted[pair(found)], found.predicted["none", "none"]
    assert taken <= none
    assert taken < choice.GAIN * none or pair(found) == ("none", "none")
    assert min(found.predicted.values()) >= choice.GAIN * taken
    bound = link_s(where, rate)
    assert none == pytest.approx(bound + 2e-4) or none > bound


@pytest.mark.parametrize(
    ("n", "nodes", "found"),
    [
        (N, [0, 1, 2], ("int8", "int8")),
        # The two push a gradient each and share a pull, so that less will do for it.
        (N, [0, 1, 1], ("int8", "fp16")),
        (N, [0, 0, 0], ("none", "none")),
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


def told(node_of: list[int], compute_s: float = 0.0, n: int = N, **options: Any) -> Explanation:
    """Explain a job on these nodes, with links of `RATE`."""
    topology = Topology(["host"] * len(node_of), node_of, n, RATE, compute_s)
    return explain.explain(resolve(options), topology)


def gains(found: Explanation) -> dict[str, float]:
    """Return what each option gives, but for those that make a step of several batches."""
    every = {relief.option: relief.gain for relief in found.reliefs}
    return {k: gain for k, gain in every.items() if not SEVERAL.search(k)}


def test_one_server_is_the_bottleneck_and_more_servers_or_rounds_relieve_it() -> None:
    """Four nodes of one rank: (samples a step, M a step) now 3, 3; 2, 1; in rounds 4, 3/2."""
    found = told([0, 1, 2, 3])
    assert (found.pushed, found.pulled) == (3 * M, 3 * M)
    assert (found.busiest, found.bound_by_link) == (0, True)
    assert found.link_s == found.step_s == 3 * M / RATE
    assert found.samples_per_s == pytest.approx(3 * 32 * RATE / (3 * M))
    assert gains(found) == pytest.approx({"--mode sync": 4 / 1.5, "--servers 2": 2})
    steps = {relief.option: relief.step_s for relief in found.reliefs}
    assert (steps["--servers 2"], steps["--accumulate 4"]) == (M / RATE, 3 * M / RATE / 4)


def test_reliefs_of_a_node_s_workers() -> None:
    """A server on node 0, three workers on node 1."""
    apart: dict[str, Any] = {"server_ranks": (0,)}
    node_of = [0, 1, 1, 1]
    found = gains(told(node_of, **apart, share_pulls=False))
    assert "--share-pulls" not in found  # the pushes still cross the link one by one
    assert "--node-aggregation" not in found
    assert gains(told(node_of, **apart))["--node-aggregation"] == pytest.approx(3)
    found = gains(told(node_of, **apart, node_aggregation=True, share_pulls=False))
    assert found["--share-pulls"] == pytest.approx(3)


def test_time_for_computing_limits_what_is_gained() -> None:
    """Four nodes of one rank, one of them a server; computing takes 2 M / RATE."""
    found = told([0, 1, 2, 3], compute_s=2 * M / RATE)
    assert found.bound_by_link
    assert found.step_s == 3 * M / RATE  # and not 2 + 1 for computing and the pull
    assert gains(found) == pytest.approx({"--mode sync": 4 / 3.5 * 3 / 3})
    slow = told([0, 1, 2, 3], compute_s=9 * M / RATE)
    assert not slow.bound_by_link
    assert slow.step_s == 10 * M / RATE
    assert gains(slow)["--prefetch"] == pytest.approx(10 / 9)
    assert "bottleneck: computing" in explanation_text(slow, "8mbit")


def test_fragments_go_beside_local_steps() -> None:
    """As many bytes a step as in whole rounds; half of the computing hides them, or half of it."""
    rounds = {"mode": "local_sgd", "local_steps": 8, "local_slots": "keep"}
    parts = {**rounds, "fragments": 4, "overlap_steps": 1}
    whole, streamed = (told([0, 1, 2, 3], compute_s=M / RATE, **how) for how in (rounds, parts))
    assert streamed.pushed == whole.pushed
    assert streamed.link_s == whole.link_s < streamed.topology.compute_s / 2
    assert streamed.step_s == streamed.topology.compute_s
    slow = told([0, 1, 2, 3], compute_s=whole.link_s, **parts)
    assert slow.step_s == 1.5 * whole.link_s


TABLES = ((100, 8, 0.0),)  # of which a batch is not known to need any row


def test_tables_have_servers_own_the_parameters_and_exclude_modes() -> None:
    apart = Topology(["host"] * 4, [0, 1, 2, 3], N, RATE, tables=TABLES)
    found = explain.explain(resolve({"mode": "sync", "server_ranks": (0,)}), apart)
    assert each_way(found.case)[0] == (3 * M, 3 * M)
    served = explain.explain(resolve({}), apart)
    assert {"--mode sync", "--servers 2"} <= gains(served).keys()
    options = {relief.option for relief in served.reliefs}
    assert not options & {"--mode easgd", "--mode local_sgd", "--node-aggregation"}
    easgd = resolve({"problem": "logistic_sparse", "dataset": CLICKS, "mode": "easgd"})
    with pytest.raises(UserError, match="tables in mode 'easgd', expected mode async or"):
        explain_alone(easgd, Question(ranks=4, nodes=2))


def test_no_shard_divides_an_array_that_a_rule_takes_whole() -> None:
    muon = resolve({"optimizer": f"{ROOT / 'jobs' / 'muon.py'}:Muon", "servers": 2})
    topology = Topology(["host"] * 4, [0, 1, 2, 3], 100, RATE, ends=(0, 90, 100))
    assert case_of(muon, topology).shards == (360, 40)
    words = {**vars(muon), "hidden": (2000,)}
    text = explain_alone(resolve(words), Question(ranks=4, nodes=4))
    sent = [re.split(" {2,}", line)[4] for line in text.splitlines() if "1 server" in line]
    assert sent == [human_bytes(2 * 4 * n) for n in (64 * 2000, 2000 + 2000 * 10 + 10)]


def test_gradients_of_backup_workers_are_no_samples() -> None:
    backed = told([0, 1, 2, 3, 4], mode="sync", servers=1, backup_workers=1)
    assert backed.samples_per_s == pytest.approx(3 * 32 / backed.step_s)


def test_large_worlds_are_explained_in_seconds() -> None:
    assert server_counts(65) == list(range(65))
    assert len(server_counts(100_000)) < 600
    ranks = range(20_000)
    assert assign("async", [f"node{k}" for k in ranks], ranks, 5000).servers == tuple(ranks[::4])


def test_one_node_has_no_link() -> None:
    found = told([0, 0, 0, 0])
    assert (found.link_s, found.step_s, found.reliefs) == (0, 0, ())
    assert "one node: no link is crossed" in explanation_text(found, "1gbit")


SMALLER = Topology(["host"] * 4, [0, 1, 2, 3], N, RATE, codecs={"int8": 0.25, "topk": 0.02})


def smaller(**options: Any) -> Explanation:
    return explain.explain(resolve(options), SMALLER)


def test_smaller_and_fewer_messages_are_proposed_and_count() -> None:
    found = gains(smaller())
    # The server receives 3 M of gradients and sends 3 M of parameters, both at once.
    assert found["--codec int8 --pull-codec int8"] == pytest.approx(4)
    assert not {"--codec int8", "--pull-codec int8", "--codec topk"} & found.keys()
    found = gains(smaller(pull_codec="int8"))
    assert found["--codec int8"] == found["--codec topk"] == pytest.approx(4)
    case = smaller(accumulate=3, codec="topk", pull_codec="int8").case
    assert (case.every, case.grads, case.params) == (3, 0.02, 0.25)
    seldom = smaller(accumulate=3)
    assert (seldom.pushed, seldom.step_s) == (3 * M / 3, M / RATE)


def test_powersgd_adds_up_factors_alone() -> None:
    topology = dataclasses.replace(SMALLER, codecs={"powersgd": 0.02})
    found = explain.explain(resolve({"mode": "sync", "codec": "powersgd"}), topology)
    around = 2 * 3 / 4 * 0.02 * M
    assert (found.flows.sum(axis=(1, 2)) == around).all()
    assert found.step_s == pytest.approx(around / RATE)
    other = explain.explain(resolve({"mode": "sync"}), topology)
    assert gains(other)["--codec powersgd"] == pytest.approx(50)
    # w1 of 64 x 300 and w2 of 300 x 300; rank 3; the rest goes as it is.
    options = {"mode": "sync", "codec": "powersgd", "powersgd_rank": 3, "hidden": (300, 300)}
    sent = 3 * (64 + 300) + 3 * (300 + 300) + 300 + 300 + 300 * 10 + 10
    moved = human_bytes(4 * sent)
    text = explain_alone(resolve(options), Question(ranks=4, nodes=2))
    assert text.count(f"{'link':10s}  {moved:>10s}  {moved:>10s}") == 2


def test_the_example_in_the_guide() -> None:
    pattern = r"^\$ python -m mpips.train (--explain .*)\n((?s:.*?))^```"
    ((command, shown),) = re.findall(pattern, GUIDE, re.M)
    line, at = parse_command_line(command.split()), 0
    told = explain_alone(resolve(line.options), line.question)
    parts = shown.split("...\n")
    assert len(parts) > 2, "the guide leaves out lines"
    assert told.startswith(parts[0])
    for part in parts:
        at = told.index(part, at) + len(part)


def test_worlds_that_are_only_spoken_of() -> None:
    text = explain_alone(Config(), Question(ranks=5, nodes=4))
    rows = [line.split()[:4] for line in text.splitlines() if line.startswith("   ")]
    assert [row[:2] for row in rows if row[2] == "link"] == [[str(k), f"node{k}"] for k in range(4)]
    ranks = [row[2:] for row in rows if row[2] != "link"]
    assert ranks == [["1", "server"], ["1", "worker"], *3 * [["1", "worker"]]]
    assert explain_alone(Config(node_size=3), Question(ranks=6)).count("  link  ") == 2
    assert max(map(len, text.splitlines())) <= 100
    text = explain_alone(resolve({"evaluators": 2, "servers": 1}), Question(ranks=6))
    assert "of each of 3 workers" in text
    assert "beside them 2 evaluate" in text
    with pytest.raises(UserError, match="nodes 3 with 2 ranks, expected nodes <= 2"):
        explain_alone(Config(), Question(ranks=2, nodes=3))
    backed = resolve({"mode": "sync", "servers": 1, "backup_workers": 3})
    with pytest.raises(UserError, match="3 of 3 workers, expected backup_workers <= 2"):
        explain_alone(backed, Question(ranks=4, nodes=4))
    with pytest.raises(UserError, match="without a world, expected --ranks N"):
        explain_alone(Config(), Question())
