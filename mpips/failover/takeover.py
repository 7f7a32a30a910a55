"""Takeover of a dead server's shard by another server of its node.

The **successor** is the coordinator on its own node, and elsewhere a spare, or the first living
server. All state of the dead server is in the memory of its node, or is sent again. One word
announces each push to all servers. Workers send their messages to every server. Workers of other
nodes keep their pushes until they are applied (`mpips.transport.acknowledged`). So the successor
serves the shard by another `ShardService`. Workers of the node read and push as before, in the same
memory. The steps are, in this order:

1. The successor kills the dead server's process and waits until it is gone. No other process then
   writes the shard or its rows of tables.
2. It finishes the update that may be under way (`mpips.failover.undo_log`); then the ledger is
   exact. If the push is a remote worker's, it waits for that worker to resend it. Until then it
   applies no other push and grants no reads. An eviction of rows under way cannot be finished: the
   job ends and restarts. Reads that the dead server granted are over.
3. The shard's clock stays at the value in the header. The coordinator tells the successor the open
   batches. The clock follows them once this shard has applied all pushes that the coordinator's
   shard has.
4. The shard takes part in the next snapshot that the successor begins, not in one under way. Its
   ledger still counts in that snapshot's agreement, so that the other servers finish it. Unless the
   dead server has already answered, the coordinator gives up this checkpoint and begins another at
   once.
5. The successor tells remote workers how many of their pushes are applied, which also tells them
   the new server. They resend open pushes and repeat their read requests. For dead workers the
   successor asks the resender (`mpips.failover.resending`).
6. The successor tells the coordinator. From the death until then, the coordinator begins no
   snapshot and does not end the run.

If a successor dies, the next one takes over all its shards. A dead worker's announced pushes are
applied, whichever server has the shard. A death after the coordinator's "end" ends the job, which
restarts; so does the death of a node's last server. The statistics of the dead server are lost. If
workers have frozen arrays, the job ends too: the successor does not know from which push on the
dead server applied the mask.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpips.failover.policy import follow_successor, groups, survivable, takes_over_from
from mpips.failover.resending import RemoteResender, Resender
from mpips.failover.undo_log import process_of, process_space, recover
from mpips.mpi.abort import Lost
from mpips.mpi.process import GONE, kill, trouble
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.ps.assemble import ServerHalf
from mpips.ps.server import ShardService

if TYPE_CHECKING:
    from mpips.ps.coordinator import Coordinator
    from mpips.ps.server import AsyncServer

GONE_S = 10.0  # limit for a killed process to be gone


@dataclass
class Takeover:
    """A shard that was taken over.

    Attributes:
        served: Service of the shard.
        seconds: Duration of the takeover, from the news of the death.
        version: Version of the shard after the takeover.
        continued: Whether an update was under way, and was finished.
    """

    served: ShardService
    seconds: float
    version: int
    continued: bool


class Failover:
    """A server's reaction to deaths of ranks. Collective: no.

    Args:
        job: The run.
        half: This server's half of the store.
        succeed: Makes this server the coordinator; see `mpips.failover.coordinator_failover`.

    Attributes:
        half: As given.
        own: This server's own shard.
        remote_resender: Requests for pushes of dead ranks of other nodes.
        takeovers: Shards that this server has taken over.
    """

    def __init__(
        self,
        job: Job,
        half: ServerHalf,
        succeed: "Callable[[Failover], tuple[Coordinator, Takeover]] | None" = None,
    ) -> None:
        self._job, self._ranks, self.half, self._succeed = job, job.cluster, half, succeed
        self.takeovers: list[Takeover] = []
        self._early: list[tuple[int, str, Any]] = []  # for the coordinator that this server becomes
        self._settling = False

    def join(self, loop: "AsyncServer") -> None:
        """Add the handlers of messages about deaths to a server's loop."""
        self._loop, self.own = loop, loop.shards[0]
        self.remote_resender = RemoteResender(self._ranks, self.half.design, loop.shards)
        loop.handlers |= {
            "lost": self._lose,
            "fin": self._finished,
            "skip": self._skip_batches,
            "left": lambda source, what: self._finish_worker(*what),
            "lacking": Resender(self._ranks, self.half.window, self.half.design).send,
            "open": lambda source, what: loop.shard_of(what[0]).store.clocks.learn(*what[1:]),
            "whole": lambda source, _: self.remote_resender.done_reading.add(source),
        }

    def begin(self) -> None:
        """Have the run continue when ranks die from now on, if it can do without them."""
        self._ranks.failures.spare(survivable(self._job), groups(self._job))

    def keep(self, source: int, kind: str, payload: Any) -> None:
        """Keep a message to the coordinator until this server becomes the coordinator.

        Its sender heard of the coordinator's death before this server.
        """
        assert self._succeed is not None, f"{kind} sent to a server that is not the coordinator"
        self._early.append((source, kind, payload))

    def advance(self) -> None:
        """Tell a new coordinator that all shards are at rest, and the last snapshot's number."""
        if self._settling and all(served.at_rest for served in self._loop.shards):
            self._settling = False
            self._ranks.send(self._ranks.roles.coordinator, "settled", self.own.agreement.begun)

    def _skip_batches(self, source: int, numbers: Sequence[int]) -> None:
        for served in self._loop.shards:
            served.store.skip_batches(numbers)

    def _lose(self, rank: int, _: None) -> None:
        """Continue without a dead rank."""
        roles = self._ranks.roles
        self.remote_resender.lose(rank)
        if rank in roles.workers:
            if self._ranks.is_local(rank):
                receiver = self.half.receiver
                self._finish_worker(rank, receiver.announced(roles.workers.index(rank)))
            return
        if roles.coordinator in self._ranks.failures.lost:  # before the takeover of its shards
            self._lose_coordinator()
        if takes_over_from(self._job, rank) == self._ranks.rank:
            taken = {takeover.served.rank for takeover in self.takeovers}
            for dead in fence_all(self._ranks, self.half.window, taken):
                self._take(self.take_over(dead))

    def _finished(self, rank: int, pushes: int) -> None:
        """Note a worker's last push; if the worker has died, the push may not have left."""
        if rank not in self._ranks.failures.lost:
            self._loop.finished(rank, pushes)

    def _finish_worker(self, rank: int, pushes: int) -> None:
        """Count a dead worker as finished, with all pushes that it announced."""
        self.remote_resender.left[rank] = pushes
        self._loop.finished(rank, pushes)
        coordinator = self._loop.coordinator
        if coordinator and rank not in coordinator.lost:
            coordinator.lose(rank, pushes)

    def _lose_coordinator(self) -> None:
        """Follow the new coordinator, and repeat the messages that the dead one may have missed.

        If this server is the successor, it becomes the coordinator first.
        """
        successor, loop = follow_successor(self._job), self._loop
        loop.reported_signal, self._settling = False, True
        for served in loop.shards:
            served.reported_done = False
            served.give_up()
        for takeover in self.takeovers:
            self._tell(takeover)
        if successor != self._ranks.rank:
            return
        assert self._succeed is not None, "else the death of a server ends the job"
        coordinator, home = self._succeed(self)
        loop.become(coordinator)
        # Each of the two may have learned the number of a worker's pushes without the other.
        for rank, pushes in {**self.remote_resender.left, **coordinator.lost}.items():
            self._finish_worker(rank, pushes)
        self._take(home)
        for message in self._early:
            coordinator.handle(*message)
        self._early.clear()

    def _take(self, takeover: Takeover) -> None:
        """Serve a shard that was just taken over, and tell the coordinator."""
        self.takeovers.append(takeover)
        self._loop.shards.append(takeover.served)
        if self._loop.coordinator is not None:
            takeover.served.serve_beside(self._loop.coordinator)
        self._tell(takeover)
        self.remote_resender.catch_up(takeover.served)

    def _tell(self, takeover: Takeover) -> None:
        dead = self._ranks.failures.lost.intersection(self._ranks.roles.servers)
        served = takeover.served
        shard = served.rank, served.agreement.begun, served.store.ledger
        news = dead, *shard, takeover.seconds, takeover.continued
        self._ranks.send(self._ranks.roles.coordinator, "taken over", news)

    def take_over(self, rank: int) -> Takeover:
        """Take over the shard of a dead server of this node, whose process is gone.

        Args:
            rank: Rank of the dead server.

        Raises:
            Lost: If the job cannot continue.
        """
        start, number = time.perf_counter(), self._ranks.roles.servers.index(rank)
        if not self.own.store.frozen.nothing:
            raise cannot_continue(rank, "arrays are frozen")
        store, receiver = self.half.serve(number)
        if store.rows is not None and not store.rows.whole:
            raise cannot_continue(rank, "in the middle of an eviction of rows")
        continued = recover(store, receiver.find)
        store.clocks.take_over()
        served = ShardService(self._job, self.half, rank, store, receiver)
        served.agreement.begun = self.own.agreement.begun
        if self.half.design.kept:
            receiver.acknowledged.tell_all()
        seconds = time.perf_counter() - start
        return Takeover(served, seconds, store.version, continued)


def fence_all(ranks: Cluster, window: Window, taken: Collection[int] = ()) -> list[int]:
    """Ensure that the processes of this node's dead servers are gone.

    A process may have served several shards: the present process of each shard is ended.

    Args:
        ranks: The job's ranks.
        window: Window of the store.
        taken: Ranks of dead servers whose shards this process already serves.

    Returns:
        The ranks of the other dead servers.

    Raises:
        Lost: If a process does not end.

    Blocks: until they are gone.
    """
    dead = [r for r in ranks.roles.servers if r in ranks.failures.lost and ranks.is_local(r)]
    others = [rank for rank in dead if rank not in taken]
    for rank in others:
        fence(window, rank)
    return others


def fence(window: Window, rank: int) -> None:
    """Ensure that the process of a dead rank of this node is gone.

    Args:
        window: A window with the rank's ``undo_log``.
        rank: The dead rank.

    Raises:
        Lost: If the process does not end.

    Blocks: until it is gone.
    """
    pid, started, space = process_of(window, rank)
    if space != process_space():
        raise cannot_continue(rank, "its process was of another container")
    if not ended(pid, started):
        raise cannot_continue(rank, "its process does not end")


def cannot_continue(rank: int, why: str) -> Lost:
    """Return the error for a dead server that the job cannot continue without."""
    return Lost(
        f"rank {rank} has died, and {why}", "all that this job needs", "it goes on by --resume"
    )


def ended(pid: int, started: int, within_s: float = GONE_S) -> bool:
    """Kill a process of this host; returns whether it is gone. Blocks: until it is.

    Args:
        pid: Process id.
        started: Start time of the process; a process with another start time is left alone.
        within_s: Longest time to wait, in seconds.
    """
    if trouble(pid, started) != GONE:
        kill([pid], within_s)
    return trouble(pid, started) == GONE
