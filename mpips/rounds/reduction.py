"""Sum of the workers' vectors over nodes, in parts of slices."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np

from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard, fragment_shards
from mpips.layout.roles import streams
from mpips.mpi.collectives import begin_sum
from mpips.mpi.start import Request
from mpips.mpi.waiting import all_done
from mpips.mpi.world import Cluster
from mpips.optim import Rule, Slots
from mpips.planning.job import Job
from mpips.rounds.base import BLOCK_BYTES, OwnState, ShardUpdate, Transfers
from mpips.rounds.internode import RemoteNodes, lanes_of

# Sizes of a slice's parts. Both MPIs send messages of SMALL_BYTES at once, one after another. Open
# MPI sends several larger messages at a time, so that all of them arrive late; on a slow link this
# delays the first update. On a fast link the work for each small part would take longer than the
# part itself.
PART_BYTES, SMALL_BYTES, MOST_PARTS = 4 << 20, 60 << 10, 4096
SLOW, SLOW_LINK = 200e6, 2e9  # bytes per second between nodes of one host, and between hosts


class OwnedPart(NamedTuple):
    """Part of an owner's slice, which is summed and updated at once.

    Attributes:
        remote: Messages from and to the other nodes.
        update: Update of the part.
        rows: Addresses of the gradients and sums to add, in the order of the nodes. If each node
            has one worker, the bits of the sum do not depend on the choice of owners.
        sum: Memory for the sum.
    """

    remote: RemoteNodes
    update: ShardUpdate
    rows: np.ndarray
    sum: np.ndarray

    def weights(self, local: np.ndarray) -> np.ndarray:
        """Return the weights of `rows`.

        Args:
            local: Weights of the node's workers. Sums of other nodes have weight 1.
        """
        before, others = self.remote.before, np.ones(len(self.remote.sums))
        return np.concatenate([others[:before], local, others[before:]])


def is_slow(cluster: Cluster, rate: float) -> bool:
    """Return whether slices go in small parts at a rate of so many bytes per second to a node."""
    return rate < (SLOW_LINK if len(set(cluster.hosts)) == cluster.nodes else SLOW)


Apply: TypeAlias = Callable[[OwnedPart, np.ndarray], object]
Receives: TypeAlias = deque[tuple[OwnedPart, list[Request]]]
Ready: TypeAlias = Callable[[], bool]


class Reduction:
    """Sum of the workers' vectors, in slices that their owners update.

    A slice is sent in parts. The results of one part arrive while the sums of the next part leave,
    so both directions of a link are busy. `share` measures the link and chooses the size of a
    part; the bits of the result do not depend on it.

    Args:
        job: The run.
        shards: Shard of each owner.
        rule: Rule that gets the sum.
        replica: Replica of this node, shape (n_params,).
        slots: An owner's slots, each as long as its shard.
        addresses: Addresses of the vectors of the node's workers.
        transfers: Counters of bytes and time.
        whole: Whether an owner has memory for the whole sum of its slice, or for a block of it.

    Attributes:
        parts: Parts of this owner's slice, at least one; empty on other ranks.
        rows: Addresses of the vectors to add for the first part, or for this node.
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
        self._job, self._shards, self._rule, self._transfers = job, shards, rule, transfers
        self._views: tuple[np.ndarray, Slots, np.ndarray] = replica, slots, addresses
        self._whole = whole
        self._divide(PART_BYTES)

    def _divide(self, part_bytes: int) -> None:
        """Divide the slices into parts of at most `part_bytes` bytes."""
        job, (replica, slots, addresses) = self._job, self._views
        owners, count = job.cluster.roles.owners, self._count(part_bytes)
        parts = fragment_shards(self._shards, count, job.dtype.itemsize)
        self._lanes = lanes_of(job, parts, replica, addresses, self._transfers)
        self.parts: list[OwnedPart] = []
        if job.cluster.rank in owners:
            own = [each[owners.index(job.cluster.rank)] for each in parts]
            size = max(shard.size for shard in own)
            if not self._whole:
                size = min(BLOCK_BYTES // job.dtype.itemsize, size)
            room = np.zeros(size, job.dtype)
            args = self._rule, replica, slots, addresses, self._transfers
            self.parts = [_owned(job, shard, *args, room[: shard.size]) for shard in own]
        self.rows = self.parts[0].rows if self.parts else addresses

    def _count(self, part_bytes: int) -> int:
        """Return the number of parts of a slice; 1 if a codec or a rule needs whole slices."""
        job = self._job
        if self._whole or job.cluster.nodes == 1 or not streams(job.config):
            return 1
        largest = max(shard.size for shard in self._shards) * job.dtype.itemsize
        return max(1, min(MOST_PARTS, -(-largest // part_bytes)))

    def state(self) -> OwnState:
        """Return the state of the push codec; see `mpips.rounds.base.OwnState`."""
        found: OwnState = {}
        for remote in chain.from_iterable(lane.parts for lane in self._lanes):
            for name, array in remote.packer.state.items():
                found.setdefault(name, []).append((remote.shard.begin, array))
        return found

    def cut(self, rule: Rule) -> None:
        """Use another rule from now on."""
        self._rule = rule
        for part in self.parts:
            part.update.cut(rule)

    def share(self, step: int) -> Iterator[Ready]:
        """Send the owners' parameters to the other nodes, without an update.

        This measures the link, and makes parts smaller if the link is slow. Yields functions that
        return whether the generator can continue.
        """
        tries, cluster = self._count(SMALL_BYTES) > self._count(PART_BYTES), self._job.cluster
        if tries:
            yield from self._sum(np.zeros(2))
        start, before = perf_counter(), self._transfers.bytes_received
        requests = [r for lane in self._lanes for r in lane.receive_results(start=True)]
        for part in self.parts:
            requests += part.remote.send_results(step, start=True)
        while not all_done(requests):
            yield partial(all_done, requests)
        for lane in self._lanes:
            lane.unpack(start=True)
        if tries:
            found = np.array([self._transfers.bytes_received - before, perf_counter() - start])
            yield from self._sum(found)
            nbytes, seconds = found.tolist()
            if is_slow(cluster, nbytes / cluster.nodes * cluster.world / seconds):
                self._divide(SMALL_BYTES)

    def _sum(self, values: np.ndarray) -> Iterator[Ready]:
        requests = [begin_sum(self._job.cluster.comm, values)]
        while not all_done(requests):
            yield partial(all_done, requests)

    def exchange(self, step: int, local: np.ndarray, apply: Apply | None = None) -> Iterator[Ready]:
        """Sum the vectors, update the parts, and share the results.

        Yields functions that return whether the generator can continue: one before the first
        update, and one whenever it has to wait.

        Args:
            step: Number of the round.
            local: Weights of the node's workers.
            apply: Function that updates a part, given the weights of its rows. By default the rule
                is applied with its own learning rate.
        """
        requests = [r for lane in self._lanes for r in lane.receive_results()]
        coming: Receives = deque((part, part.remote.receive_sums()) for part in self.parts)
        ready = partial(self._can_go_on, coming)
        for lane in self._lanes:
            requests += lane.send(step, local)
        yield ready
        while coming or any(lane.left for lane in self._lanes):
            if not ready():
                yield ready
                continue
            for lane in self._lanes:
                if lane.can_send():
                    requests += lane.send(step, local)
            if coming and all_done(coming[0][1]):
                part, _ = coming.popleft()
                part.remote.unpack_sums()
                if apply is None:
                    part.update.apply(step, 1.0, (part.rows, part.weights(local)))
                else:
                    apply(part, part.weights(local))
                requests += part.remote.send_results(step)
        while not all_done(requests):
            yield partial(all_done, requests)
        for lane in self._lanes:
            lane.unpack()

    def _can_go_on(self, coming: Receives) -> bool:
        """Return whether the next part's sums have arrived, or another part can be sent."""
        here = bool(coming) and all_done(coming[0][1])
        return here or any(lane.can_send() for lane in self._lanes)

    def free(self) -> None:
        """Drop the views of the window; may be called twice."""
        self._lanes, self._views = [], (np.zeros(0), (), np.zeros(0))
        self.parts = []


def _owned(
    job: Job, shard: Shard, rule: Rule, replica: np.ndarray, slots: Slots, addresses: np.ndarray,
    transfers: Transfers, room: np.ndarray,
) -> OwnedPart:  # fmt: skip
    """Make the part of an owner's slice that is `shard`."""
    params, begin = replica[shard.range], job.shard.begin
    remote = RemoteNodes(job, shard, params)
    relative = shard.begin * job.dtype.itemsize  # rows are addressed as whole vectors
    others, before = addresses_of(remote.sums) - relative, remote.before
    rows = np.concatenate([others[:before], addresses, others[before:]])
    of_slots = tuple(slot[shard.begin - begin : shard.end - begin] for slot in slots)
    update = ShardUpdate(job, shard, rule, params, of_slots, room, transfers)
    return OwnedPart(remote, update, rows, room)
