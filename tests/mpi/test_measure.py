"""How the sides of a comparison take turns, on all ranks."""

import time

import pytest
from verdict import check

from mpips.mpi.world import Cluster
from mpips.ps import server
from mpips.tools.bench.measure import in_turn
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.vector import make_job

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


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=4)
@pytest.mark.parametrize("turn_s", [0.0, 60.0])
def test_a_turn_applies_pushes_for_so_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    """Both of every local worker, or one; remote ones come when they come."""
    monkeypatch.setattr(server, "TURN_S", turn_s)
    exchange = Exchange(make_job(cluster, 1000, "async", servers=1))
    workers = cluster.roles.workers
    local = cluster.nodes == 1
    if exchange.server is None and local:
        for _ in range(2):
            exchange.step()
    cluster.barrier()
    applied = 0
    if exchange.server is not None and local:
        assert exchange.server.turn()
        applied = exchange.server.store.version
    exchange.serve_while(lambda: None, 2 * local)
    due = (2 * len(workers) if turn_s else 1) * local * (exchange.server is not None)
    check(cluster.comm, applied == due, (applied, due))
    exchange.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=4, min_nodes=2)
def test_an_exchange_is_freed_when_nothing_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker reads ahead for a step that never comes: into memory that is about to go."""
    exchange = Exchange(make_job(cluster, 10_000, "async", servers=1))
    exchange.exchange(3)
    puller, barrier, reading = vars(exchange).get("puller"), cluster.barrier, list[bool]()

    def note() -> float:
        reading.append(puller is not None and puller.reading)
        return barrier()

    note()
    monkeypatch.setattr(cluster, "barrier", note)
    exchange.free()
    remote = puller is not None and not cluster.is_local(cluster.roles.servers[0])
    check(cluster.comm, reading == [remote, False], reading)
