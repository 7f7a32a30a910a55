"""Transfers between nodes in rounds whose workers may die; see `mpips.rounds.survivable_nodes`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.layout import Shard
from mpips.mpi.start import TAG_ERA, Request
from mpips.mpi.window import transfer_pieces
from mpips.rounds.internode import agent_of, ranks_of_nodes

if TYPE_CHECKING:
    from mpips.rounds.survivable_nodes import NodesRound


class RemoteSlice(NamedTuple):
    """Slice of an owner of another node, at its agent on this node.

    Attributes:
        owner: Rank of the owner.
        shard: The slice.
        partials: The node's sums of it, one row for each averaged vector.
        places: Results from the owner, of the same shape.
    """

    owner: int
    shard: Shard
    partials: np.ndarray
    places: np.ndarray


class OwnedSlice(NamedTuple):
    """Slice that this rank updates.

    Attributes:
        number: Number of the slice.
        agents: Rank of the agent on each other node.
        sums: Sums of each other node.
        rows: For each averaged vector, addresses of the node's vectors and then of the sums.
    """

    number: int
    agents: list[int]
    sums: list[np.ndarray]
    rows: list[np.ndarray]


class Crossing:
    """Transfers of this rank to and from other nodes, between two deaths.

    Args:
        rounds: The round.
        era: Number of rounds that were repeated.
        dead: Ranks that have left the rounds.
    """

    def __init__(self, rounds: "NodesRound", era: int, dead: set[int]) -> None:
        self.era, self.dead, self._rounds = era, dead, rounds
        self._tags = TAG_ERA + 2 * era, TAG_ERA + 2 * era + 1  # of sums and of results
        self._sends: list[Request] = []
        self._receives: list[tuple[int, Request]] = []
        self._kept: list[Request] = []  # requests that may never complete, kept with their memory
        job, cluster = rounds.job, rounds.cluster
        me, here, dtype = cluster.rank, cluster.my_node, job.dtype
        self._sent, self._owned = list[RemoteSlice](), list[OwnedSlice]()
        for number, owner in enumerate(rounds.owners()):
            shard, begin = job.shards[number], job.shards[number].begin * dtype.itemsize
            shape = len(rounds.replicas), shard.size
            if owner == me and shard.size:
                others = [ranks for ranks in ranks_of_nodes(cluster.node_of) if ranks != here]
                agents = [agent_of(ranks, number, dead) for ranks in others]
                sums = [np.zeros(shape, dtype) for _ in others]
                rows = [
                    np.concatenate([local, addresses_of(sums, vector * shard.size) - begin])
                    for vector, local in enumerate(rounds.rows_here)
                ]
                self._owned.append(OwnedSlice(number, agents, sums, rows))
            remote = not cluster.is_local(owner) and shard.size
            if remote and agent_of(here, number, dead) == me:
                buffers = np.zeros((2, *shape), dtype)
                self._sent.append(RemoteSlice(owner, shard, buffers[0], buffers[1]))

    def run(self, step: int, weights: np.ndarray, reports: list[Request]) -> bool:
        """Send the sums to the owners, update, and put the results into the node's replica.

        Args:
            step: Number of the round.
            weights: Weights of all workers.
            reports: Requests that must complete as well.

        Returns:
            Whether all transfers are complete; if not, a rank has died.
        """
        rounds, (sums, results) = self._rounds, self._tags
        local = weights[rounds.workers_here]
        for sent in self._sent:
            for rows, partial in zip(rounds.rows_here, sent.partials, strict=True):
                sum_rows(rows, local, sent.shard.begin, partial)
                self.send(partial, sent.owner, sums)
            for place in sent.places:
                self._receive(place, sent.owner, results)
            rounds.transfers.bytes_sent += sent.partials.nbytes
            rounds.transfers.bytes_received += sent.places.nbytes
        if self._owned and not self._update(step, local, bool(weights.any())):
            return False
        if not self._wait(lambda: self._received() and self._all_sent() and rounds.done(reports)):
            return False
        for sent in self._sent:
            for replica, place in zip(rounds.replicas, sent.places, strict=True):
                np.copyto(replica[sent.shard.range], place)
        return True

    def _update(self, step: int, local: np.ndarray, any_samples: bool) -> bool:
        """Receive the sums, update this rank's slices and begin to send the results."""
        rounds, (tag, results), before = self._rounds, self._tags, self._receives
        self._receives = []
        for owned in self._owned:
            for agent, outs in zip(owned.agents, owned.sums, strict=True):
                for out in outs:
                    self._receive(out, agent, tag)
        complete = self._wait(self._received)
        self._receives += before
        if not complete:
            return False
        for owned in self._owned:
            piece = rounds.slice_of(owned.number)
            if any_samples:
                weights = np.concatenate([local, np.ones(len(owned.sums))])
                piece.apply(step, owned.rows, weights)
            for agent in owned.agents:
                for result in piece.results:
                    self.send(result, agent, results)
        return True

    def send(self, array: np.ndarray, rank: int, tag: int) -> None:
        """Begin to send, unless to a dead rank."""
        failures, begin = self._rounds.cluster.failures, self._rounds.cluster.arrays.begin_send
        for part in transfer_pieces(array):
            request = failures.begin_send(begin, part, rank, tag)
            self._sends += [request] if request is not None else []

    def _receive(self, array: np.ndarray, rank: int, tag: int) -> None:
        failures, begin = self._rounds.cluster.failures, self._rounds.cluster.arrays.begin_receive
        for part in transfer_pieces(array):
            request = failures.begin_send(begin, part, rank, tag)
            self._receives += [(rank, request)] if request is not None else []

    def _wait(self, complete: Callable[[], bool]) -> bool:
        """Wait until all is complete; returns False if a rank has died meanwhile."""
        gives_up = self._rounds.gives_up
        self._rounds.transfers.wait_until(lambda: gives_up() or complete())
        return not gives_up()

    def _received(self) -> bool:
        test = self._rounds.cluster.failures.attempt
        self._receives = [each for each in self._receives if test(each[1].Test) is False]
        return not self._receives

    def _all_sent(self) -> bool:
        return self._rounds.cluster.failures.done(self._sends)

    def settle(self, again: bool) -> None:
        """End the open receives from living ranks.

        Args:
            again: Whether to cancel them, since the round is repeated; else wait for them.

        Blocks: until no receive from a living rank is open.
        """
        lost = self._rounds.cluster.failures.lost
        for _, request in self._receives if again else ():
            request.Cancel()
        self._rounds.transfers.wait_until(
            lambda: self._received() or all(rank in lost for rank, _ in self._receives)
        )
        self._kept += [*self._sends, *(request for _, request in self._receives)]
        self._receives, self._sends = [], []
