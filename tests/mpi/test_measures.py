"""Measures of links: those of a start, the same on every rank, and those of the bench."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verdict import check

from mpips.errors import UserError
from mpips.mpi.world import Cluster
from mpips.session import probe
from mpips.tools.bench import link, wire
from mpips.tools.bench.measure import Options, in_turn
from mpips.tools.bench.vector import make_job

pytestmark = pytest.mark.mpi(min_size=2)
PAIR = pytest.mark.world(max_size=2, min_nodes=2)
QUICK = Options(repeats=1, quick=True)
SIZE, LARGE = 1 << 20, 1 << 18  # bytes, parameters


@pytest.mark.mpi(min_size=3)
@pytest.mark.world(max_size=4, min_nodes=2)
def test_a_link_has_its_rows(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"TRANSFERS": (1, 2), "OVERLAP_STEPS": 2, "READS": 5, "ROUND_BYTES": 1 << 16}
    for name, value in few.items():
        monkeypatch.setattr(link, name, value)
    found = [row.measure for row in link.run(cluster, QUICK)]
    due = ["remote pull", "remote push", "remote pull+push", *["remote step"] * 3, "remote read"]
    due.append("remote round")
    pair = cluster.node_of.index(0), cluster.node_of.index(1)
    check(cluster.comm, found == (due if cluster.rank in pair else due[-1:]), found)


@pytest.mark.world(max_size=4)
def test_sides_take_turns_until_the_last_rank_is_done(cluster: Cluster) -> None:
    """The first turn does not count, and all ranks know the same."""
    turns: list[str] = []

    def side(name: str) -> None:
        turns.append(name)
        time.sleep(0.01 * (cluster.rank == 0))

    found = in_turn(cluster, {k: lambda k=k: side(k) for k in "ab"}, 3)
    check(cluster.comm, "".join(turns) == "ab" * (3 + 1), turns)
    check(cluster.comm, all(len(found[k]) == 3 and min(found[k]) >= 0.01 for k in "ab"))
    check(cluster.comm, len(set(map(str, cluster.comm.allgather(found)))) == 1, found)


@PAIR
def test_what_no_counter_sees_is_an_error(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = tmp_path / "dev"
    still.write_text("two lines\nof headings\neth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(wire, "COUNTERS", still)
    told = "0 bytes counted for a push of 1,048,576 bytes, expected at least 90% of them; let MPI"
    with pytest.raises(UserError, match=told):
        list(wire.run(cluster, Options(sizes=(SIZE,))))


def start(cluster: Cluster, size: int = LARGE, **options: Any) -> probe.Choice:
    return probe.choose_codecs(make_job(cluster, size, "async", servers=1, **options))


@pytest.mark.world(max_size=4, min_nodes=2)
def test_all_ranks_choose_the_same_of_what_is_open(cluster: Cluster) -> None:
    links, ranks = probe.measure_links(cluster), np.bincount(cluster.node_of)
    check(cluster.comm, 0 < links.latency_s < 1 and 1e5 < links.bytes_per_s < 1e13, links)
    check(cluster.comm, np.allclose(links.cores, ranks * cluster.comm.bcast(cluster.cores_a_rank)))
    found = start(cluster, codec="auto", pull_codec="auto")
    check(cluster.comm, len(set(cluster.comm.allgather((found.push, found.pull)))) == 1, found)
    check(cluster.comm, len(found.predicted) == 16, found.predicted)
    taken, none = found.predicted[found.push, found.pull], found.predicted["none", "none"]
    check(cluster.comm, taken <= none and len(found.lines) == 4, found)
    found = start(cluster, codec="int8", pull_codec="auto", far_read="get")
    check(cluster.comm, set(found.predicted) == {("int8", "none")}, found)


@pytest.mark.world(max_size=4)
def test_small_parameters_and_one_node_need_no_measuring(cluster: Cluster) -> None:
    whole = Cluster(cluster.comm, cluster.world)
    for ranks, size, why in ((whole, LARGE, probe.APART), (cluster, 1000, probe.SMALL)):
        found = start(ranks, size, codec="auto", pull_codec="auto")
        why = why if ranks.nodes > 1 else probe.APART
        check(cluster.comm, found.predicted == {}, found)
        line = f"codecs chosen: pushes none, pulls none: {why}"
        check(cluster.comm, found.lines == (line,), found)
    whole.barrier()
    whole.free()
