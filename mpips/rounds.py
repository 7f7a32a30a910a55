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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from struct import Struct
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from mpips.cluster import all_done, begin_sum, cluster_subset, free
from mpips.job import Job
from mpips.kernels import meet, sum_rows, sum_squares
from mpips.layout import CACHE_LINE_BYTES, Shard
from mpips.optim import Rule, Slots, clip_factor
from mpips.window import Field, Plan, Window, transfer_pieces

LOOKS = 30_000  # at a word before the core is offered: 10 to 30 us
BLOCK_BYTES = 1 << 17  # of the sum, which stays in the cache until the rule has used it
TAG_PARTIAL, TAG_RESULT = 5, 6

Weights: TypeAlias = np.ndarray | Sequence[float]


class Report(NamedTuple):
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


REPORT = Struct(f"{len(Report._fields)}d")  # writes and reads reports faster than NumPy


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

    def __init__(self, job: Job, rule: Rule | None = None) -> None:
        """Make the round of `job`, or one whose sum goes to `rule` as it is, not clipped."""
        self._job, self._cluster = job, job.cluster
        self._rule, self._max_norm = rule or job.rule, 0.0 if rule else job.config.clip
        self._rate = job.rate()
        self._owners = cluster_subset(self._cluster, self._cluster.roles.owners)
        self.waited_s = self.busy_s = 0.0
        self._blocks: list[tuple[int, np.ndarray, np.ndarray, Slots]] = []

    @abstractmethod
    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """Sum the gradients, update the parameters, share the result.

        Args:
            step: Number of this update, 1 for the first of a run.
            weights: Each worker's share in the mean, best as float64 of shape (workers,);
                gradients of weight 0 are not read.
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
        self.slots, self._blocks = (), []
        free(self._owners)

    def _wait(self, requests: list[MPI.Request]) -> None:
        self.waited_s += self._cluster.wait(lambda: all_done(requests))

    def _cut(self, shard: Shard, grad: np.ndarray) -> None:
        """Cut the shard into blocks; `grad` is as large as it, or one block that serves for all."""
        size, whole = BLOCK_BYTES // grad.itemsize, grad.size == shard.size
        for begin in range(0, shard.size, size):
            block = slice(begin, min(begin + size, shard.size))
            part = grad[block] if whole else grad[: block.stop - begin]
            slots = tuple(slot[block] for slot in self.slots)
            self._blocks.append((shard.begin + begin, self.params[block], part, slots))

    def _apply(self, step: int, sources: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """Apply the rule block by block; a block's gradient is the sum of rows with weights."""
        start = perf_counter()
        apply, lr, far = self._rule.apply, self._rate(step), self._cluster.nodes > 1
        for begin, params, grad, slots in self._blocks:
            if sources:
                sum_rows(*sources, begin, grad)
            apply(params, grad, slots, step, lr)
            if far:
                self._cluster.progress()
        self.busy_s += perf_counter() - start

    def _clip(self, grad: np.ndarray) -> None:
        """Scale an owner's slice of the mean gradient by the norm of the whole."""
        total = np.array([sum_squares(grad)])
        self._wait([begin_sum(self._owners, total)])
        grad *= grad.dtype.type(clip_factor(float(total[0]), self._max_norm))


def _plan(job: Job, rule: Rule, rank: int) -> Plan:
    cluster, dtype, n = job.cluster, job.config.dtype, job.layout.size
    found = [Field("header", "i8", (8,)), Field("report", "f8", (8,)), Field("agreed", "f8", (8,))]
    if rank == cluster.node_of.index(cluster.node_of[rank]):
        found.append(Field("replica", dtype, (n,)))
    if rank in cluster.roles.workers:
        found.append(Field("grad", dtype, (n,)))
    if rank in cluster.roles.owners:
        size = job.shards[cluster.roles.owners.index(rank)].size
        found += [Field(f"slots/{name}", dtype, (size,)) for name in rule.slots]
    return Plan(tuple(found))


class SharedRound(Round):
    """Rounds in node-shared memory, by messages between nodes."""

    def __init__(self, job: Job, rule: Rule | None = None) -> None:
        super().__init__(job, rule)
        cluster = self._cluster
        plans = [_plan(job, self._rule, rank) for rank in range(cluster.world)]
        self._window = Window(cluster, plans, job.config.window == "shared", far_reads=False)
        view = self._window.view
        self._leader = cluster.my_node[0]
        self._leaders = cluster_subset(
            cluster, sorted({cluster.node_of.index(n) for n in cluster.node_of})
        )
        self._turn = 0
        ranks = [cluster.rank, *(r for r in cluster.my_node if r != cluster.rank)]
        self._words = addresses_of([view(r, "header") for r in ranks])
        # Whoever offers the core may get it back late, and other nodes may wait for this rank.
        self._looks = LOOKS if not cluster.crowded else 1 if cluster.nodes == 1 else 0
        self._report = view(cluster.rank, "report").data
        self._reports = addresses_of([view(r, "report") for r in cluster.my_node])
        self._once, self._sums = np.ones(len(cluster.my_node)), np.zeros(8)
        self._agreed = (view(self._leader, "agreed") if cluster.nodes > 1 else self._sums).data
        self.replica = view(self._leader, "replica")
        self._workers = [w for w, r in enumerate(cluster.roles.workers) if cluster.near(r)]
        near = [r for r in cluster.roles.workers if cluster.near(r)]
        self._addresses = addresses_of([view(r, "grad") for r in near])
        if job.worker_id is not None:
            self.grad = view(cluster.rank, "grad")
        self._with_workers = sorted({cluster.node_of[r] for r in cluster.roles.workers})
        self._plan_messages()
        self._owner = cluster.rank in cluster.roles.owners
        if self._owner:
            self._own_shard(job.shard)

    def _own_shard(self, shard: Shard) -> None:
        cluster, dtype = self._cluster, self._job.dtype
        self.params = self.replica[shard.range]
        names = self._rule.slots
        self.slots = tuple(self._window.view(cluster.rank, f"slots/{name}") for name in names)
        far = [n for n in self._with_workers if n != cluster.node_of[cluster.rank]]
        self._agents = [self._agent(n, cluster.roles.owners.index(cluster.rank)) for n in far]
        self._partials = [np.zeros(shard.size, dtype) for _ in far if shard.size]
        relative = shard.begin * dtype.itemsize  # rows are addressed as whole vectors
        self._rows = np.concatenate([self._addresses, addresses_of(self._partials) - relative])
        size = shard.size if self._max_norm else BLOCK_BYTES // dtype.itemsize
        self._sum = np.zeros(min(size, shard.size), dtype)
        self._cut(shard, self._sum)

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
        start = perf_counter()
        self._turn += 1
        if not meet(self._words, self._turn, self._looks):
            self._cluster.wait(lambda: meet(self._words, self._turn, 0))
        self.waited_s += perf_counter() - start

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        REPORT.pack_into(self._report, 0, *report)
        self._meet()
        sum_rows(self._reports, self._once, 0, self._sums)
        weights = np.asarray(weights)
        if self._cluster.nodes > 1:
            self._exchange_far(step, weights[self._workers])
        elif self._owner:
            self._update(step, weights)
        self._meet()
        return Report._make(REPORT.unpack_from(self._agreed))

    def _exchange_far(self, step: int, near: np.ndarray) -> None:
        """Do what the nodes' gradients and reports go through between the two meetings."""
        requests = self._send_partials(near) + self._collect_results()
        leads = self._cluster.rank == self._leader
        agreeing = [begin_sum(self._leaders, self._sums)] if leads else []
        if self._owner:
            self._update(step, self._receive_partials(near))
            requests += self._send_result()
        self._wait(requests + agreeing)
        if leads:
            self._agreed[:] = self._sums.data

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
        if not self._owner:
            return []
        comm = self._cluster.comm
        pieces = transfer_pieces(self.params)
        return [comm.Isend(p, agent, TAG_RESULT) for agent in self._agents for p in pieces]

    def _receive_partials(self, weights: np.ndarray) -> np.ndarray:
        """Wait for the other nodes' sums; returns the weights of `_rows`, these included."""
        comm = self._cluster.comm
        coming = [
            comm.Irecv(part, agent, TAG_PARTIAL)
            for agent, partial in zip(self._agents, self._partials, strict=False)
            for part in transfer_pieces(partial)
        ]
        self._wait(coming)
        return np.concatenate([weights, np.ones(len(self._partials))])

    def _update(self, step: int, weights: np.ndarray) -> None:
        """Sum the rows of the shard and apply the rule."""
        if self._max_norm:
            sum_rows(self._rows, weights, self._job.shard.begin, self._sum)
            self._clip(self._sum)
            self._apply(step)
        else:
            self._apply(step, (self._rows, weights))

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._report = self._agreed = memoryview(b"")
        self._window.free()
        free(self._leaders)


def addresses_of(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the address of element 0 of each array, dtype int64, as kernels take rows."""
    return np.array([array.ctypes.data for array in arrays], np.int64)


def _aligned_zeros(n: int, dtype: np.dtype) -> np.ndarray:
    memory = np.zeros(n * dtype.itemsize + CACHE_LINE_BYTES, "u1")
    skip = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[skip : skip + n * dtype.itemsize].view(dtype)


class AllreduceRound(Round):
    """Rounds by MPI's collectives alone, each rank with a private replica."""

    def __init__(self, job: Job, rule: Rule | None = None) -> None:
        super().__init__(job, rule)
        n, dtype = job.layout.size, job.dtype
        self.replica, self.grad = _aligned_zeros(n, dtype), _aligned_zeros(n, dtype)
        if self._cluster.rank in self._cluster.roles.owners:
            shard = job.shard
            self.params = self.replica[shard.range]
            self.slots = tuple(_aligned_zeros(shard.size, dtype) for _ in self._rule.slots)
            self._cut(shard, self.grad[shard.range])
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

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        worker = self._job.worker_id
        weight = 0.0 if worker is None else weights[worker]
        if weight:
            self.grad *= self.grad.dtype.type(weight)
        else:
            self.grad[:] = 0
        REPORT.pack_into(self._sums.data, 0, *report)
        comm = self._cluster.comm
        parts = [self._sums, *transfer_pieces(self.grad)]
        self._wait([begin_sum(comm, part) for part in parts])
        if self._cluster.rank in self._cluster.roles.owners:
            if self._max_norm:
                self._clip(self.grad[self._job.shard.range])
            self._apply(step)
        self.publish_start()
        return Report._make(REPORT.unpack_from(self._sums.data))


def make_round(job: Job, rule: Rule | None = None) -> Round:
    """Build the round that the configuration asks for, with a `rule` of its own if one is given.

    Collective: yes.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    return (AllreduceRound if job.config.reduce == "allreduce" else SharedRound)(job, rule)
