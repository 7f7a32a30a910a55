"""NUMA nodes of made-up hosts, and how ranks are bound to them."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launch
import pytest

from mpips.config import Config
from mpips.config.jobfile import resolve
from mpips.planning.binding import (
    Cores,
    binding_text,
    bound,
    cores_a_rank,
    judge_binding,
    numa_nodes,
    spread_text,
)


@pytest.mark.parametrize(
    ("online", "nodes", "expected"),
    [
        ("0-7", {0: "0-1,4-5", 1: "2-3,6-7"}, {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}),  # threads
        ("0,2-5", {0: "0-3", 1: "4-7"}, {0: [0, 2, 3], 1: [4, 5]}),  # some are off
        ("0-3", {0: "0-3", 1: "4-7"}, {0: [0, 1, 2, 3]}),  # a socket is off
        ("0-1", {0: "0-1", 2: "", 10: ""}, {0: [0, 1]}),  # memory alone
        ("0-3", {1: "0-1", 10: "2", 2: "3"}, {1: [0, 1], 2: [3], 10: [2]}),
        ("0-1", {}, {}),
        (None, {0: "0-1"}, {}),
    ],
)
def test_the_kernel_tells_of_nodes(
    online: str | None, nodes: Mapping[int, str], expected: Mapping[int, Any], tmp_path: Path
) -> None:
    files = {f"node/node{node}/cpulist": cores for node, cores in nodes.items()}
    files |= {"node/possible": "0-63"} if nodes else {}
    files |= {"cpu/online": online} if online is not None else {}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = numa_nodes(tmp_path)
    assert list(found.items()) == [(node, frozenset(expected[node])) for node in sorted(expected)]


def test_this_host_has_the_cores_of_this_process() -> None:
    cores, nodes = bound()
    assert cores == os.sched_getaffinity(0)
    assert not nodes or cores <= frozenset().union(*nodes.values())


def host(nodes: int, each: int) -> dict[int, Cores]:
    return {k: frozenset(range(k * each, (k + 1) * each)) for k in range(nodes)}


def masks(*cores: range) -> list[Cores]:
    return [frozenset(mask) for mask in cores]


def blocks(n: int, size: int) -> list[Cores]:
    """As a launcher binds that gives each rank the next cores."""
    return masks(*(range(k * size, (k + 1) * size) for k in range(n)))


ALL_OF = "of them may run on several of"


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        (masks(range(32)) * 8, host(1, 32), ""),
        (masks(range(2)) * 8, host(1, 2), ""),  # they take turns, which is no matter of binding
        (blocks(8, 4), host(2, 16), ""),
        (masks(range(8)) * 4, host(4, 8), ""),  # of a job that has one NUMA node
        (masks(range(32)), host(2, 16), ""),  # alone on both
        (masks(range(32), range(32, 64)), host(8, 8), ""),
        (masks(range(4)) * 2, {}, ""),
        (masks(range(32)) * 8, host(2, 16), f"8 {ALL_OF} 2 NUMA nodes, as they are not bound.*=4 "),
        (blocks(5, 3), host(2, 8), f"1 {ALL_OF} 2 NUMA nodes -> .*=2 "),
        (blocks(5, 6), host(4, 8), f"2 {ALL_OF} 4 NUMA nodes -> .*=4 "),
        (masks(range(4)) * 8, host(2, 16), "8 of them are bound to 4 cores"),
        (masks(range(1), range(1), range(1, 3)), {}, "2 of them are bound to 1 core -> .*none"),
    ],
)
def test_what_is_said_of_a_binding(
    ranks: Sequence[Cores], nodes: Mapping[int, Cores], expected: str
) -> None:
    told = " -> ".join(filter(None, judge_binding(ranks, nodes)))
    assert re.match(expected or "$", told), told


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 6, 7, 16])
def test_as_many_cores_as_are_proposed_lie_on_one_node(nodes: int, size: int) -> None:
    for ranks in range(nodes, nodes * size + 1):
        each = cores_a_rank(ranks, [size] * nodes)
        assert each * ranks <= nodes * size
        assert judge_binding(blocks(ranks, each), host(nodes, size)) == ("", "")


def test_how_ranks_are_spread() -> None:
    assert spread_text(blocks(8, 4), host(2, 16)) == " of 2 NUMA nodes, 4 on each"
    assert spread_text(blocks(3, 8), host(2, 16)) == " of 2 NUMA nodes, 2, 1 on them"
    assert spread_text(masks(range(32)), host(2, 16)) == " of 2 NUMA nodes"
    assert spread_text(blocks(8, 4), host(1, 32)) == spread_text(blocks(2, 4), {}) == ""


def told(config: Config, ranks: Sequence[Cores], nodes: Mapping[int, Cores], hosts: int = 1) -> str:
    """Of so many hosts, each with those ranks."""
    node_of = [k for k in range(hosts) for _ in ranks]
    every = [(mask, nodes) for mask in ranks] * hosts
    return binding_text(config, [f"host{k}" for k in node_of], node_of, every)


def test_hosts_that_are_bound_alike_share_a_line() -> None:
    assert told(resolve({}), masks(range(4)) * 4, host(1, 4), 3) == ""
    assert told(resolve({"mode": "sync"}), blocks(8, 4), host(2, 16), 2) == (
        "binding on host0, host1: 8 ranks on 32 cores of 2 NUMA nodes, 4 on each\n"
    )
    (line,) = told(resolve({}), masks(range(32)) * 8, host(2, 16), 5).splitlines()
    assert line.startswith("binding on host0, host1, host2 and 2 more: 8 ranks on 32 cores, but 8")
    assert "mpirun --map-by numa --bind-to numa (MPICH: -bind-to numa), srun" in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"servers": 4}, "0,4,8,12"),
        ({"servers": 4, "server_ranks": (3, 4, 8, 12)}, ""),
        ({"servers": 4, "server_ranks": (4, 5, 8, 12)}, "0,4,8,12"),
        ({"servers": 6}, "0,1,4,8,9,12"),
        ({"servers": 1}, ""),
        ({"servers": 4, "spares": 1}, ""),
        ({"mode": "sync"}, ""),
        ({"servers": 3, "evaluators": 8}, "0,1,4"),  # the first 8 ranks train
    ],
)
def test_a_server_for_each_numa_node(options: dict[str, object], expected: str) -> None:
    text = told(resolve(options), blocks(16, 2), host(4, 8))
    assert re.findall("--server-ranks (.*) would", text) == [expected] * bool(expected)


def test_servers_of_several_nodes_and_of_ranks_mapped_in_turn() -> None:
    text = told(resolve({"servers": 4}), blocks(4, 4), host(2, 8), 2)
    assert "--server-ranks 0,2,4,6 would spread them" in text
    in_turn = masks(range(4), range(8, 12), range(4, 8), range(12, 16))
    assert "--server-ranks" not in told(resolve({"servers": 4}), in_turn, host(2, 8), 2)
    assert "--server-ranks" not in told(resolve({"servers": 2}), masks(range(16)) * 4, host(2, 8))


BOUND = """
import os, runpy
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
runpy.run_module("mpips.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.launch
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_on_one_core_are_told_of(tmp_path: Path) -> None:
    done = launch.run(2, ["-c", BOUND, "--explain"], tmp_path).check()
    (line,) = [line for line in done.output.splitlines() if line.startswith("binding on ")]
    assert "2 ranks on 1 core, but 2 of them are bound to 1 core; bind ranks" in line
