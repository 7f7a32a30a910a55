"""Measures of links and of many ranks: their rows, and the bytes that they count."""

import time
from pathlib import Path

import pytest
from verdict import check

from mpips.errors import UserError
from mpips.mpi.world import Cluster
from mpips.tools.bench import link, wire
from mpips.tools.bench.measure import Options, in_turn

pytestmark = pytest.mark.mpi(min_size=2)
PAIR = pytest.mark.world(max_size=2, min_nodes=2)
QUICK = Options(repeats=1, quick=True)
SIZE = 1 << 20
MB = 1_000_000


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
