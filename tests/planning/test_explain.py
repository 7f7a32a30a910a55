"""``--explain``: what it says of the bottleneck, what would relieve it, and what a run counts."""

import dataclasses
import re
from typing import Any

import pytest
from launch import ROOT

from mpips.config import Config
from mpips.config.command_line import Question, parse_command_line
from mpips.config.jobfile import resolve
from mpips.errors import UserError, human_bytes
from mpips.planning import explain
from mpips.planning.explain import Explanation, Topology, explain_alone, explanation_text

GUIDE = (ROOT / "mpips" / "tools" / "guide" / "slow-links.md").read_text()
SEVERAL = re.compile("accumulate|local_sgd|easgd")
N = 16 * 3600  # parameters: as many cache lines for each of up to 6 owners
M = 4 * N
RATE = 1e6


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
    with pytest.raises(UserError, match="without a world, expected --ranks N"):
        explain_alone(Config(), Question())
