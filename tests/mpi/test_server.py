"""The compiled loop of a server, and the agreement of all servers on a record."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from verdict import check

from mpips.mpi.collectives import cluster_subset
from mpips.mpi.world import Cluster
from mpips.ps import replay_log
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.vector import make_job

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=3)
@pytest.mark.parametrize(  # each rule is compiled
    ("rule", "dtype", "scheduled"),
    [("momentum", "float64", True), ("adam", "float32", True), ("adam ema", "float64", False)],
)
def test_the_compiled_loop_has_the_bits_of_python(
    cluster: Cluster, rule: str, dtype: str, scheduled: bool
) -> None:
    """Pushes with factors of the rate; a program's schedule is asked for the run's updates only."""
    found, asked, steps = [], list[int](), 8
    for loop in (True, False):
        name, *mean = rule.split()
        given = {"optimizer": name, "ema": 0.9 if mean else 0.0, "dtype": dtype, "steps": steps}
        job = make_job(cluster, 1000, "async", servers=1, **given)
        if scheduled:
            job.problem.rate_schedule = lambda step: asked.append(step) or 0.1 / step
        exchange = Exchange(job)
        if exchange.server is not None:
            assert (exchange.server.shards[0].local is None) == (cluster.nodes > 1)
            if not loop:
                exchange.server.shards[0].local = None
        for step in range(steps // 2 * (cluster.nodes == 1)):  # remote pushes come when they come
            for factor in (1.0, 0.9**step - 0.01 * cluster.rank) if exchange.server is None else ():
                job.rate_factor = factor
                exchange.step()
            cluster.barrier()
            exchange.serve_while(lambda: None, 2)
            cluster.barrier()  # all are applied before the next is computed
        if exchange.server is not None:
            store = exchange.server.store
            assert store.tally.handled == store.version
            found.append([a.tobytes() for a in (store.params, *store.slots)])
        exchange.free()
    check(cluster.comm, not found or found[0] == found[1])
    due = steps * len(cluster.roles.workers)
    check(cluster.comm, max(asked, default=0) <= due, asked)


@pytest.mark.mpi(min_size=3)
@pytest.mark.world(max_size=4)
def test_a_server_that_cannot_record_ends_the_record_of_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.world - 1
    job = make_job(cluster, 1000, "async", servers=servers, record=True, read="consistent")
    ranks = cluster.roles.servers
    comm, begun, parts = cluster_subset(cluster, ranks), list[bool](), list[list[int]]()
    with TemporaryDirectory() as name:
        job = replace(job, out=Path(cluster.comm.bcast(name)))
        for file in (replay_log.FILE, "missing/{}"):
            if cluster.rank == ranks[-1]:
                monkeypatch.setattr(replay_log, "FILE", file)
            if cluster.rank in ranks:
                own = SimpleNamespace(idle=False, params=np.zeros(9, "f4"))
                recorder = replay_log.recorder_of(job, SimpleNamespace(servers=comm, server=own))
                begun.append(recorder is not None)
                if recorder is not None:
                    recorder.close()
            cluster.barrier()
            parts.append(replay_log.part_numbers(job.out))
            cluster.barrier()
    due = [True, False] if cluster.rank in ranks else []
    check(cluster.comm, (begun, parts) == (due, [[1], [1]]), (begun, parts))
