"""Synchronous rounds against a serial run in float64, written from the equations."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import SLOTS, TOLERANCE, local_step
from test_window import check_shared_out, need_move_pages
from verdict import check

from mpips.config import Config
from mpips.datasets import DataInfo
from mpips.layout import Layout
from mpips.layout.roles import assign
from mpips.mpi import window as windows
from mpips.mpi.world import Cluster
from mpips.planning.explain import Topology, explain
from mpips.planning.job import Job
from mpips.planning.traffic import GRADS, IN, OUT, PARAMS
from mpips.problems import Problem
from mpips.problems.base import initial_vector
from mpips.rounds import reduction
from mpips.rounds.base import REPORT, Report, Round
from mpips.rounds.shared import make_round

pytestmark = pytest.mark.mpi
SMALL = pytest.mark.world(max_size=4)

STEPS = 3
LARGE = {"w": (130, 100), "b": (7,), "v": (21_000,)}  # several blocks a shard
TINY = {"w": (3,), "b": (2,)}  # most shards are empty
INFO = DataInfo("none", 1000, 0, (1,), (), None, "none")


class Given(Problem):
    """A layout; the gradients are made up by the tests."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: Config) -> None:
        super().__init__(INFO, config)
        self.layout = Layout.of(shapes)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        pairs = zip(self.layout.names, self.layout.shapes, strict=True)
        return {name: rng.standard_normal(shape) for name, shape in pairs}

    def loss_and_grad(self, params: Any, batch: Any, out: Any) -> float:
        raise NotImplementedError

    def evaluate(self, params: Any, batch: Any) -> dict[str, float]:
        raise NotImplementedError


def make_job(cluster: Cluster, servers: int, shapes: Any, **options: Any) -> Job:
    cluster.roles = assign("sync", cluster.hosts, cluster.node_of, servers)
    return job_of(cluster, shapes, **options)


def job_of(cluster: Cluster, shapes: Any, **options: Any) -> Job:
    """Return a job of the cluster's roles."""
    config = dataclasses.replace(
        Config(), mode="sync", schedule="warmup", warmup_steps=3, lr=0.05, **options
    )
    return Job(config, cluster, INFO, None, Given(shapes, config), Path("unused"), 0)


def shares(workers: int, step: int) -> list[float]:
    """Unequal weights that sum to 1; of two workers or more, one has none."""
    raw = np.random.default_rng([step, 7]).uniform(0.2, 1.0, workers)
    if workers > 1:
        raw[step % workers] = 0.0
    return (raw / raw.sum()).tolist()


def gradient(worker: int, step: int, params: np.ndarray) -> np.ndarray:
    """A gradient that depends on the parameters, as a real one does."""
    noise = np.random.default_rng([worker, step]).standard_normal(params.size)
    return (0.3 * params + noise).astype(params.dtype)


def serial(job: Job, workers: int) -> np.ndarray:
    """One process with the whole batch: mean gradient, clipped, then the rule."""
    c = job.config
    w = initial_vector(job.problem, c.seed, job.dtype).astype("f8")
    slots = [np.zeros_like(w) for _ in range(SLOTS[c.optimizer])]
    for step in range(1, STEPS + 1):
        seen, weights = w.astype(job.dtype), shares(workers, step)
        g = sum(p * gradient(k, step, seen).astype("f8") for k, p in enumerate(weights) if p)
        local_step(c, w, g, slots, step, c.lr * min(1.0, step / c.warmup_steps))
    return w


def start(job: Job) -> Round:
    """Make a round with the job's first parameters."""
    rounds = make_round(job)
    if job.cluster.rank in job.cluster.roles.owners:
        job.fill(rounds.params, rounds.slots, job.shard)
    rounds.publish_start()
    return rounds


def step(job: Job, rounds: Round, number: int, report: Report | None = None) -> Report:
    """Make a step in which a worker without samples has no gradient."""
    weights, worker = shares(len(job.cluster.roles.workers), number), job.worker_id
    if worker is not None:
        rounds.grad[:] = gradient(worker, number, rounds.replica)
        if not weights[worker]:
            rounds.grad[:] = np.nan
    return rounds.exchange(number, weights, report or Report(loss_sum=1.0))


def end(job: Job, rounds: Round) -> np.ndarray:
    """Free the round; returns this rank's replica."""
    found = rounds.replica.copy()
    job.cluster.barrier()
    rounds.free()
    rounds.free()
    return found


def in_rounds(job: Job) -> tuple[np.ndarray, list[object]]:
    """Train by rounds; returns this worker's replica at the end, and what was wrong."""
    cluster, wrong, rounds = job.cluster, list[object](), start(job)
    for number in range(1, STEPS + 1):
        rank = cluster.rank
        mine = Report(rank + number, checkpoint=2.0 * rank, signals=float(rank == 0))
        agreed = step(job, rounds, number, mine)
        ranks = cluster.world * (cluster.world - 1) / 2
        expected = Report(ranks + number * cluster.world, checkpoint=2 * ranks, signals=1.0)
        if agreed != expected:
            wrong.append((number, agreed, expected))
    return end(job, rounds), wrong


@SMALL
@pytest.mark.parametrize("reduce", ["shared", "allreduce"])
def test_all_rounds_count_the_bytes_that_are_explained(cluster: Cluster, reduce: str) -> None:
    """Each node sends its sums to the others' owners, and has their results and what they begin."""
    job = make_job(cluster, 0, LARGE, reduce=reduce)
    rounds = start(job)
    rounds.grad[:] = 1
    rounds.exchange(1, np.full(cluster.world, 1 / cluster.world), Report())
    sent, received = rounds.transfers.bytes_sent, rounds.transfers.bytes_received
    moved = np.array(cluster.comm.allgather((sent, received))).sum(axis=0)
    crosses, vector = cluster.nodes - 1, 4 * job.layout.size
    both = vector if reduce == "allreduce" else 0  # sums, and what owners make of them
    expected = vector + REPORT.size, 2 * vector + REPORT.size + both
    good = np.allclose(moved, crosses * np.array(expected))
    check(cluster.comm, good, (moved, expected))
    topology = Topology(cluster.hosts, cluster.node_of, job.layout.size, 1.0)
    said = explain(job.config, topology).flows.sum(axis=(0, 1))
    good = said[GRADS, OUT] == said[PARAMS, IN] == crosses * vector
    check(cluster.comm, good or reduce == "allreduce", said)
    cluster.barrier()
    rounds.free()


def distances(job: Job, end: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    ours, theirs = job.layout.views(end.astype("f8")), job.layout.views(expected)
    norm = np.linalg.norm
    return {name: float(norm(ours[name] - theirs[name]) / norm(theirs[name])) for name in ours}


def compare(cluster: Cluster, servers: int, shapes: Any, **options: Any) -> np.ndarray:
    """Check rounds against the serial run; returns a worker's result, the same on all ranks."""
    if servers >= cluster.world:
        pytest.skip("leaves no worker")
    if options["reduce"] == "allreduce" and cluster.nodes not in (1, cluster.world):
        pytest.skip("knows no nodes")
    job = make_job(cluster, servers, shapes, **options)
    end, wrong = in_rounds(job)
    check(cluster.comm, not wrong, wrong)
    first = cluster.comm.bcast(end, cluster.roles.workers[0])
    if job.worker_id is not None and not np.array_equal(first, end):
        wrong.append("replicas differ")
    if cluster.rank == 0:
        remote = distances(job, first, serial(job, len(cluster.roles.workers)))
        if not max(remote.values()) <= TOLERANCE[job.config.dtype]:
            wrong.append(remote)
    check(cluster.comm, not wrong, wrong)
    return first


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("reduce", ["shared", "allreduce"])
@pytest.mark.parametrize(
    ("shapes", "dtype", "optimizer", "clip"),
    [
        (LARGE, "float64", "adam", 0.5),
        pytest.param(LARGE, "float32", "momentum", 0.0, marks=SMALL),
        (TINY, "float64", "momentum", 0.1),
    ],
    ids=["large", "single", "tiny"],
)
def test_rounds_equal_a_serial_run(
    cluster: Cluster,
    servers: int,
    reduce: str,
    shapes: Any,
    dtype: str,
    optimizer: str,
    clip: float,
) -> None:
    compare(cluster, servers, shapes, reduce=reduce, dtype=dtype, optimizer=optimizer, clip=clip)


@SMALL
@pytest.mark.parametrize("reduce", ["shared", "allreduce"])
def test_equal_runs_give_equal_bits_whatever_the_pieces(
    cluster: Cluster, reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = min(1, cluster.world - 1)
    options: dict[str, Any] = {"reduce": reduce, "optimizer": "adam", "dtype": "float32"}
    first = compare(cluster, servers, LARGE, **options)
    again = compare(cluster, servers, LARGE, **options)
    same = np.array_equal(first.view("u1"), again.view("u1"))
    check(cluster.comm, same, "equal runs differ")
    if reduce == "shared":  # an Allreduce may add in another order for another length
        monkeypatch.setattr(windows, "TRANSFER_MAX_BYTES", 4096)
        pieces = compare(cluster, servers, LARGE, **options)
        check(cluster.comm, np.array_equal(first.view("u1"), pieces.view("u1")), "pieces differ")


@pytest.mark.world(min_nodes=4)
def test_nodes_without_workers_sum_in_parts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a serial run does, and to the same bits whatever the parts, on slow links and others."""
    servers = [rank for rank, node in enumerate(cluster.node_of) if node > 2]
    ends = []
    monkeypatch.setattr(reduction, "SMALL_BYTES", 1 << 12)
    for part_bytes, slow in ((1 << 14, 0.0), (1 << 14, np.inf), (1 << 30, 0.0), (1 << 30, np.inf)):
        monkeypatch.setattr(reduction, "PART_BYTES", part_bytes)
        monkeypatch.setattr(reduction, "SLOW", slow)
        cluster.roles = assign("sync", cluster.hosts, cluster.node_of, server_ranks=servers)
        job = job_of(cluster, LARGE, optimizer="adam", dtype="float64")
        check(cluster.comm, all(shard.size for shard in job.shards), job.shards)
        found, wrong = in_rounds(job)
        check(cluster.comm, not wrong, wrong)
        ends.append(cluster.comm.bcast(found, cluster.roles.workers[0]))
    remote = distances(job, ends[0], serial(job, len(cluster.roles.workers)))
    check(cluster.comm, max(remote.values()) <= TOLERANCE["float64"], remote)
    check(cluster.comm, all(np.array_equal(ends[0], other) for other in ends[1:]), "parts differ")


def test_a_replica_is_first_touched_by_its_owners(cluster: Cluster) -> None:
    """Not by the leader of the node alone; what others own, by the agents."""
    need_move_pages()
    job = make_job(cluster, 0, {"w": (2000, 100)}, reduce="shared")
    rounds = make_round(job)
    check_shared_out(cluster, rounds.replica, job.shard.range, cluster.world)
    end(job, rounds)
