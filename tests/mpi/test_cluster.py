import contextlib
import os
import random
import time

import numpy as np
import pytest
from launch import until
from mpi4py import MPI
from verdict import check

from mpips.errors import UserError
from mpips.layout.roles import Roles
from mpips.mpi import waiting
from mpips.mpi.collective_errors import CollectiveError, call_on_all
from mpips.mpi.start import check_world, share_cores
from mpips.mpi.waiting import Background, Backoff
from mpips.mpi.world import Cluster

pytestmark = pytest.mark.mpi


def test_nodes_are_runs_of_ranks(cluster: Cluster, node_size: int) -> None:
    world, rank = cluster.world, cluster.rank
    if node_size:
        assert cluster.node_of == [r // node_size for r in range(world)]
        assert cluster.nodes == -(-world // node_size)
    mine = [r for r in range(world) if cluster.node_of[r] == cluster.node_of[rank]]
    assert cluster.my_node == mine
    assert [cluster.is_local(r) for r in range(world)] == [r in mine for r in range(world)]
    assert cluster.node.size == len(mine)
    assert cluster.node.rank == mine.index(rank)
    assert len(cluster.hosts) == world
    check(cluster.comm, len(set(cluster.comm.allgather(tuple(cluster.node_of)))) == 1)


def test_ranks_that_share_cores_do_not_interrupt_each_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has chosen a policy."""
    before, found = os.sched_getscheduler(0), list[int]()
    wanted = os.SCHED_BATCH if cluster.ranks_per_core > 1 else os.SCHED_OTHER
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, policy, param: found.append(policy))
    share_cores(oversubscribed=True)
    check(cluster.comm, (before, found) == (wanted, []), (before, found))


def test_messages_come_once_and_in_order(cluster: Cluster) -> None:
    """Also without a payload, and larger than what either MPI sends eagerly."""
    sizes = [*random.Random(cluster.rank).choices([0, 10, 3000], k=60), 300_000]
    for k, size in enumerate(sizes):
        for dest in range(cluster.world):
            cluster.send(dest, f"kind {k}", np.full(size, k % 100, "u1") if size else None)
    found: dict[int, list[int]] = {r: [] for r in range(cluster.world)}
    wrong = []

    def complete() -> bool:
        for source, kind, payload in cluster.poll():
            found[source].append(k := int(kind.removeprefix("kind ")))
            if payload is not None and not (payload == k % 100).all():
                wrong.append((source, kind, payload))
        return all(len(ks) >= len(sizes) for ks in found.values())

    cluster.wait(complete)
    cluster.barrier()
    complete()  # nothing may come twice
    wrong += [(source, ks) for source, ks in found.items() if ks != list(range(len(sizes)))]
    check(cluster.comm, not wrong, wrong)


def test_values_are_brought_to_the_coordinator_and_from_a_rank(cluster: Cluster) -> None:
    """Several times in a row: only the coordinator waits, so the others run ahead."""
    turns = 4
    coordinator = cluster.world - 1
    workers = tuple(r for r in range(cluster.world) if r != coordinator) or (0,)
    cluster.roles = Roles((coordinator,) if coordinator else (), workers)
    wrong = []
    for turn in range(turns):
        if cluster.rank == coordinator and turn == 0:
            time.sleep(0.02)
        values = cluster.gather({"rank": cluster.rank, "turn": turn})
        expected = [{"rank": r, "turn": turn} for r in range(cluster.world)]
        if values != (expected if cluster.rank == coordinator else None):
            wrong.append((turn, values))
    root = 0 if coordinator else cluster.world - 1  # another one than gathers
    values = [cluster.share((cluster.rank, turn), root) for turn in range(turns)]
    wrong += [values] if values != [(root, turn) for turn in range(turns)] else []
    check(cluster.comm, not wrong, wrong)


@pytest.mark.skipif(
    MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="then the thread calls nothing"
)
def test_an_error_in_the_background_is_raised_where_the_rank_computes() -> None:
    called = list[bool]()

    def fail() -> None:
        called.append(True)
        raise UserError("rank 1 has died", "all ranks")

    background = Background(fail)
    with pytest.raises(UserError, match="rank 1 has died"), background:
        until(lambda: bool(called))
    background.end()
    assert len(called) == 1


def test_an_error_on_one_rank_is_raised_on_all(cluster: Cluster) -> None:
    last = cluster.rank == cluster.world - 1
    error = UserError("this", "that", "do so") if last else None
    with pytest.raises(CollectiveError, match=r"^this, expected that; do so$"):
        call_on_all(cluster.comm, error)
    call_on_all(cluster.comm, None)


@pytest.mark.world(max_size=2)
@pytest.mark.parametrize(
    ("name", "told"), [("SLURM_STEP_NUM_TASKS", "srun --mpi="), ("PMI_SIZE", "the mpirun of")]
)
def test_a_lonely_rank_is_refused(
    cluster: Cluster, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step or a launch of several."""
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    check_world(cluster.comm)
    monkeypatch.setenv(name, "4")
    refused = pytest.raises(UserError, match=f"world of 4; use {told}")
    with refused if cluster.world == 1 else contextlib.nullcontext():
        check_world(cluster.comm)


@pytest.mark.world(max_size=1)
@pytest.mark.parametrize(
    ("ranks_per_core", "first_us"), [(0.5, 20), (1.0, 20), (1.5, 20), (4.0, 120), (256.0, 1000)]
)
def test_backoff_spins_then_yields_then_sleeps(
    cluster: Cluster, ranks_per_core: float, first_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, did = [0.0], list[str | float]()
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(waiting.time, "sleep", did.append)
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: did.append("yield"))
    backoff = Backoff(ranks_per_core)
    for now in (0.0, 10e-6, 100e-6, 300e-6, 0.5, 1.0, 60.0):
        clock[0] = now
        backoff.pause()
    yields = 1 + (ranks_per_core > 1)  # where ranks outnumber cores, nobody spins
    assert did[:yields] == ["yield"] * yields
    sleeps = [d for d in did if d != "yield"]
    assert sleeps == sorted(sleeps)
    assert 20e-6 <= sleeps[0] == pytest.approx(1e-6 * first_us, rel=0.02)
    assert sleeps[-1] == pytest.approx(1e-3)
    backoff.reset()
    did.clear()
    backoff.pause()
    assert did == ["yield"] * (yields - 1)
