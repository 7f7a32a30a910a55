"""Rounds of PowerSGD against a serial run in float64, written from the paper's algorithms."""

from typing import Any

import numpy as np
import pytest
from references import SLOTS, local_step
from test_rounds import Given, end, gradient, make_job, shares, start, step
from verdict import check

from mpips.codecs.powersgd import drawn
from mpips.errors import UserError
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.problems.base import initial_vector
from mpips.rounds.base import Round
from mpips.rounds.powersgd import PowerSgdRound
from mpips.rounds.shared import make_round

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4, min_nodes=2)]

STEPS = 5
SHAPES = {"w": (200, 120), "b": (7,), "t": (40, 30, 20), "s": (20, 10), "v": (5_000,)}
LARGE = {"w": (200, 120), "t": (40, 600)}  # those that go as factors
TOLERANCE = {"float32": 2e-5, "float64": 1e-11}


class Serial:
    """Algorithm 2 of the paper with a node for a worker; momentum SGD or Adam on the result."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank = job, job.config.powersgd_rank
        self.params = initial_vector(job.problem, job.config.seed, job.dtype).astype("f8")
        self.slots = [np.zeros_like(self.params) for _ in range(SLOTS[job.config.optimizer])]
        nodes = job.cluster.nodes
        self.error = [{k: np.zeros(shape) for k, shape in LARGE.items()} for _ in range(nodes)]
        self.basis = {
            k: drawn(job.config.seed, 0, index, (self.rank, n)).T
            for index, (k, (_, n)) in enumerate(LARGE.items())
        }

    def sums(self, number: int) -> list[dict[str, np.ndarray]]:
        """Return each node's weighted sum of gradients."""
        cluster = self.job.cluster
        weights = shares(len(cluster.roles.workers), number)
        found = [np.zeros_like(self.params) for _ in range(cluster.nodes)]
        for worker, rank in enumerate(cluster.roles.workers):
            if weights[worker]:
                grad = gradient(worker, number, self.params.astype(self.job.dtype))
                found[cluster.node_of[rank]] += weights[worker] * grad.astype("f8")
        return [self.job.layout.views(total) for total in found]

    def aggregate(self, number: int) -> np.ndarray:
        sums, flat = self.sums(number), np.zeros_like(self.params)
        result = self.job.layout.views(flat)
        for name, out in result.items():
            if name not in LARGE:
                out[:] = sum(part[name] for part in sums)
                continue
            pairs = zip(sums, self.error, strict=True)
            inputs = [s[name].reshape(LARGE[name]) + e[name] for s, e in pairs]
            p = np.linalg.qr(sum(m @ self.basis[name] for m in inputs))[0]
            factors = [m.T @ p for m in inputs]
            self.basis[name] = sum(factors)
            out[:] = (p @ self.basis[name].T).reshape(out.shape)
            for e, m, q in zip(self.error, inputs, factors, strict=True):
                e[name] = m - p @ q.T
        return flat

    def step(self, number: int) -> None:
        c, n = self.job.config, self.job.trained
        lr, grad = c.lr * min(1.0, number / c.warmup_steps), self.aggregate(number)
        slots = [slot[:n] for slot in self.slots]
        local_step(c, self.params[:n], grad[:n], slots, number, lr)
        self.params[n:] -= grad[n:]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def wrong_state(job: Job, rounds: Round, serial: Serial) -> list[object]:
    """Compare the errors that a rank keeps, its shard and its slots with the serial run."""
    wrong, bound = list[object](), TOLERANCE[job.config.dtype]
    flat = np.full(job.layout.size, np.nan)
    views = job.layout.views(flat)
    for name in LARGE:
        mine = serial.error[job.cluster.node_of[job.cluster.rank]][name]
        views[name][...] = mine.reshape(views[name].shape)
    for begin, error in rounds.own_state()["error"]:
        scale = np.abs(flat[np.isfinite(flat)]).max()
        if not np.abs(error - flat[begin : begin + error.size]).max() <= 20 * bound * scale:
            wrong.append(f"error at {begin}")
    if job.cluster.rank in job.cluster.roles.owners:
        if not distance(rounds.params, serial.params[job.shard.range]) <= bound:
            wrong.append("parameters")
        if not distance(rounds.slots[0], serial.slots[0][job.shard.range]) <= 20 * bound:
            wrong.append("slots")
    return wrong


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "momentum", "dtype": "float32"},
        {"optimizer": "momentum", "dtype": "float64", "clip": 1.0, "powersgd_rank": 1},
        {"optimizer": "adam", "dtype": "float64", "clip": 5.0},
        {"optimizer": "momentum", "dtype": "float64", "clip": 0.5, "statistics": ("t", "s", "v")},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_rounds_equal_the_paper(
    cluster: Cluster, servers: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error feedback, warm start, clipping; every replica is the same bit for bit."""
    monkeypatch.setattr(Given, "statistics", options.get("statistics", ()))
    options = {name: value for name, value in options.items() if name != "statistics"}
    job = make_job(cluster, servers, SHAPES, seed=5, codec="powersgd", **options)
    rounds, serial = start(job), Serial(job)
    assert isinstance(rounds, PowerSgdRound)
    for number in range(1, STEPS + 1):
        step(job, rounds, number)
        serial.step(number)
    wrong = wrong_state(job, rounds, serial)
    kept = sum(error.size for _, error in rounds.own_state()["error"])
    found = end(job, rounds)
    if not distance(found, serial.params) <= TOLERANCE[job.config.dtype]:
        wrong.append(distance(found, serial.params))
    if not np.array_equal(found, cluster.comm.bcast(found)):
        wrong.append("replicas differ")
    check(cluster.comm, not wrong, wrong)
    sizes = sum(m * n for m, n in LARGE.values())
    check(cluster.comm, cluster.comm.allreduce(kept) == cluster.nodes * sizes, kept)


def test_a_start_brings_parameters_and_slots_to_every_node(cluster: Cluster) -> None:
    """As after a resume, with momentum that is not zero."""
    ends = []
    for packing in ({}, {"codec": "powersgd", "powersgd_rank": 40}):
        job = make_job(cluster, 0, SHAPES, optimizer="momentum", **packing)
        rounds = make_round(job)
        rounds.params[:] = np.arange(job.shard.begin, job.shard.end) % 97
        rounds.slots[0][:] = np.arange(job.shard.begin, job.shard.end) % 89
        rounds.publish_start()
        step(job, rounds, 1)
        ends.append(end(job, rounds))
    apart = distance(ends[1], ends[0])
    check(cluster.comm, apart <= 1e-6, apart)


@pytest.mark.parametrize("what", ["nothing", "params", "slots", "nan"])
def test_nodes_that_differ_are_found(cluster: Cluster, what: str) -> None:
    """One bit of one element of one node is enough; every rank is told. A NaN is no difference."""
    job = make_job(cluster, 0, SHAPES, optimizer="momentum", codec="powersgd")
    rounds = start(job)
    step(job, rounds, 1)
    rounds.compare(1)
    cluster.barrier()
    if what == "nan":
        rounds.params[0] = np.nan
        rounds.publish_start()
    elif what != "nothing" and cluster.rank == cluster.roles.owners[-1]:
        vector = rounds.params if what == "params" else rounds.slots[0]
        vector.view("u4")[-1] ^= 1
    cluster.barrier()
    told = ""
    try:
        rounds.compare(2)
    except UserError as error:
        told = str(error)
    end(job, rounds)
    check(cluster.comm, ("differ" in told) == (what in ("params", "slots")), told)
