"""What crosses nodes in a shared-memory round: a reduce-scatter of sums, an all-gather of results.

For each shard whose owner is on another node, one rank of a node is its **agent**: it sums the
node's gradients, sends the sum to the owner, and has the result back for the node's replica. What
a codec keeps lives with the agent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpips.cluster.start import Request
from mpips.cluster.tags import TAG_PARTIAL, TAG_RESULT
from mpips.cluster.window import transfer_pieces
from mpips.cluster.world import Cluster
from mpips.kernels.vectors import sum_rows
from mpips.layout import Shard
from mpips.planning.job import Job
from mpips.rounds.base import OwnState, Transfers
from mpips.transport.wire import Packer, Packing, Unpacker, pull_codec, push_codec


def _packings(job: Job) -> tuple[Packing, Packing]:
    """Return how sums and how results are packed."""
    c = job.config
    return Packing(push_codec(c), c.seed), Packing(pull_codec(c), c.seed)


def _agent(cluster: Cluster, node: int, owner: int) -> int:
    """Return the rank that is the agent of `node` for the shard of that owner."""
    ranks = [r for r, n in enumerate(cluster.node_of) if n == node]
    return ranks[owner % len(ranks)]


class FarShard(NamedTuple):
    """A shard of another node, for its agent here.

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


class NodeAgent:
    """What this rank does for its node towards owners elsewhere; nothing if it is no agent.

    Args:
        job: The run.
        replica: The node's, which results are unpacked into.
        addresses: Of the gradients of the node's workers.
        transfers: Where bytes are counted.
    """

    def __init__(
        self, job: Job, replica: np.ndarray, addresses: np.ndarray, transfers: Transfers
    ) -> None:
        self._arrays, self._addresses, self._transfers = job.cluster.arrays, addresses, transfers
        self._shards = list(_far_shards(job, replica)) if addresses.size else []

    def state(self) -> OwnState:
        """Return what the push codec keeps, by name; positions in the flat vector."""
        found: OwnState = {}
        for far in self._shards:
            for name, array in far.packer.state.items():
                found.setdefault(name, []).append((far.shard.begin, array))
        return found

    def send_sums(self, step: int, weights: np.ndarray) -> list[Request]:
        """Sum the node's gradients, and begin to send them to the owners."""
        requests = []
        for far in self._shards:
            sum_rows(self._addresses, weights, far.shard.begin, far.partial)
            for part in far.packer.pack(far.partial, step, 0):
                requests.append(self._arrays.begin_send(part, far.owner, TAG_PARTIAL))
                self._transfers.bytes_sent += part.nbytes
        return requests

    def receive_results(self) -> list[Request]:
        """Begin to receive the results from the owners."""
        self._transfers.bytes_received += sum(far.place.nbytes for far in self._shards)
        return [
            self._arrays.begin_receive(part, far.owner, TAG_RESULT)
            for far in self._shards
            for part in transfer_pieces(far.place)
        ]

    def unpack_results(self) -> None:
        """Put the results into the replica, when they are here."""
        for far in self._shards:
            far.unpacker.unpack(far.place)

    def free(self) -> None:
        """Let go of the window's memory; may be called twice."""
        self._shards = []


def _far_shards(job: Job, replica: np.ndarray) -> list[FarShard]:
    """Return the shards that this rank is the agent for."""
    cluster, dtype = job.cluster, job.dtype
    push, pull = _packings(job)
    node, found = cluster.node_of[cluster.rank], []
    for owner, rank in enumerate(cluster.roles.owners):
        shard = job.shards[owner]
        if shard.size and not cluster.near(rank) and _agent(cluster, node, owner) == cluster.rank:
            unpacker = Unpacker(pull.codec, shard.size, dtype, replica[shard.range])
            packer = Packer(push, shard, dtype, node, 1)
            partial = np.zeros(shard.size, dtype)
            found.append(FarShard(rank, shard, partial, packer, unpacker, unpacker.place()))
    return found


class FarNodes:
    """What an owner does for the other nodes: it takes their sums, and sends its results.

    Args:
        job: The run.
        params: The owner's shard of its replica.
        transfers: Where the time is counted.

    Attributes:
        sums: One vector a node with workers, of the shard's shape.
    """

    def __init__(self, job: Job, params: np.ndarray, transfers: Transfers) -> None:
        cluster, shard, dtype = job.cluster, job.shard, job.dtype
        push, pull = _packings(job)
        self._arrays, self._params, self._transfers = cluster.arrays, params, transfers
        owner, node = cluster.roles.owners.index(cluster.rank), cluster.node_of[cluster.rank]
        others = sorted({cluster.node_of[r] for r in cluster.roles.workers} - {node})
        self._agents = [_agent(cluster, n, owner) for n in others if shard.size]
        self._packer = Packer(pull, shard, dtype, node, 1)
        self.sums: Sequence[np.ndarray] = [np.zeros(shard.size, dtype) for _ in self._agents]
        self._unpackers = [Unpacker(push.codec, shard.size, dtype, out) for out in self.sums]
        self._places = [unpacker.place() for unpacker in self._unpackers]

    def receive_sums(self) -> None:
        """Wait for the other nodes' sums."""
        coming = [
            self._arrays.begin_receive(part, agent, TAG_PARTIAL)
            for agent, place in zip(self._agents, self._places, strict=True)
            for part in transfer_pieces(place)
        ]
        self._transfers.wait(coming)
        for unpacker, place in zip(self._unpackers, self._places, strict=True):
            unpacker.unpack(place)

    def send_results(self, step: int) -> list[Request]:
        """Begin to send the shard's parameters to the other nodes."""
        if not self._agents:
            return []
        pieces = self._packer.pack(self._params, step, 0)
        return [
            self._arrays.begin_send(p, agent, TAG_RESULT) for agent in self._agents for p in pieces
        ]
