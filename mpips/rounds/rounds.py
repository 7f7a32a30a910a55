"""Synchronous rounds: gradients meet, each element is updated once, all read the result.

`SharedRound` sums slice by slice in the memory of the node. Each rank writes its gradient, then
all of a node's ranks wait for each other. The owner of a slice reads every near gradient where it
was computed, adds what the other nodes send, and applies the update rule in the same pass, block
by block; on the other nodes one rank for each far slice sums the node's gradients and sends them
to the owner (a reduce-scatter), which sends the result back into the node's replica (an
all-gather). Then the node's ranks wait for each other again, and read the replica in place.

`AllreduceRound` is plain MPI: Allreduce of the gradients, each owner updates its slice, and
broadcasts it.

Where a job has a codec, the slices that cross nodes are packed (`mpips.transport.wire`): the
partial sums of a node on their way to an owner, and an owner's results on their way back, so that
the replicas of other nodes are what the pull codec makes of the owners' parameters. Round k has the
number k, and a sender that of its node, so that a resumed run packs as one that was never stopped.
What a codec keeps lives with the agent of the node.

Rows are summed in a fixed order, so equal worlds give equal bits.
"""

from typing import NamedTuple

import numpy as np

from mpips.cluster.window import Field, transfer_pieces
from mpips.cluster.world import Request
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.layout import CACHE_LINE_BYTES, Shard
from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.rounds.lowrank import LowRankRound
from mpips.rounds.meeting import (
    BLOCK_BYTES,
    REPORT,
    NodeRound,
    OwnState,
    Report,
    Round,
    Weights,
)
from mpips.transport.wire import Packer, Packing, Unpacker, pull_codec, push_codec

__all__ = ["AllreduceRound", "Report", "Round", "SharedRound", "Weights", "make_round"]

TAG_PARTIAL, TAG_RESULT = 5, 6


class Errand(NamedTuple):
    """What an agent does for its node and the owner of a far slice.

    Attributes:
        owner: Rank of the owner.
        shard: The slice.
        partial: Room for the node's sum of it, shape (shard.size,).
        packer: Packs the sum.
        unpacker: Unpacks the result into the node's replica.
        place: Where the result comes as it is sent.
    """

    owner: int
    shard: Shard
    partial: np.ndarray
    packer: Packer
    unpacker: Unpacker
    place: np.ndarray


class SharedRound(NodeRound):
    """Rounds in node-shared memory, by messages between nodes."""

    def __init__(self, job: Job, rule: Rule | None = None) -> None:
        super().__init__(job, rule)
        cluster, c = self._cluster, job.config
        self._with_workers = sorted({cluster.node_of[r] for r in cluster.roles.workers})
        self._push, self._pull = Packing(push_codec(c), c.seed), Packing(pull_codec(c), c.seed)
        self._errands: list[Errand] = []
        if self._workers:
            self._plan_messages()
        if self._owner:
            self._own_shard(job.shard)

    def _fields(self, rank: int) -> list[Field]:
        owners = self._cluster.roles.owners
        if rank not in owners:
            return []
        size, dtype = self._job.shards[owners.index(rank)].size, self._job.config.dtype
        return [Field(f"slots/{name}", dtype, (size,)) for name in self._rule.slots]

    def _own_shard(self, shard: Shard) -> None:
        cluster, dtype = self._cluster, self._job.dtype
        self.params = self.replica[shard.range]
        names = self._rule.slots
        self.slots = tuple(self._window.view(cluster.rank, f"slots/{name}") for name in names)
        node = cluster.node_of[cluster.rank]
        far = [n for n in self._with_workers if n != node and shard.size]
        self._agents = [self._agent(n, cluster.roles.owners.index(cluster.rank)) for n in far]
        self._packer = Packer(self._pull, shard, dtype, node, 1)
        sums = [np.zeros(shard.size, dtype) for _ in far]
        self._partials = [Unpacker(self._push.codec, shard.size, dtype, out) for out in sums]
        self._places = [unpacker.place() for unpacker in self._partials]
        relative = shard.begin * dtype.itemsize  # rows are addressed as whole vectors
        self._rows = np.concatenate([self._addresses, addresses_of(sums) - relative])
        size = shard.size if self._max_norm else BLOCK_BYTES // dtype.itemsize
        self._sum = np.zeros(min(size, shard.size), dtype)
        self._cut(shard, self._sum)

    def _agent(self, node: int, owner: int) -> int:
        """Return the rank that stands for `node` towards an owner elsewhere."""
        ranks = [r for r, n in enumerate(self._cluster.node_of) if n == node]
        return ranks[owner % len(ranks)]

    def _plan_messages(self) -> None:
        """Find the far shards for which this rank sums its node's gradients."""
        cluster, dtype = self._cluster, self._job.dtype
        node = cluster.node_of[cluster.rank]
        for owner, rank in enumerate(cluster.roles.owners):
            shard = self._job.shards[owner]
            if shard.size and not cluster.near(rank) and self._agent(node, owner) == cluster.rank:
                into = self.replica[shard.range]
                unpacker = Unpacker(self._pull.codec, shard.size, dtype, into)
                packer = Packer(self._push, shard, dtype, node, 1)
                partial = np.zeros(shard.size, dtype)
                errand = Errand(rank, shard, partial, packer, unpacker, unpacker.place())
                self._errands.append(errand)

    def own_state(self) -> OwnState:
        """See `Round.own_state`: what the push codec keeps, by name; positions in the vector."""
        found: OwnState = {}
        for errand in self._errands:
            for name, array in errand.packer.state.items():
                found.setdefault(name, []).append((errand.shard.begin, array))
        return found

    def publish_start(self) -> None:
        """Send the owners' shards to the other nodes' replicas. Collective: yes."""
        self._wait(self._collect_results() + self._send_result(self._job.base_step))
        self._unpack_results()
        self._meet()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        self._enter(report)
        weights = np.asarray(weights)
        if self._cluster.nodes > 1:
            self._exchange_far(step, weights[self._workers])
        elif self._owner:
            self._update(step, weights)
        return self._leave()

    def _exchange_far(self, step: int, near: np.ndarray) -> None:
        """Do what the nodes' gradients and reports go through between the two meetings."""
        requests = self._send_partials(step, near) + self._collect_results()
        requests += self._begin_agreeing()
        if self._owner:
            self._update(step, self._receive_partials(near))
            requests += self._send_result(step)
        self._wait(requests)
        self._unpack_results()
        self._agree()

    def _send_partials(self, step: int, weights: np.ndarray) -> list[Request]:
        requests, comm = [], self._cluster.comm
        for errand in self._errands:
            sum_rows(self._addresses, weights, errand.shard.begin, errand.partial)
            for part in errand.packer.pack(errand.partial, step, 0):
                requests.append(comm.Isend(part, errand.owner, TAG_PARTIAL))
                self.bytes_sent += part.nbytes
        return requests

    def _collect_results(self) -> list[Request]:
        comm = self._cluster.comm
        self.bytes_received += sum(errand.place.nbytes for errand in self._errands)
        return [
            comm.Irecv(part, errand.owner, TAG_RESULT)
            for errand in self._errands
            for part in transfer_pieces(errand.place)
        ]

    def _unpack_results(self) -> None:
        for errand in self._errands:
            errand.unpacker.unpack(errand.place)

    def _send_result(self, step: int) -> list[Request]:
        if not self._owner or not self._agents:
            return []
        comm = self._cluster.comm
        pieces = self._packer.pack(self.params, step, 0)
        return [comm.Isend(p, agent, TAG_RESULT) for agent in self._agents for p in pieces]

    def _receive_partials(self, weights: np.ndarray) -> np.ndarray:
        """Wait for the other nodes' sums; returns the weights of `_rows`, these included."""
        comm = self._cluster.comm
        coming = [
            comm.Irecv(part, agent, TAG_PARTIAL)
            for agent, place in zip(self._agents, self._places, strict=True)
            for part in transfer_pieces(place)
        ]
        self._wait(coming)
        for unpacker, place in zip(self._partials, self._places, strict=True):
            unpacker.unpack(place)
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
        self._errands = []  # they hold views
        super().free()


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
        owners = self._cluster.roles.owners
        self._wait(
            [
                self._hand_on(part, rank)
                for rank, shard in zip(owners, self._job.shards, strict=True)
                for part in transfer_pieces(self.replica[shard.range])
            ]
        )

    def _hand_on(self, part: np.ndarray, owner: int) -> Request:
        if self._cluster.nodes > 1 and owner != self._cluster.rank:
            self.bytes_received += part.nbytes
        return self._cluster.comm.Ibcast(part, owner)

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
        sums = [self._add_up(comm, part) for part in transfer_pieces(self.grad)]
        self._wait([*sums, self._add_up(comm, self._sums)])
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
    if job.config.codec == "powersgd" and job.cluster.nodes > 1 and rule is None:
        return LowRankRound(job)
    return (AllreduceRound if job.config.reduce == "allreduce" else SharedRound)(job, rule)
