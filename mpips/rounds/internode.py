"""Sums of vectors in slices, by owner, and transfers between nodes.

For each shard whose owner is on another node, one rank of a node is its **agent**: it sums the
node's gradients, sends the sum to the owner, and has the result back for the node's replica. What
a codec keeps lives with the agent.

In mode local_sgd a codec packs results too, as what the update has changed, for parameters
themselves would lose more; the owner makes of its own parameters what arrives elsewhere, so that
all nodes have the same bits. A run starts with the parameters as they are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpips.codecs import codec_for
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.layout import Shard
from mpips.mpi.start import TAG_PARTIAL, TAG_RESULT, Request
from mpips.mpi.waiting import all_done
from mpips.mpi.window import transfer_pieces
from mpips.mpi.world import Cluster
from mpips.optim import Rule, Slots
from mpips.planning.job import Job
from mpips.rounds.base import BLOCK_BYTES, OwnState, ShardUpdate, Transfers
from mpips.transport.wire import Packer, Packing, Unpacker, pull_codec, push_codec


def _packings(job: Job, shard: Shard) -> tuple[Packing, Packing, bool]:
    """Return how sums and how results are packed, and whether results are changes."""
    c = job.config
    sums = Packing(push_codec(c), c.seed)
    if c.mode == "local_sgd" and codec_for(sums.codec, shard.size, job.dtype) is not None:
        return sums, sums, True
    return sums, Packing(pull_codec(c), c.seed), False


def agent_of(cluster: Cluster, node: int, owner: int) -> int:
    """Return the rank that is the agent of `node` for the shard of that owner."""
    ranks = [r for r, n in enumerate(cluster.node_of) if n == node]
    return ranks[owner % len(ranks)]


class RemoteShard(NamedTuple):
    """A shard of another node, for its agent here.

    Attributes:
        owner: Rank of the owner.
        shard: The slice.
        partial: Room for the node's sum of it, shape (shard.size,).
        packer: Packs the sum.
        unpacker: Unpacks the result, into the node's replica if it is no change.
        place: Where the result comes as it is sent.
        replica: The slice of the node's replica.
        change: Whether the result is added to it.
    """

    owner: int
    shard: Shard
    partial: np.ndarray
    packer: Packer
    unpacker: Unpacker
    place: np.ndarray
    replica: np.ndarray
    change: bool

    def comes(self, start: bool) -> np.ndarray:
        """Return where a result comes as it is sent, or at the start the parameters."""
        return self.replica if start and self.change else self.place

    def unpack(self, start: bool) -> None:
        """Put what has come there into the replica."""
        if not self.change:
            self.unpacker.unpack(self.place)
        elif not start:
            np.add(self.replica, self.unpacker.unpack(self.place), out=self.replica)


class NodeAgent:
    """What this rank does for its node towards owners elsewhere; nothing if it is no agent.

    Args:
        job: The run.
        shards: What each owner updates, one an owner.
        replica: The node's, which results are unpacked into.
        addresses: Of the gradients of the node's workers.
        transfers: Where bytes are counted.
    """

    def __init__(
        self,
        job: Job,
        shards: Sequence[Shard],
        replica: np.ndarray,
        addresses: np.ndarray,
        transfers: Transfers,
    ) -> None:
        self._arrays, self._addresses, self._transfers = job.cluster.arrays, addresses, transfers
        self._shards = _remote_shards(job, shards, replica) if addresses.size else []

    def state(self) -> OwnState:
        """Return what the push codec keeps, by name; positions in the flat vector."""
        found: OwnState = {}
        for remote in self._shards:
            for name, array in remote.packer.state.items():
                found.setdefault(name, []).append((remote.shard.begin, array))
        return found

    def send_sums(self, step: int, weights: np.ndarray) -> list[Request]:
        """Sum the node's gradients, and begin to send them to the owners."""
        requests = []
        for remote in self._shards:
            sum_rows(self._addresses, weights, remote.shard.begin, remote.partial)
            for part in remote.packer.pack(remote.partial, step, 0):
                requests.append(self._arrays.begin_send(part, remote.owner, TAG_PARTIAL))
                self._transfers.bytes_sent += part.nbytes
        return requests

    def receive_results(self, start: bool = False) -> list[Request]:
        """Begin to receive the results from the owners, or what they start with."""
        self._transfers.bytes_received += sum(remote.comes(start).nbytes for remote in self._shards)
        return [
            self._arrays.begin_receive(part, remote.owner, TAG_RESULT)
            for remote in self._shards
            for part in transfer_pieces(remote.comes(start))
        ]

    def unpack_results(self, start: bool = False) -> None:
        """Put them into the replica, when they are here."""
        for remote in self._shards:
            remote.unpack(start)

    def free(self) -> None:
        """Let go of the window's memory; may be called twice."""
        self._shards = []


def _remote_shards(job: Job, shards: Sequence[Shard], replica: np.ndarray) -> list[RemoteShard]:
    """Return those of the shards that this rank is the agent for."""
    cluster, dtype = job.cluster, job.dtype
    node, found = cluster.node_of[cluster.rank], []
    for owner, (rank, shard) in enumerate(zip(cluster.roles.owners, shards, strict=True)):
        if (
            shard.size
            and not cluster.is_local(rank)
            and agent_of(cluster, node, owner) == cluster.rank
        ):
            push, pull, change = _packings(job, shard)
            part = replica[shard.range]
            unpacker = Unpacker(pull.codec, shard.size, dtype, None if change else part)
            packer = Packer(push, shard, dtype, node, 1)
            partial = np.zeros(shard.size, dtype)
            place = unpacker.place()
            found.append(RemoteShard(rank, shard, partial, packer, unpacker, place, part, change))
    return found


class RemoteNodes:
    """What an owner does for the other nodes: it takes their sums, and sends its results.

    Args:
        job: The run.
        shard: What the owner updates.
        params: That part of its replica.

    Attributes:
        sums: One vector a node with workers, of the shard's shape.
    """

    def __init__(self, job: Job, shard: Shard, params: np.ndarray) -> None:
        cluster, dtype = job.cluster, job.dtype
        push, pull, change = _packings(job, shard)
        self._arrays, self._params = cluster.arrays, params
        rooms = 2 if change else 0
        self._rooms = [np.zeros(shard.size, dtype) for _ in range(rooms)]
        owner, node = cluster.roles.owners.index(cluster.rank), cluster.node_of[cluster.rank]
        others = sorted({cluster.node_of[r] for r in cluster.roles.workers} - {node})
        self._agents = [agent_of(cluster, n, owner) for n in others if shard.size]
        self._packer = Packer(pull, shard, dtype, node, 1)
        self.sums: Sequence[np.ndarray] = [np.zeros(shard.size, dtype) for _ in self._agents]
        self._unpackers = [Unpacker(push.codec, shard.size, dtype, out) for out in self.sums]
        self._places = [unpacker.place() for unpacker in self._unpackers]

    def receive_sums(self) -> list[Request]:
        """Begin to receive the other nodes' sums."""
        return [
            self._arrays.begin_receive(part, agent, TAG_PARTIAL)
            for agent, place in zip(self._agents, self._places, strict=True)
            for part in transfer_pieces(place)
        ]

    def unpack_sums(self) -> None:
        """Put the sums into `sums`, when they are here."""
        for unpacker, place in zip(self._unpackers, self._places, strict=True):
            unpacker.unpack(place)

    def send_results(self, step: int, start: bool = False) -> list[Request]:
        """Begin to send what the other nodes need for the shard's parameters."""
        if not self._agents:
            return []
        if self._rooms and start:
            np.copyto(self._rooms[0], self._params)
            pieces = transfer_pieces(self._params)
        elif self._rooms:
            pieces = self._pack_change(step)
        else:
            pieces = self._packer.pack(self._params, step, 0)
        return [
            self._arrays.begin_send(p, agent, TAG_RESULT) for agent in self._agents for p in pieces
        ]

    def _pack_change(self, step: int) -> list[np.ndarray]:
        """Pack what the others do not have yet, and take what they will make of it."""
        there, change = self._rooms
        np.subtract(self._params, there, out=change)
        pieces = self._packer.pack(change, step, 0)
        self._packer.unpack(0, change)
        there += change
        np.copyto(self._params, there)
        return pieces


class Reduction:
    """The sum of the workers' vectors, in slices that their owners update.

    Args:
        job: The run.
        shards: What each owner updates.
        rule: Takes the sum.
        replica: The node's, shape (n_params,).
        slots: An owner's, over its whole shard.
        addresses: Of the vectors of the node's workers.
        transfers: Where bytes and time are counted.
        whole: Whether an owner has room for the whole sum of its slice, or for a block of it.

    Attributes:
        agent: What this rank does for its node.
        remote: What an owner does for other nodes; None on other ranks, as the next.
        update: An owner's update of its slice.
        rows: Addresses of what an owner sums: the workers' vectors, then the other nodes' sums.
        sum: Where the sum goes.
    """

    def __init__(
        self,
        job: Job,
        shards: Sequence[Shard],
        rule: Rule,
        replica: np.ndarray,
        slots: Slots,
        addresses: np.ndarray,
        transfers: Transfers,
        whole: bool = False,
    ) -> None:
        owners, dtype = job.cluster.roles.owners, job.dtype
        self.agent = NodeAgent(job, shards, replica, addresses, transfers)
        self.remote: RemoteNodes | None = None
        self.update: ShardUpdate | None = None
        self.rows, self.sum = addresses, np.zeros(0, dtype)
        if job.cluster.rank in owners:
            shard = shards[owners.index(job.cluster.rank)]
            params, begin = replica[shard.range], job.shard.begin
            self.remote = RemoteNodes(job, shard, params)
            relative = shard.begin * dtype.itemsize  # rows are addressed as whole vectors
            self.rows = np.concatenate([addresses, addresses_of(self.remote.sums) - relative])
            size = shard.size if whole else min(BLOCK_BYTES // dtype.itemsize, shard.size)
            self.sum = np.zeros(size, dtype)
            of_slots = tuple(slot[shard.begin - begin : shard.end - begin] for slot in slots)
            self.update = ShardUpdate(job, shard, rule, params, of_slots, self.sum, transfers)

    def weights(self, local: np.ndarray) -> np.ndarray:
        """Return the weights of `rows`, of which those of the node's workers are given."""
        assert self.remote is not None, "an owner sums"
        return np.concatenate([local, np.ones(len(self.remote.sums))])

    def share(self, step: int) -> Iterator[None]:
        """Bring what owners hold to the other nodes, as it is; yields where it waits."""
        requests = self.agent.receive_results(start=True)
        if self.remote is not None:
            requests += self.remote.send_results(step, start=True)
        while not all_done(requests):
            yield
        self.agent.unpack_results(start=True)

    def exchange(self, step: int, local: np.ndarray) -> Iterator[None]:
        """Sum, update and share the result; yields where it waits.

        Args:
            step: Number of the round.
            local: Weights of the node's workers.
        """
        requests = self.agent.send_sums(step, local) + self.agent.receive_results()
        if self.remote is not None and self.update is not None:
            coming = self.remote.receive_sums()
            while not all_done(coming):
                yield
            self.remote.unpack_sums()
            self.update.apply(step, 1.0, (self.rows, self.weights(local)))
            requests += self.remote.send_results(step)
        while not all_done(requests):
            yield
        self.agent.unpack_results()

    def free(self) -> None:
        """Let go of the window's memory; may be called twice."""
        self.agent.free()
        self.remote = self.update = None
