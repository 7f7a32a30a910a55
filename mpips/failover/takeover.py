"""Takeover of a dead server's shard by another server of its node.

That is the coordinator on its node, and elsewhere a spare, or the first server that lives (the
**successor**). All that the dead server needed to know is in the memory of its node, or comes once
more: each push is announced to all servers by one word, what workers send by message they send to
every server, and those of other nodes keep their pushes until they are applied
(`mpips.transport.acknowledged`). So the successor serves a second shard by a second `ShardService`,
and workers of the node read and push as before, to the same memory. In this order,

1. the dead process is killed, and is gone: nobody else writes the shard, and its rows of tables;
2. the update that it may have been in is finished (`mpips.failover.undo_log`), and then the ledger
   is exact; that of a remote worker's push, when this comes again: until then nothing else is
   applied, and nobody let read. Where rows of a table were just being evicted that cannot be
   (`mpips.failover.undo_log`), and the job ends for a restart. Readers that it had let have
   read;
3. its clock stays as it was shown. The coordinator says which batches are open, and it becomes
   theirs when all is applied here that the coordinator's shard has;
4. the shard takes part in a snapshot that the successor has not begun yet. In one that is under
   way it is not: what it has applied counts for what the servers agree on, so that the others come
   to its end, but unless the dead server's answer has come, the coordinator gives this checkpoint
   up, and begins another one at once;
5. remote workers are told how many of their pushes are applied, by which they see who serves: they
   send what is open again, and ask again for what they wanted to read. For those that have died
   their resender is asked (`mpips.failover.resending`);
6. the coordinator is told, which from the death until then begins no snapshot and does not end the
   run.

A successor that dies is followed by the next one, for all that it served. A worker that dies has
announced what it has, whoever serves. A death behind the coordinator's "end" ends the job for a
restart, and so does that of the last server of a node. What the dead server alone knew, its
statistics, is lost. Where workers have frozen arrays the job ends too: from which push on they hold
for the dead server is not known.
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

GONE_S = 10.0  # in which a process that is killed is gone


@dataclass
class Takeover:
    """A shard that was taken over.

    Attributes:
        served: The shard.
        seconds: How long that took, from the news of the death on.
        version: Of the shard then.
        continued: Whether an update was under way, and was finished.
    """

    served: ShardService
    seconds: float
    version: int
    continued: bool


class Failover:
    """What a server does about ranks that have died. Collective: no.

    Args:
        job: The run.
        half: This server's half of the store.
        succeed: Makes this server the coordinator; see `mpips.failover.coordinator_failover`.

    Attributes:
        half: As given.
        own: This server's own shard.
        remote_resender: Does what ranks of other nodes need.
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
        self._early: list[tuple[int, str, Any]] = []  # to the coordinator that this server will be
        self._settling = False

    def join(self, loop: "AsyncServer") -> None:
        """Do what is to be done for a server's loop."""
        self._loop, self.own = loop, loop.shards[0]
        self.remote_resender = RemoteResender(self._ranks, self.half.design, loop.shards)
        loop.handlers |= {
            "lost": self._lose,
            "skip": self._void,
            "left": lambda source, what: self._finish_worker(*what),
            "lacking": Resender(self._ranks, self.half.window, self.half.design).send,
            "open": lambda source, what: loop.shard_of(what[0]).store.clocks.learn(*what[1:]),
            "whole": lambda source, _: self.remote_resender.reads_done(source),
        }

    def begin(self) -> None:
        """Go on without ranks that die from now on, if the run can do without them."""
        self._ranks.failures.spare(survivable(self._job), groups(self._job))

    def keep(self, source: int, kind: str, payload: Any) -> None:
        """Keep a message to the coordinator that this server will be.

        Its news of a death came first.
        """
        assert self._succeed is not None, f"{kind} sent to a server that is not the coordinator"
        self._early.append((source, kind, payload))

    def advance(self) -> None:
        """Tell a new coordinator when all shards are at rest, and which snapshot was the last."""
        if self._settling and all(served.at_rest for served in self._loop.shards):
            self._settling = False
            self._ranks.send(self._ranks.roles.coordinator, "settled", self.own.agreement.begun)

    def _void(self, source: int, numbers: Sequence[int]) -> None:
        for served in self._loop.shards:
            served.store.skip_batches(numbers)

    def _lose(self, rank: int, _: None) -> None:
        """Go on without a rank that has died."""
        roles = self._ranks.roles
        self.remote_resender.lose(rank)
        if rank in roles.workers:
            if self._ranks.is_local(rank):
                receiver = self.half.receiver
                self._finish_worker(rank, receiver.announced(roles.workers.index(rank)))
            return
        if roles.coordinator in self._ranks.failures.lost:  # before what it has served
            self._lose_coordinator()
        if takes_over_from(self._job, rank) == self._ranks.rank:
            taken = {takeover.served.rank for takeover in self.takeovers}
            for one in fence_all(self._ranks, self.half.window, taken):
                self._take(self.take_over(one))

    def _finish_worker(self, rank: int, pushes: int) -> None:
        """Count a worker that has died as one that has finished, with all that it has announced."""
        self.remote_resender.answered(rank)
        self._loop.finished(rank, pushes)
        coordinator = self._loop.coordinator
        if coordinator and rank not in coordinator.lost:
            coordinator.lose(rank, pushes)

    def _lose_coordinator(self) -> None:
        """Follow the next coordinator, and repeat what the dead one may not have received.

        If it is this one: take over what that did.
        """
        successor, loop = follow_successor(self._job), self._loop
        loop.told_signal, self._settling = False, True
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
        self._take(home)
        for rank in set(loop.final) & self._ranks.failures.lost - set(coordinator.lost):
            coordinator.lose(rank, loop.final[rank])
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
        self.remote_resender.catch_up(takeover.served, self._loop.final)

    def _tell(self, takeover: Takeover) -> None:
        dead = self._ranks.failures.lost.intersection(self._ranks.roles.servers)
        served = takeover.served
        known = served.rank, served.agreement.begun, served.store.ledger
        told = dead, *known, takeover.seconds, takeover.continued
        self._ranks.send(self._ranks.roles.coordinator, "taken over", told)

    def take_over(self, rank: int) -> Takeover:
        """Take over the shard of a server of this node that has died, whose process is gone.

        Args:
            rank: Of the server that has died.

        Raises:
            Lost: If the job cannot go on.
        """
        start, number = time.perf_counter(), self._ranks.roles.servers.index(rank)
        if not self.own.store.frozen.nothing:
            raise cannot(rank, "arrays are frozen")
        store, receiver = self.half.serve(number)
        if store.rows is not None and not store.rows.whole:
            raise cannot(rank, "in the middle of what no other can finish")
        continued = recover(store, receiver.find)
        store.clocks.take_over(self.own.store.clocks)
        served = ShardService(self._job, self.half, rank, store, receiver)
        served.agreement.begun = self.own.agreement.begun
        receiver.tell_all()
        seconds = time.perf_counter() - start
        return Takeover(served, seconds, store.version, continued)


def fence_all(ranks: Cluster, window: Window, taken: Collection[int] = ()) -> list[int]:
    """See to it that the processes of this node's dead servers are gone.

    That of each shard, whoever has served it: one may have served another's.

    Args:
        ranks: The job's ranks.
        window: Of the store.
        taken: Those whose shards this process serves itself.

    Returns:
        The ranks of the others.

    Raises:
        Lost: If one does not go.

    Blocks: until they are gone.
    """
    dead = [r for r in ranks.roles.servers if r in ranks.failures.lost and ranks.is_local(r)]
    left = [rank for rank in dead if rank not in taken]
    for rank in left:
        fence(window, rank)
    return left


def fence(window: Window, rank: int) -> None:
    """See to it that the process of a dead rank of this node is gone.

    Args:
        window: Has its ``undo_log``.
        rank: Which.

    Raises:
        Lost: If it does not go.

    Blocks: until it is gone.
    """
    pid, started, space = process_of(window, rank)
    if space != process_space():
        raise cannot(rank, "its process was of another container")
    if not ended(pid, started):
        raise cannot(rank, "its process does not end")


def cannot(rank: int, why: str) -> Lost:
    """Return the error for a server that has died, and that the job cannot go on without."""
    return Lost(
        f"rank {rank} has died, and {why}", "all that this job needs", "it goes on by --resume"
    )


def ended(pid: int, started: int, within_s: float = GONE_S) -> bool:
    """Kill a process of this host; returns whether it is gone. Blocks: until it is.

    Args:
        pid: Its process id.
        started: When it was started: another one of that id is left alone.
        within_s: How long to wait.
    """
    if trouble(pid, started) != GONE:
        kill([pid], within_s)
    return trouble(pid, started) == GONE
