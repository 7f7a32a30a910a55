"""Sums of vectors in slices, by owner, and transfers between nodes.

For each shard whose owner is on another node, one rank of a node is its **agent**: it sums the
node's gradients, sends the sum to the owner, and has the result back for the node's replica. What
a codec keeps lives with the agent.

Slices go in parts, so that results of one come while sums of the next leave, and a link carries
both directions at once. An agent has only so many parts of a slice on their way: so no node sends
far ahead of the others, whose sums an owner needs as well. Packed slices, and those of a rule that
needs whole arrays or the norm of the gradient, go whole.

In mode local_sgd a codec packs results too, as what the update has changed, for parameters
themselves would lose more; the owner makes of its own parameters what arrives elsewhere, so that
all nodes have the same bits. A run starts with the parameters as they are.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from mpips.codecs import codec_for
from mpips.kernels.vectors import sum_rows
from mpips.layout import Shard
from mpips.mpi.start import TAG_PARTIAL, TAG_RESULT, Request
from mpips.mpi.waiting import all_done
from mpips.mpi.window import transfer_pieces
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.rounds.base import Transfers
from mpips.transport.wire import Packer, Packing, Unpacker, pull_codec, push_codec

# Parts of a slice whose sums a node has sent, but whose results it has not: at first, and later.
FIRST, ON_THE_WAY = 2, 6


def _packings(job: Job, shard: Shard) -> tuple[Packing, Packing, bool]:
    """Return how sums and how results are packed, and whether results are changes."""
    c = job.config
    sums = Packing(push_codec(c), c.seed)
    if c.mode == "local_sgd" and codec_for(sums.codec, shard.size, job.dtype) is not None:
        return sums, sums, True
    return sums, Packing(pull_codec(c), c.seed), False


def agent_of(cluster: Cluster, node: int, owner: int, dead: Collection[int] = frozenset()) -> int:
    """Return the rank that is the agent of `node` for the shard of that owner; one lives."""
    ranks = [r for r, n in enumerate(cluster.node_of) if n == node]
    first = owner % len(ranks)
    return next(rank for rank in (*ranks[first:], *ranks[:first]) if rank not in dead)


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


class Lane:
    """The parts of a slice of another node, for the agent for it: sums leave, results come.

    Only so many parts are on their way at a time. So no node sends ahead of the others, whose sums
    an owner needs as well, and results do not wait behind many sums.

    Args:
        job: The run.
        parts: In their order.
        addresses: Of the gradients of the node's workers.
        transfers: Where bytes are counted.
    """

    def __init__(
        self, job: Job, parts: Sequence[RemoteShard], addresses: np.ndarray, transfers: Transfers
    ) -> None:
        self._arrays, self._addresses, self._transfers = job.cluster.arrays, addresses, transfers
        self.parts = parts
        self._results: list[list[Request]] = []
        self._sent = self._done = 0

    def receive_results(self, start: bool = False) -> list[Request]:
        """Begin to receive the results from the owner, or what it starts with."""
        self._results = [self._receive(part, start) for part in self.parts]
        self._sent = self._done = 0
        return [*chain.from_iterable(self._results)]

    def _receive(self, part: RemoteShard, start: bool) -> list[Request]:
        place, begin = part.comes(start), self._arrays.begin_receive
        self._transfers.bytes_received += place.nbytes
        return [begin(piece, part.owner, TAG_RESULT) for piece in transfer_pieces(place)]

    def can_send(self) -> bool:
        """Return whether the next sum may leave. Blocks: no."""
        while self._done < self._sent and all_done(self._results[self._done]):
            self._done += 1
        most = min(ON_THE_WAY, FIRST + self._done)  # few at first, so that all nodes' come at once
        return self._sent < min(len(self.parts), self._done + most)

    def send(self, step: int, weights: np.ndarray) -> list[Request]:
        """Sum the node's gradients of the next part, and begin to send the sum."""
        part, requests = self.parts[self._sent], []
        self._sent += 1
        sum_rows(self._addresses, weights, part.shard.begin, part.partial)
        for piece in part.packer.pack(part.partial, step, 0):
            requests.append(self._arrays.begin_send(piece, part.owner, TAG_PARTIAL))
            self._transfers.bytes_sent += piece.nbytes
        return requests

    @property
    def left(self) -> bool:
        """Whether there are sums still to be sent."""
        return self._sent < len(self.parts)

    def unpack(self, start: bool = False) -> None:
        """Put the results into the replica, when they are here."""
        for part in self.parts:
            part.unpack(start)


def lanes_of(
    job: Job, parts: Sequence[Sequence[Shard]], replica: np.ndarray, addresses: np.ndarray,
    transfers: Transfers,
) -> list[Lane]:  # fmt: skip
    """Return what this rank does as an agent; the owners behind it come first.

    Args:
        job: The run.
        parts: What owners update, by part and then by owner.
        replica: The node's.
        addresses: Of the gradients of the node's workers.
        transfers: Where bytes are counted.
    """
    if not addresses.size:
        return []
    by_owner = dict[int, list[RemoteShard]]()
    for shards in parts:
        for remote in _remote_shards(job, shards, replica):
            by_owner.setdefault(remote.owner, []).append(remote)
    rank, world = job.cluster.rank, job.cluster.world
    order = sorted(by_owner, key=lambda owner: (owner - rank) % world)
    return [Lane(job, by_owner[owner], addresses, transfers) for owner in order]


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
        before: How many of them are of nodes before this one.
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
        self.before = sum(n < node for n in others) if shard.size else 0
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
