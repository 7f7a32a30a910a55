"""Sums of vectors in slices, by owner, and transfers between nodes.

For each shard whose owner is on another node, one rank of a node is its **agent**. It sums the
node's gradients, sends the sum to the owner, and receives the result for the node's replica. A
codec's state is at the agent.

Slices are sent in parts, so that results of one part arrive while sums of the next leave, and a
link carries both directions at once. An agent has a limited number of parts of a slice on their
way. So no node sends far ahead of the others, whose sums an owner needs as well. Packed slices are
sent whole, and so are those of a rule that needs whole arrays or the norm of the gradient.

In mode local_sgd a codec also packs results, as the changes of the update; packed parameters would
lose more precision. The owner sets its own parameters to the values that the other nodes get, so
that all nodes have the same bits. A run starts with unpacked parameters.
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
from mpips.planning.job import Job
from mpips.rounds.base import Transfers
from mpips.transport.wire import Packer, Packing, Unpacker, pull_codec, push_codec

# Limits of the parts of a slice whose sums are sent and whose results are missing: first, later.
FIRST, ON_THE_WAY = 2, 6


def _packings(job: Job, shard: Shard) -> tuple[Packing, Packing, bool]:
    """Return the packing of sums, the packing of results, and whether results are changes."""
    c = job.config
    sums = Packing(push_codec(c), c.seed)
    if c.mode == "local_sgd" and codec_for(sums.codec, shard.size, job.dtype) is not None:
        return sums, sums, True
    return sums, Packing(pull_codec(c), c.seed), False


def ranks_of_nodes(node_of: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, increasing, from the node of each rank."""
    found: list[list[int]] = [[] for _ in range(max(node_of) + 1)]
    for rank, node in enumerate(node_of):
        found[node].append(rank)
    return found


def agent_of(ranks: Sequence[int], owner: int, dead: Collection[int] = frozenset()) -> int:
    """Return the agent for the shard of an owner on the node of `ranks`, one of which is alive."""
    first = owner % len(ranks)
    return next(rank for rank in (*ranks[first:], *ranks[:first]) if rank not in dead)


class RemoteShard(NamedTuple):
    """Shard of another node, at its agent on this node.

    Attributes:
        owner: Rank of the owner.
        shard: The slice.
        partial: The node's sum of it, shape (shard.size,).
        packer: Packs the sum.
        unpacker: Unpacks the result, into the node's replica unless it is a change.
        place: Receive buffer of the result.
        replica: The slice of the node's replica.
        change: Whether the result is added to the replica.
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
        """Return the receive buffer of a result, or at the start of the parameters."""
        return self.replica if start and self.change else self.place

    def unpack(self, start: bool) -> None:
        """Unpack a received result into the replica."""
        if not self.change:
            self.unpacker.unpack(self.place)
        elif not start:
            np.add(self.replica, self.unpacker.unpack(self.place), out=self.replica)


class Lane:
    """Parts of a slice of another node, at its agent: sums leave, results arrive.

    A limited number of parts is on their way at a time. So no node sends ahead of the others, whose
    sums an owner needs as well, and results do not wait behind many sums.

    Args:
        job: The run.
        parts: The parts, in order.
        addresses: Addresses of the gradients of the node's workers.
        transfers: Counts bytes.
    """

    def __init__(
        self, job: Job, parts: Sequence[RemoteShard], addresses: np.ndarray, transfers: Transfers
    ) -> None:
        self._arrays, self._addresses, self._transfers = job.cluster.arrays, addresses, transfers
        self.parts = parts
        self._results: list[list[Request]] = []
        self._sent = self._done = 0

    def receive_results(self, start: bool = False) -> list[Request]:
        """Begin to receive the owner's results, or its parameters at the start."""
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
        most = min(ON_THE_WAY, FIRST + self._done)  # few at first: all nodes' arrive together
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
        """Whether sums remain to be sent."""
        return self._sent < len(self.parts)

    def unpack(self, start: bool = False) -> None:
        """Unpack the results into the replica, once they are here."""
        for part in self.parts:
            part.unpack(start)


def lanes_of(
    job: Job, parts: Sequence[Sequence[Shard]], replica: np.ndarray, addresses: np.ndarray,
    transfers: Transfers,
) -> list[Lane]:  # fmt: skip
    """Return the lanes of this rank as an agent; the owners of the next higher ranks come first.

    Args:
        job: The run.
        parts: Slices that owners update, by part and then by owner.
        replica: The node's replica.
        addresses: Addresses of the gradients of the node's workers.
        transfers: Counts bytes.
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
    """Return the shards for which this rank is the agent."""
    cluster, dtype = job.cluster, job.dtype
    node, found = cluster.node_of[cluster.rank], []
    for owner, (rank, shard) in enumerate(zip(cluster.roles.owners, shards, strict=True)):
        if (
            shard.size
            and not cluster.is_local(rank)
            and agent_of(cluster.my_node, owner) == cluster.rank
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
    """An owner's transfers with the other nodes: receives their sums, and sends its results.

    Args:
        job: The run.
        shard: Slice that the owner updates.
        params: The slice of its replica.

    Attributes:
        sums: One vector for each node with workers, of the shard's shape.
        before: Number of these nodes that come before this one.
    """

    def __init__(self, job: Job, shard: Shard, params: np.ndarray) -> None:
        cluster, dtype = job.cluster, job.dtype
        push, pull, change = _packings(job, shard)
        self._arrays, self._params = cluster.arrays, params
        self._buffers = [np.zeros(shard.size, dtype) for _ in range(2 if change else 0)]
        owner, node = cluster.roles.owners.index(cluster.rank), cluster.node_of[cluster.rank]
        others = sorted({cluster.node_of[r] for r in cluster.roles.workers} - {node})
        nodes = ranks_of_nodes(cluster.node_of)
        self._agents = [agent_of(nodes[n], owner) for n in others if shard.size]
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
        """Unpack the received sums into `sums`."""
        for unpacker, place in zip(self._unpackers, self._places, strict=True):
            unpacker.unpack(place)

    def send_results(self, step: int, start: bool = False) -> list[Request]:
        """Begin to send the shard's result, or at the start its parameters, to the other nodes."""
        if not self._agents:
            return []
        if self._buffers and start:
            np.copyto(self._buffers[0], self._params)
            pieces = transfer_pieces(self._params)
        elif self._buffers:
            pieces = self._pack_change(step)
        else:
            pieces = self._packer.pack(self._params, step, 0)
        return [
            self._arrays.begin_send(p, agent, TAG_RESULT) for agent in self._agents for p in pieces
        ]

    def _pack_change(self, step: int) -> list[np.ndarray]:
        """Pack the change since the last result, and set the parameters to the others' values."""
        sent, change = self._buffers
        np.subtract(self._params, sent, out=change)
        pieces = self._packer.pack(change, step, 0)
        self._packer.unpack(0, change)
        sent += change
        np.copyto(self._params, sent)
        return pieces
