"""Resending of a dead worker's pushes to remote servers; both halves.

A dead worker leaves its pushes in the memory of its node. A word contains the number of announced
pushes, and its buffers contain each push that some shard has not applied
(`mpips.transport.acknowledged`). The **resender** is the first living server of the worker's node,
or else the first living worker. When a server of another node detects the death, it

1. drops the parts of unfinished messages from the worker. It sends the resender a message
   ``lacking``, with the number of the last push that each of its shards has received;
2. receives the number of pushes in a message ``left``, and the missing pushes. Then the worker
   counts as finished, as on one node (`mpips.failover.policy`).

The resender keeps no state. If it dies before step 2, the server asks the next one for the pushes
that it still lacks. The ledger drops pushes that arrive twice. If no rank of the node is alive and
one server owns all parameters, the pushes that it received are final. It reports their number to
the other servers, and other workers get the remaining batches. With several owners, one may have
applied a push that no other can get: the job ends and restarts.

In mode hybrid the first rank of a node is its resender, and the rounds determine the number of
pushes: see `mpips.rounds.survivable_hybrid`.

A dead server leaves no pushes: see `mpips.failover.takeover`. Other servers drop the parts of its
unfinished messages. If it was a resender, they ask the next one. At the end of a run workers read
the parameters by message, and servers serve until each worker has sent ``whole``.
"""

from collections.abc import Sequence

from mpips.kernels.atomics import observe
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.ps.design import Design
from mpips.ps.server import ShardService
from mpips.transport.acknowledged import Sending
from mpips.transport.channel import rows_packer
from mpips.transport.push_sender import PUSHED, Announced


def resender_of(cluster: Cluster, rank: int) -> int | None:
    """Return the rank that resends for a dead rank; None if no rank of its node is alive."""
    node_of, lost = cluster.node_of, cluster.failures.lost
    ranks = cluster.roles.servers + cluster.roles.workers
    return next((r for r in ranks if node_of[r] == node_of[rank] and r not in lost), None)


class Resender:
    """Sender of the pushes that dead workers of this node announced. Collective: no.

    Args:
        cluster: The job's ranks.
        window: Window of the store.
        design: Design of the store.
    """

    def __init__(self, cluster: Cluster, window: Window, design: Design) -> None:
        self._cluster, self._window, self._design = cluster, window, design
        self._sending: list[Sending] = []

    def send(self, source: int, payload: tuple[int, list[tuple[int, int]]]) -> None:
        """Send a server the missing pushes of a dead worker, and the final number of pushes."""
        rank, lacking = payload
        self._cluster.send(source, "left", (rank, self.resend(source, rank, lacking)))

    def resend(self, source: int, rank: int, lacking: Sequence[tuple[int, int]]) -> int:
        """Send a server the pushes of a dead worker that its shards lack.

        Args:
            source: Rank of the server.
            rank: Rank of the worker, on this node.
            lacking: Number of each server, and of the last push that its shard has received.

        Returns:
            Number of pushes that the worker announced.
        """
        worker, design = self._cluster.roles.workers.index(rank), self._design
        source_of = Announced.of(self._window, worker, rank)
        pushes = observe(source_of.words, PUSHED)
        self._sending = [sending for sending in self._sending if not sending.all_done()]
        for server, got in lacking:
            owner = server, source, design.shards[server]
            rows = rows_packer(self._cluster, self._window, worker, server, design.push_options)
            sending = Sending(self._cluster, owner, source_of, design.pushes, rows)
            for seq in range(got + 1, pushes + 1):
                sending.send(seq)
            self._sending.append(sending)
        return pushes


class RemoteResender:
    """A server's requests for pushes of dead ranks of other nodes. Collective: no.

    Args:
        cluster: The job's ranks.
        design: Design of the store.
        shards: Shards that this server serves.

    Attributes:
        left: Final number of pushes of each dead worker of any node, by rank, once it is known.
        done_reading: Ranks of the workers that make no more reads.
    """

    def __init__(self, cluster: Cluster, design: Design, shards: Sequence[ShardService]) -> None:
        self._cluster, self._kept, self._shards = cluster, design.kept, shards
        servers = zip(cluster.roles.servers, design.shards, strict=True)
        self._owners = [rank for rank, shard in servers if shard.size]
        self._asked: dict[int, int] = {}  # resender that was asked, by rank of the dead worker
        self.left: dict[int, int] = {}
        self.done_reading: set[int] = set()

    def all_reads_done(self) -> bool:
        """Return whether no worker reads any more."""
        living = set(self._cluster.roles.workers) - self._cluster.failures.lost
        return not self._kept or living <= self.done_reading

    def lose(self, rank: int) -> None:
        """Handle a death: ask for a remote worker's pushes, and replace a dead resender.

        Args:
            rank: The dead rank, of any node.

        Raises:
            Lost: If no rank can resend the pushes.
        """
        if not self._cluster.is_local(rank):
            for served in self._shards:
                served.receiver.acknowledged.lose(rank)
            if rank in self._cluster.roles.workers:
                self._ask(rank)
        for worker in [worker for worker, asked in self._asked.items() if asked == rank]:
            if not self._has_all(worker):
                self._ask(worker)

    def catch_up(self, taken: ShardService) -> None:
        """Ask for the pushes of dead remote workers that a shard lacks after its takeover.

        Args:
            taken: The shard.

        Raises:
            Lost: If no rank has them.
        """
        for worker, rank in enumerate(self._cluster.roles.workers):
            if rank not in self._cluster.failures.lost or self._cluster.is_local(rank):
                continue
            whole = self.left.get(rank) == observe(taken.store.applied, worker)
            if not (whole or taken.store.idle):
                self._ask(rank)

    def _received(self, rank: int) -> list[tuple[int, int]]:
        """Return the number of each shard, and of a worker's last push that it has received."""
        roles = self._cluster.roles
        worker = roles.workers.index(rank)
        return [
            (roles.servers.index(served.rank), served.receiver.acknowledged.received(worker))
            for served in self._shards
            if not served.store.idle
        ]

    def _has_all(self, rank: int) -> bool:
        """Return whether the shards have received all pushes of a dead remote worker."""
        return rank in self.left and all(got >= self.left[rank] for _, got in self._received(rank))

    def _ask(self, rank: int) -> None:
        """Ask for the pushes of a dead remote worker that the shards lack.

        Raises:
            Lost: If no rank has one that must be applied: a part of it is, or others count on it.
        """
        cluster, lacking = self._cluster, self._received(rank)
        worker = cluster.roles.workers.index(rank)
        half_applied = [served.store.resumes or (worker, 0) for served in self._shards]
        parts = (seq for pusher, seq in half_applied if pusher == worker)
        needed = max(self.left.get(rank, 0), *parts, 0)
        resender = resender_of(cluster, rank)
        if resender is not None:
            self._asked[rank] = resender
            cluster.send(resender, "lacking", (rank, lacking))
        elif len(self._owners) > 1 or any(got < needed for _, got in lacking):
            raise cluster.failures.needed()
        elif lacking:
            cluster.send(cluster.roles.servers, "left", (rank, lacking[0][1]))
