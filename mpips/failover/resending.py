"""Resending of a dead worker's pushes to remote servers; both halves.

A worker that has died leaves its pushes in the memory of its node: a word says how many it has
announced, and those that some shard is without lie whole in its buffers
(`mpips.transport.acknowledged`). The first server of its node that lives, or else the first worker,
is its **resender**. Each server of another node, when it sees the death,

1. drops what has come of it in part, and asks the resender, with the number of the last push that
   each of its shards has got: ``lacking``;
2. is sent what the shards are without, and told how many pushes there are: ``left``. Then the
   worker counts as one that has finished, as on one node (`mpips.failover.policy`).

The resender notes nothing: if it dies before 2, the next one is asked, and what has come by then is
not asked for again; what comes twice is dropped by the ledger. If nobody of the node is left, and
one server owns all parameters, what it has got is all there is: it says so to the others, and the
batches of the rest go to other workers. With several, one of them may have applied a push that no
other can get: the job ends, and starts again.

In mode hybrid the first rank of a node is its resender, and rounds say how many pushes there are:
see `mpips.rounds.survivable_hybrid`.

A server that dies has nothing to leave: see `mpips.failover.takeover`. What comes of it in part, as
a resender's, is dropped, and the next resender asked. At the end of a run workers read the
parameters by message, and servers serve until each has said ``whole``.
"""

from collections.abc import Mapping, Sequence

from mpips.kernels.atomics import observe
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.ps.design import Design
from mpips.ps.server import ShardService
from mpips.transport.acknowledged import Sending
from mpips.transport.channel import rows_packer
from mpips.transport.push_sender import PUSHED, Announced


def resender_of(cluster: Cluster, rank: int) -> int | None:
    """Return who acts for a rank that has died; None if nobody of its node lives."""
    node_of, lost = cluster.node_of, cluster.failures.lost
    ranks = cluster.roles.servers + cluster.roles.workers
    return next((r for r in ranks if node_of[r] == node_of[rank] and r not in lost), None)


class Resender:
    """Sends what workers of this node have announced that have died. Collective: no.

    Args:
        cluster: The job's ranks.
        window: Of the store.
        design: Of the store.
    """

    def __init__(self, cluster: Cluster, window: Window, design: Design) -> None:
        self._cluster, self._window, self._design = cluster, window, design
        self._sending: list[Sending] = []

    def send(self, source: int, payload: tuple[int, list[tuple[int, int]]]) -> None:
        """Send a server what its shards lack of a worker's pushes, and tell how many there are."""
        rank, lacking = payload
        self._cluster.send(source, "left", (rank, self.resend(source, rank, lacking)))

    def resend(self, source: int, rank: int, lacking: Sequence[tuple[int, int]]) -> int:
        """Send a server what its shards lack of a worker's pushes.

        Args:
            source: Rank of the server.
            rank: Of the worker, of this node.
            lacking: Numbers of servers, and of the last push that each one's shard has got.

        Returns:
            How many pushes there are.
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
    """What a server does for ranks of other nodes where some may die. Collective: no.

    Args:
        cluster: The job's ranks.
        design: Of the store.
        shards: Those that this server serves.
    """

    def __init__(self, cluster: Cluster, design: Design, shards: Sequence[ShardService]) -> None:
        self._cluster, self._kept, self._shards = cluster, design.kept, shards
        servers = zip(cluster.roles.servers, design.shards, strict=True)
        self._owners = [rank for rank, shard in servers if shard.size]
        self._asked: dict[int, int] = {}  # by rank of a worker, who was asked
        self._whole: set[int] = set()

    def reads_done(self, rank: int) -> None:
        """Note that a worker reads no more."""
        self._whole.add(rank)

    def answered(self, rank: int) -> None:
        """Note that it is known how many pushes there are of a worker that has died."""
        self._asked.pop(rank, None)

    def all_whole(self) -> bool:
        """Return whether no worker is to read any more."""
        living = set(self._cluster.roles.workers) - self._cluster.failures.lost
        return not self._kept or living <= self._whole

    def lose(self, rank: int) -> None:
        """Go on without a rank of any node that has died, as far as others are to act for it.

        Raises:
            Lost: If nobody can.
        """
        if not self._cluster.is_local(rank):
            for served in self._shards:
                served.receiver.acknowledged.lose(rank)
            if rank in self._cluster.roles.workers:
                self._ask(rank)
        for worker in [worker for worker, asked in self._asked.items() if asked == rank]:
            self._ask(worker)

    def catch_up(self, taken: ShardService, final: Mapping[int, int]) -> None:
        """Ask for what a shard that is taken over is without of remote workers that have died.

        Args:
            taken: The shard.
            final: Pushes of each worker that has finished, or died, by rank.

        Raises:
            Lost: If nobody has it.
        """
        for worker, rank in enumerate(self._cluster.roles.workers):
            if rank not in self._cluster.failures.lost or self._cluster.is_local(rank):
                continue
            whole = final.get(rank) == observe(taken.store.applied, worker)
            if not (whole or taken.store.idle):
                self._ask(rank)

    def _ask(self, rank: int) -> None:
        """Ask for what the shards are without of a remote worker that has died.

        Raises:
            Lost: If nobody has it.
        """
        cluster = self._cluster
        worker, lacking = cluster.roles.workers.index(rank), list[tuple[int, int]]()
        for served in self._shards:
            if not served.store.idle:
                number = cluster.roles.servers.index(served.rank)
                lacking.append((number, served.receiver.acknowledged.received(worker)))
        resender = resender_of(cluster, rank)
        if resender is not None:
            self._asked[rank] = resender
            cluster.send(resender, "lacking", (rank, lacking))
        elif len(self._owners) > 1:
            raise cluster.failures.needed()
        elif lacking:
            cluster.send(cluster.roles.servers, "left", (rank, lacking[0][1]))
