"""Rounds that pack what crosses nodes, against a serial run that packs the same sums."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from test_rounds import end, gradient, make_job, shares, start, step
from verdict import check

from mpips.codecs import MessageId, buffer_for, codec_for
from mpips.config.jobfile import to_toml
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.problems.base import initial_vector
from mpips.rounds.base import Report
from mpips.transport.wire import pull_codec, push_codec

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4, min_nodes=2)]

STEPS = 3
SHAPES = {"w": (300, 200), "b": (7,), "v": (61_000,)}  # shards of 4 owners are above 64 KB
SMALL = {"w": (300, 20), "b": (7,)}  # and these below


class Serial:
    """All nodes of a job in one process, in the dtype of the job.

    Node a packs its weighted sum of gradients for each slice that a rank of another node owns,
    and keeps the codec's state of it; the owner adds its own node's gradients and the other nodes'
    sums, in the order of nodes, and makes the update. Each other node has what the pull codec makes
    of the slice.
    """

    def __init__(self, job: Job) -> None:
        self.job, roles = job, job.cluster.roles
        self.push, self.pull = push_codec(job.config), pull_codec(job.config)
        self.node_of = job.cluster.node_of
        self.workers = list(enumerate(roles.workers))
        self.owners = [(r, s) for r, s in zip(roles.owners, job.shards, strict=True) if s.size]
        self.params = initial_vector(job.problem, job.config.seed, job.dtype)
        self.velocity = np.zeros_like(self.params)
        self.states: dict[Any, Any] = {}
        self.sent = self.received = 0
        self.replicas = [self.params.copy() for _ in range(job.cluster.nodes)]
        self.share(0)

    def packed(
        self, codec: Any, part: np.ndarray, node: int, number: int, begin: int
    ) -> tuple[np.ndarray, int]:
        """Return what the other end decodes, and the bytes of the message."""
        codec = codec_for(codec, part.size, part.dtype)
        if codec is None:
            return part, part.nbytes
        key = (codec.name, node, begin)
        state = self.states.setdefault(key, codec.fresh_state(part.size, part.dtype))
        message, out = buffer_for(codec.wire_bytes(part.size, part.dtype)), np.zeros_like(part)
        message_id = MessageId(self.job.config.seed, node, number, begin)
        used = codec.encode(part, message, state, message_id)
        codec.decode(message, out)
        return out, used

    def share(self, number: int) -> None:
        for rank, shard in self.owners:
            mine, part = self.node_of[rank], self.params[shard.range]
            there, nbytes = self.packed(self.pull, part, mine, number, shard.begin)
            for node, replica in enumerate(self.replicas):
                replica[shard.range] = part if node == mine else there
            readers = {self.node_of[r] for _, r in self.workers} - {mine}
            self.received += nbytes * len(readers)

    def step(self, number: int) -> None:
        c, real = self.job.config, self.job.dtype.type
        weights = shares(len(self.workers), number)
        grads = [gradient(w, number, self.replicas[self.node_of[r]]) for w, r in self.workers]
        for rank, shard in self.owners:
            total = np.zeros(shard.size, self.job.dtype)
            for node in sorted({self.node_of[r] for _, r in self.workers}):
                own = node == self.node_of[rank]
                part = total if own else np.zeros_like(total)
                for w, r in self.workers:
                    if self.node_of[r] == node and weights[w]:
                        part += real(weights[w]) * grads[w][shard.range]
                if own:
                    continue
                there, nbytes = self.packed(self.push, part, node, number, shard.begin)
                total += there
                self.sent += nbytes
            v = self.velocity[shard.range]
            v[:] = real(c.momentum) * v + total
            self.params[shard.range] -= real(c.lr * min(1.0, number / c.warmup_steps)) * v
        self.share(number)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (SHAPES, {"codec": "bf16", "pull_codec": "bf16"}),
    (SHAPES, {"codec": "int8", "pull_codec": "int8"}),
    (SHAPES, {"codec": "int8", "pull_codec": "fp16", "dtype": "float64"}),
    (SHAPES, {"codec": "topk", "topk_ratio": 0.05, "topk_warmup": 2}),
    (SHAPES, {"codec": "onebit", "pull_codec": "int8"}),
    (SHAPES, {"pull_codec": "fp16"}),
    (SMALL, {"codec": "onebit"}),  # its slices go as they are
]


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(("shapes", "options"), CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_packed_rounds_equal_a_serial_run(
    cluster: Cluster, servers: int, shapes: Any, options: dict[str, Any]
) -> None:
    """Bit for bit: parameters and slots of the owners, replicas, and what the codec keeps."""
    job = make_job(cluster, servers, shapes, seed=3, optimizer="momentum", **options)
    rounds, serial, wrong = start(job), Serial(job), list[str]()
    mine = cluster.node_of[cluster.rank]
    for number in range(1, STEPS + 1):
        step(job, rounds, number)
        serial.step(number)
        used = mine in {cluster.node_of[rank] for rank in cluster.roles.workers}
        if used and not np.array_equal(rounds.replica, serial.replicas[mine]):
            wrong.append(f"replica in round {number}")
    if cluster.rank in cluster.roles.owners:
        if not np.array_equal(rounds.params, serial.params[job.shard.range]):
            wrong.append("parameters")
        if not np.array_equal(rounds.slots[0], serial.velocity[job.shard.range]):
            wrong.append("slots")
    for name, parts in rounds.own_state().items():
        assert name == "residual"
        for begin, array in parts:
            if not np.array_equal(array, serial.states[job.config.codec, mine, begin][0]):
                wrong.append(f"residual at {begin}")
    kept = [begin for _, parts in rounds.own_state().items() for begin, _ in parts]
    crossed = np.array([rounds.transfers.bytes_sent, rounds.transfers.bytes_received])
    end(job, rounds)
    check(cluster.comm, not wrong, wrong)
    cluster.comm.Allreduce(MPI.IN_PLACE, crossed)
    reports = 64 * (cluster.nodes - 1) * STEPS  # of all ranks' shares, both ways
    expected = [serial.sent + reports, serial.received + reports]
    check(cluster.comm, np.allclose(crossed, expected, rtol=0, atol=0.5), (crossed, expected))
    everywhere = [b for begins in cluster.comm.allgather(kept) for b in begins]
    feedback = job.config.codec in ("topk", "onebit") and shapes is SHAPES
    nodes = {cluster.node_of[rank] for _, rank in serial.workers}
    remote = sum(len(nodes - {cluster.node_of[rank]}) for rank, _ in serial.owners)
    check(cluster.comm, len(everywhere) == (remote if feedback else 0), everywhere)


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk", "onebit", "powersgd"])
def test_what_is_not_finite_reaches_every_replica(cluster: Cluster, codec: str) -> None:
    """Without a warning, also where infinity is clipped."""
    pull, clip = ("int8", 0.0) if codec in ("int8", "topk") else ("none", 1.0)
    options: dict[str, Any] = {"codec": codec, "pull_codec": pull, "clip": clip}
    job = make_job(cluster, 0, SHAPES, optimizer="sgd", **options)
    rounds = start(job)
    finite = np.isfinite(rounds.replica).all()
    rounds.grad[:] = 1.0
    if cluster.rank == cluster.world - 1:
        rounds.grad[::1000] = np.inf if clip else np.nan
    weights = np.full(cluster.world, 1 / cluster.world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds.exchange(1, weights, Report())
    seen = not np.isfinite(end(job, rounds)).all()
    check(cluster.comm, bool(finite and seen), (finite, seen))


def test_a_resumed_run_says_that_its_codec_changed(cluster: Cluster) -> None:
    job = make_job(cluster, 0, SHAPES, optimizer="sgd", codec="topk")
    saved: Any = SimpleNamespace(state={"world": job.world()}, config=to_toml(job.config))
    job.checkpoint = saved
    check(cluster.comm, job.differences() == [], job.differences())
    saved.state["world"]["job"]["codec"] = "bf16"
    check(cluster.comm, job.differences() == ["codec: bf16 -> topk"], job.differences())
