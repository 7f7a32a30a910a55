"""How the sides of a comparison take turns, on all ranks."""

import time

import pytest
from verdict import check

from mpips.bench.measure import in_turn
from mpips.cluster import Cluster

pytestmark = pytest.mark.mpi
REPEATS, NAP_S = 3, 0.01


def test_sides_take_turns_and_the_first_turn_does_not_count(cluster: Cluster) -> None:
    turns: list[str] = []
    found = in_turn(cluster, {k: lambda k=k: turns.append(k) for k in "ab"}, REPEATS)
    check(cluster.comm, "".join(turns) == "ab" * (REPEATS + 1), turns)
    lengths = {name: len(times) for name, times in found.items()}
    check(cluster.comm, lengths == {"a": REPEATS, "b": REPEATS}, lengths)


def test_a_turn_lasts_until_its_last_rank_is_done(cluster: Cluster) -> None:
    """And all ranks know the same."""

    def side() -> None:
        time.sleep(NAP_S * (cluster.rank == 0))

    found = in_turn(cluster, {"a": side}, REPEATS)["a"]
    check(cluster.comm, min(found) >= NAP_S, found)
    check(cluster.comm, len(set(map(tuple, cluster.comm.allgather(found)))) == 1, found)
