"""Synchronous rounds: gradients meet, each element is updated once, all read the result.

`SharedRound` sums slice by slice in the memory of the node. Each rank writes its gradient, then
all of a node's ranks wait for each other. The owner of a slice reads every near gradient where it
was computed, adds what the other nodes send, and applies the update rule in the same pass, block
by block; on the other nodes one rank for each far slice sums the node's gradients and sends them
to the owner (a reduce-scatter), which sends the result back into the node's replica (an
all-gather). Then the node's ranks wait for each other again, and read the replica in place.

`AllreduceRound` is plain MPI: Allreduce of the gradients, each owner updates its slice, and
broadcasts it.

Rows are summed in a fixed order, so equal worlds give equal bits.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from mpi4py import MPI

from mpips.cluster import all_done, begin_sum, cluster_subset, free
from mpips.job import Job
from mpips.kernels import observe, publish, sum_rows, sum_squares
from mpips.layout import CACHE_LINE_BYTES, Shard
from mpips.optim import clip_factor
from mpips.window import Field, Plan, Window, transfer_pieces

PHASE = 0  # header word: twice the number of the round, plus 1 when the gradient is there
BLOCK_BYTES = 1 << 17  # of the sum, which stays in the cache until the rule has used it
TAG_PARTIAL, TAG_RESULT = 5, 6


@dataclass
class Report:
    """What each rank brings into a round beside its gradient; rounds add them up.

    Attributes:
        loss_sum: Loss summed over the rank's samples.
        samples: Number of its samples.
        checkpoint: 1 if a checkpoint is due.
        diverged: 1 if the loss was not finite.
        target: 1 if the accuracy aimed at was reached.
        sigusr1: 1 if that signal came; `sigterm` and `sigint` likewise.
    """

    loss_sum: float = 0.0
    samples: float = 0.0
    checkpoint: float = 0.0
    diverged: float = 0.0
    target: float = 0.0
    sigusr1: float = 0.0
    sigterm: float = 0.0
    sigint: float = 0.0

    def pack(self, out: np.ndarray) -> None:
        """Write the fields into `out`, shape (8,), float64."""
        out[:] = [getattr(self, f.name) for f in fields(self)]


class Round(ABC):
    """One world's synchronous round.

    Attributes:
        replica: All parameters, shape (n_params,); the same on every worker between rounds.
        grad: This worker's gradient, shape (n_params,).
        params: The owner's shard of `replica`, shape (shard.size,).
        slots: The owner's slots, each of that shape.
    """

    replica: np.ndarray
    grad: np.ndarray
    params: np.ndarray
    slots: tuple[np.ndarray, ...]

    def __init__(self, job: Job) -> None:
        self._job, self._cluster = job, job.cluster
        self._rate = job.rate()
        self._owners = cluster_subset(self._cluster, self._cluster.roles.owners)
        self.waited_s = self.busy_s = 0.0

    @abstractmethod
    def exchange(self, step: int, weights: Sequence[float], report: Report) -> Report:
        """Sum the gradients, update the parameters, share the result.

        Args:
            step: Number of this update, 1 for the first of a run.
            weights: Each worker's share in the mean; gradients of weight 0 are not read.
            report: This rank's part.

        Returns:
            The sum of all reports, the same on every rank.

        Collective: yes. Blocks: until the round is over; never inside MPI.
        """

    @abstractmethod
    def publish_start(self) -> None:
        """Share what the owners have filled in before the first round. Collective: yes."""

    def free(self) -> None:
        """Free what the round holds; may be called twice. Collective: yes."""
        self.replica = self.grad = self.params = np.zeros(0)
        self.slots = ()
        free(self._owners)

    def _wait(self, requests: list[MPI.Request]) -> None:
        self.waited_s += self._cluster.wait(lambda: all_done(requests))

    def _apply(self, step: int, shard: Shard, grad_of: Callable[[slice], np.ndarray]) -> None:
        """Apply the rule to the shard, block by block; `grad_of` gives a block's gradient."""
        start = time.perf_counter()
        lr, far = self._rate(step), self._cluster.nodes > 1
        size = BLOCK_BYTES // self.params.itemsize
        for begin in range(0, shard.size, size):
            block = slice(begin, min(begin + size, shard.size))
            slots = tuple(slot[block] for slot in self.slots)
            self._job.rule.apply(self.params[block], grad_of(block), slots, step, lr)
            if far:
                self._cluster.progress()
        self.busy_s += time.perf_counter() - start

    def _clip(self, grad: np.ndarray) -> None:
        """Scale an owner's slice of the mean gradient by the norm of the whole."""
        total = np.array([sum_squares(grad)])
        self._wait([begin_sum(self._owners, total)])
        grad *= grad.dtype.type(clip_factor(float(total[0]), self._job.config.clip))


def _plan(job: Job, rank: int) -> Plan:
    cluster, dtype, n = job.cluster, job.config.dtype, job.layout.size
    found = [Field("header", "i8", (8,)), Field("report", "f8", (8,)), Field("agreed", "f8", (8,))]
    if rank == cluster.node_of.index(cluster.node_of[rank]):
        found.append(Field("replica", dtype, (n,)))
    if rank in cluster.roles.workers:
        found.append(Field("grad", dtype, (n,)))
    if rank in cluster.roles.owners:
        size = job.shards[cluster.roles.owners.index(rank)].size
        found += [Field(f"slots/{name}", dtype, (size,)) for name in job.rule.slots]
    return Plan(tuple(found))


class SharedRound(Round):
    """Rounds in node-shared memory, by messages between nodes."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        cluster = self._cluster
        plans = [_plan(job, rank) for rank in range(cluster.world)]
        self._window = Window(cluster, plans, job.config.window == "shared", far_reads=False)
        view = self._window.view
        self._leader = cluster.my_node[0]
        self._leaders = cluster_subset(
            cluster, sorted({cluster.node_of.index(n) for n in cluster.node_of})
        )
        self._headers = [view(r, "header") for r in cluster.my_node]
        self._reports = [view(r, "report") for r in cluster.my_node]
        self._own = cluster.my_node.index(cluster.rank)
        self._agreed = view(self._leader, "agreed")
        self._sums = np.zeros(8)
        self.replica = view(self._leader, "replica")
        self._workers = [w for w, r in enumerate(cluster.roles.workers) if cluster.near(r)]
        near = [r for r in cluster.roles.workers if cluster.near(r)]
        self._addresses = np.array([view(r, "grad").ctypes.data for r in near], "i8")
        if job.worker_id is not None:
            self.grad = view(cluster.rank, "grad")
        self._with_workers = sorted({cluster.node_of[r] for r in cluster.roles.workers})
        self._plan_messages()
        self._round = 0
        if cluster.rank in cluster.roles.owners:
            self._own_shard(job.shard)

    def _own_shard(self, shard: Shard) -> None:
        cluster, dtype = self._cluster, self._job.dtype
        self.params = self.replica[shard.range]
        names = self._job.rule.slots
        self.slots = tuple(self._window.view(cluster.rank, f"slots/{name}") for name in names)
        far = [n for n in self._with_workers if n != cluster.node_of[cluster.rank]]
        self._agents = [self._agent(n, cluster.roles.owners.index(cluster.rank)) for n in far]
        self._partials = [np.zeros(shard.size, dtype) for _ in far if shard.size]
        relative = shard.begin * dtype.itemsize  # rows are addressed as whole vectors
        rows = [p.ctypes.data - relative for p in self._partials]
        self._rows = np.concatenate([self._addresses, np.array(rows, "i8")])
        size = shard.size if self._job.config.clip else BLOCK_BYTES // dtype.itemsize
        self._sum = np.zeros(size, dtype)

    def _agent(self, node: int, owner: int) -> int:
        """Return the rank that stands for `node` towards an owner elsewhere."""
        ranks = [r for r, n in enumerate(self._cluster.node_of) if n == node]
        return ranks[owner % len(ranks)]

    def _plan_messages(self) -> None:
        """Find the far shards for which this rank sums its node's gradients."""
        cluster = self._cluster
        self._errands: list[tuple[int, Shard, np.ndarray]] = []
        if not self._workers:
            return
        for owner, rank in enumerate(cluster.roles.owners):
            shard, node = self._job.shards[owner], cluster.node_of[cluster.rank]
            if shard.size and not cluster.near(rank) and self._agent(node, owner) == cluster.rank:
                self._errands.append((rank, shard, np.zeros(shard.size, self._job.dtype)))

    def publish_start(self) -> None:
        """Send the owners' shards to the other nodes' replicas. Collective: yes."""
        self._wait(self._collect_results() + self._send_result())
        self._meet()

    def _meet(self) -> None:
        """Wait for the node's ranks; their stores before are seen after. Collective: node."""
        self._round += 1
        publish(self._headers[self._own], PHASE, self._round)
        turn = self._round
        self.waited_s += self._cluster.wait(
            lambda: all(observe(header, PHASE) >= turn for header in self._headers)
        )

    def exchange(self, step: int, weights: Sequence[float], report: Report) -> Report:
        """See `Round.exchange`."""
        report.pack(self._reports[self._own])
        self._meet()
        near = np.array([weights[w] for w in self._workers])
        requests = self._send_partials(near) + self._collect_results()
        agreeing = self._begin_to_agree()
        if self._cluster.rank in self._cluster.roles.owners:
            self._update(step, near)
            requests += self._send_result()
        self._wait(requests + agreeing)
        if self._cluster.rank == self._leader:
            self._agreed[:] = self._sums
        self._meet()
        return Report(*self._agreed.tolist())

    def _begin_to_agree(self) -> list[MPI.Request]:
        if self._cluster.rank != self._leader:
            return []
        np.sum(self._reports, axis=0, out=self._sums)
        return [begin_sum(self._leaders, self._sums)]

    def _send_partials(self, weights: np.ndarray) -> list[MPI.Request]:
        requests = []
        for rank, shard, partial in self._errands:
            sum_rows(self._addresses, weights, shard.begin, partial)
            for part in transfer_pieces(partial):
                requests.append(self._cluster.comm.Isend(part, rank, TAG_PARTIAL))
        return requests

    def _collect_results(self) -> list[MPI.Request]:
        comm = self._cluster.comm
        return [
            comm.Irecv(part, rank, TAG_RESULT)
            for rank, shard, _ in self._errands
            for part in transfer_pieces(self.replica[shard.range])
        ]

    def _send_result(self) -> list[MPI.Request]:
        if self._cluster.rank not in self._cluster.roles.owners:
            return []
        comm = self._cluster.comm
        pieces = transfer_pieces(self.params)
        return [comm.Isend(p, agent, TAG_RESULT) for agent in self._agents for p in pieces]

    def _update(self, step: int, weights: np.ndarray) -> None:
        comm, shard = self._cluster.comm, self._job.shard
        coming = [
            comm.Irecv(part, agent, TAG_PARTIAL)
            for agent, partial in zip(self._agents, self._partials, strict=False)
            for part in transfer_pieces(partial)
        ]
        self._wait(coming)
        shares = np.concatenate([weights, np.ones(len(self._partials))])

        def sum_block(block: slice) -> np.ndarray:
            out = self._sum[: block.stop - block.start]
            sum_rows(self._rows, shares, shard.begin + block.start, out)
            return out

        if not self._job.config.clip:
            self._apply(step, shard, sum_block)
            return
        sum_rows(self._rows, shares, shard.begin, self._sum)
        self._clip(self._sum)
        self._apply(step, shard, lambda block: self._sum[block])

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._headers, self._reports = [], []
        self._agreed = np.zeros(0)
        self._window.free()
        free(self._leaders)


def _aligned_zeros(n: int, dtype: np.dtype) -> np.ndarray:
    memory = np.zeros(n * dtype.itemsize + CACHE_LINE_BYTES, "u1")
    skip = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[skip : skip + n * dtype.itemsize].view(dtype)


class AllreduceRound(Round):
    """Rounds by MPI's collectives alone, each rank with a private replica."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        n, dtype = job.layout.size, job.dtype
        self.replica, self.grad = _aligned_zeros(n, dtype), _aligned_zeros(n, dtype)
        if self._cluster.rank in self._cluster.roles.owners:
            shard = job.shard
            self.params = self.replica[shard.range]
            self.slots = tuple(_aligned_zeros(shard.size, dtype) for _ in job.rule.slots)
        self._sums = np.zeros(8)

    def publish_start(self) -> None:
        """Broadcast the owners' shards. Collective: yes."""
        comm, owners = self._cluster.comm, self._cluster.roles.owners
        self._wait(
            [
                comm.Ibcast(part, rank)
                for rank, shard in zip(owners, self._job.shards, strict=True)
                for part in transfer_pieces(self.replica[shard.range])
            ]
        )

    def exchange(self, step: int, weights: Sequence[float], report: Report) -> Report:
        """See `Round.exchange`."""
        worker = self._job.worker_id
        weight = 0.0 if worker is None else weights[worker]
        if weight:
            self.grad *= self.grad.dtype.type(weight)
        else:
            self.grad[:] = 0
        report.pack(self._sums)
        comm = self._cluster.comm
        parts = [self._sums, *transfer_pieces(self.grad)]
        self._wait([begin_sum(comm, part) for part in parts])
        if self._cluster.rank in self._cluster.roles.owners:
            grad = self.grad[self._job.shard.range]
            if self._job.config.clip:
                self._clip(grad)
            self._apply(step, self._job.shard, lambda block: grad[block])
        self.publish_start()
        return Report(*self._sums.tolist())


def make_round(job: Job) -> Round:
    """Build the round that the configuration asks for. Collective: yes.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    return AllreduceRound(job) if job.config.reduce == "allreduce" else SharedRound(job)
