"""Loop of an asynchronous server, and its shards.

A server takes pushes and applies them, until every worker has said how many it sent and all of
them are applied. Beside its own shard it serves those that it has taken over. The coordinator has a
second duty: see `mpips.ps.coordinator`. Snapshots: see `mpips.snapshot.agreement`. Ranks that die:
see `mpips.failover.takeover`.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mpips.health import status_board
from mpips.mpi import signals
from mpips.mpi.collectives import Handler
from mpips.mpi.waiting import take_turns
from mpips.planning.job import Job
from mpips.ps.assemble import ServerHalf
from mpips.ps.coordinator import Coordinator
from mpips.ps.local_pushes import local_pushes
from mpips.ps.shard import Observer, Server
from mpips.snapshot.agreement import Phase, SnapshotAgreement
from mpips.snapshot.saver import saver_of
from mpips.transport.channel import Receiver
from mpips.transport.push import batches_of

if TYPE_CHECKING:
    from mpips.failover.takeover import Failover


TURN_S = 50e-6  # after which a server that applies pushes attends to all else
LOCAL_TURNS = 20  # of them, where only messages may come meanwhile


class ShardService:
    """A shard, and what a server does for it. Collective: no.

    Args:
        job: The run.
        half: This server's half of the store.
        rank: Of the server that began with it.
        store: Applies pushes to it.
        receiver: Where they come from.

    Attributes:
        agreement: Says which pushes a checkpoint holds.
        saver: Writes it.
        local: Applies pushes by one compiled loop, if that will do.
        reported_done: Whether the coordinator knows that all is applied.
    """

    def __init__(
        self, job: Job, half: ServerHalf, rank: int, store: Server, receiver: Receiver
    ) -> None:
        def tell(applied: list[int]) -> None:
            job.cluster.send(job.cluster.roles.coordinator, "applied", (number, applied))

        self.rank, self.store, self.receiver = rank, store, receiver
        number = job.cluster.roles.servers.index(rank)
        beyond = job.config.node_aggregation
        self.agreement = SnapshotAgreement(store.applied, store.idle, beyond, tell)
        self.saver = saver_of(job, store, store.rows, number)
        self.local = local_pushes(job.cluster, half.design, store, receiver)
        self.reported_done = False

    def apply_some(self, waits: bool) -> bool:
        """Apply pushes that are here, for a while at most; returns whether there was one.

        Args:
            waits: Whether to wait a little for the next one.
        """
        phase, store, limit = self.agreement.phase, self.store, None
        if store.resumes is not None:
            worker, seq = store.resumes
            limit = store.applied.copy()
            limit[worker] = seq
        elif phase is Phase.REACH:
            limit = self.agreement.target
        elif phase in (Phase.AGREE, Phase.HOLD):
            return False
        busy, end = False, time.perf_counter() + TURN_S
        fetch = phase is not Phase.DRAIN or limit is not None
        if self.local is not None and fetch and store.is_plain:
            busy = self.local.apply(limit, TURN_S * LOCAL_TURNS, waits) > 0
            if not self.local.stuck:
                return busy
        while (push := self.receiver.take(limit, fetch)) is not None:
            store.apply(push)
            busy = True
            if time.perf_counter() >= end:
                break
        return busy

    def serve_beside(self, coordinator: Coordinator) -> None:
        """Have the loop return where a batch is to be assigned."""
        if self.local is not None:
            self.local.others = coordinator.dispatcher.wants

    @property
    def at_rest(self) -> bool:
        """Whether no snapshot is under way, and no checkpoint."""
        return self.agreement.phase is Phase.FREE and not self.saver.busy

    def give_up(self) -> None:
        """Give up the snapshot under way, and its checkpoint: its coordinator has died."""
        self.agreement.give_up()
        self.saver.give_up()

    def reach(self, base_step: int) -> int | None:
        """Get on with a snapshot.

        Returns the step of its checkpoint when it is reached, and copied.
        """
        if self.store.resumes is not None or not self.agreement.advance(self.receiver.bodies):
            return None
        step = self.store.settle(base_step + int(self.agreement.target.sum()))
        self.saver.snapshot(step)
        if self.store.recorder is not None:
            self.store.recorder.flush()
        return step

    def write_into(self, folder: str) -> None:
        """Learn the folder of a checkpoint, if the shard is to be in it."""
        if not self.at_rest:
            self.saver.write_into(folder)

    def epochs_over(self, over: tuple[int, list[int]]) -> None:
        """Learn how many epochs are over, with so many pushes of each worker."""
        assert self.store.rows is not None, "no rows are to be evicted"
        self.store.rows.epochs_over(*over)

    def hold_or_go_on(self) -> None:
        """Take pushes again, as soon as the live shard need not stay as it is."""
        self.agreement.phase = Phase.HOLD if self.saver.holds else Phase.FREE

    def advance_saver(self) -> None:
        """Get on with a checkpoint."""
        self.saver.poll()
        if self.agreement.phase is Phase.HOLD and not self.saver.holds:
            self.agreement.phase = Phase.FREE

    def close(self) -> None:
        """Serve it no more."""
        self.store.close()
        self.receiver.close()


ORDERS: dict[str, Callable[[ShardService, Any], object]] = {  # of the coordinator, for each shard
    "snapshot": lambda served, begun: served.agreement.begin(*begun),
    "agreed": lambda served, target: served.agreement.agree_on(target),
    "write": ShardService.write_into,
    "saved": lambda served, step: served.saver.committed(step),
    "over": ShardService.epochs_over,
}


class AsyncServer:
    """Serves a shard until the coordinator ends the run.

    Args:
        job: The run.
        half: The server's half of the store.
        coordinator: On server 0 of a run that assigns batches, its second duty.
        failover: Where the run may go on without ranks that have died.

    Attributes:
        store: Its own shard.
        shards: All that it serves; its own is the first.
        handlers: What is done with each kind of message.
        final: Pushes of each worker that has finished, by rank.
        told_signal: Whether the coordinator knows of a request to stop.
        reason: Why the run ended, once `serve` has returned.
    """

    def __init__(
        self, job: Job, half: ServerHalf, coordinator: Coordinator | None = None,
        failover: "Failover | None" = None,
    ) -> None:  # fmt: skip
        self._job, self._cluster, self._half = job, job.cluster, half
        self.store = store = half.server
        self.shards = [ShardService(job, half, job.cluster.rank, store, half.receiver)]
        self.final: dict[int, int] = {}
        self.reason: str | None = None
        self.told_signal = False
        self.handlers: dict[str, Handler] = {
            "fin": self.finished,
            "read": lambda source, asked: self.shard_of(asked[0]).store.want_read(
                source, asked[1:]
            ),
            "frozen": self._freeze,
            "cancel wait": self._hurry,
            "end": self._end,
        }
        self.coordinator: Coordinator | None = None
        if coordinator is not None:
            self.become(coordinator)
        self.failover = failover
        if failover is not None:
            failover.join(self)

    def become(self, coordinator: Coordinator) -> None:
        """Have the coordinator's duty, too."""
        self.coordinator = coordinator
        observer = Observer(
            lambda push, *_: coordinator.applied(push.batches),
            lambda headers, *_: coordinator.applied(batches_of(headers)),
        )
        coordinator.server.observers.append(observer)
        for served in self.shards:
            served.serve_beside(coordinator)

    def start(self) -> None:
        """Save the state before the first step, in a run that is not resumed."""
        if self._job.checkpoint:
            return
        self.shards[0].saver.snapshot(0)
        self.shards[0].hold_or_go_on()
        if self.coordinator:
            self.coordinator.snapshot_reached(0)

    def serve(self) -> str:
        """Apply pushes until the coordinator ends the run; returns why it ended.

        Raises:
            Lost: If a rank dies that the run cannot do without.
        """
        failover = self.failover
        if failover is not None:
            failover.begin()
        status_board.set_phase(status_board.SERVING, time.perf_counter())
        whole = failover.remote_resender.all_whole if failover is not None else lambda: True
        self.serve_until(lambda: self.reason is not None and whole())
        self.close()
        assert self.reason is not None
        return self.reason

    def serve_until(self, done: Callable[[], bool]) -> None:
        """Serve until `done()`; what it asks for has to come from elsewhere, or from a turn."""
        take_turns(self.turn, done, self._cluster.ranks_per_core)

    def close(self) -> None:
        """Serve no more. Collective: over the servers."""
        for served in self.shards[1:]:
            served.close()
        for served in self.shards:
            served.saver.close()
        if self.coordinator is not None:
            self.coordinator.snapshots.close()
        self.handlers.clear()  # its own methods, by which it would outlive the run
        self._half.close()

    def turn(self) -> bool:
        """Do what there is to do; returns whether there was anything. Blocks: for reads only."""
        busy = False
        for served in self.shards:
            busy |= served.apply_some(waits=len(self.shards) == 1)
        if busy:
            self._job.begun = True
            status_board.report(status_board.CLOCK, self.store.version)
            status_board.report(status_board.HANDLED, self.store.tally.handled)
        for served in self.shards:
            busy |= served.store.serve_reads()
        messages = self._cluster.poll()
        for message in messages:
            self._handle(*message)
        for served in self.shards:
            if served.agreement.phase is not Phase.FREE or served.saver.busy:
                self._advance_snapshot(served)
        if len(self.final) == len(self._cluster.roles.workers):
            self._report_done()
        if not self.told_signal and (name := signals.received()):
            self.told_signal = True
            self._cluster.send(self._cluster.roles.coordinator, "stop", name)
        if self.failover is not None:
            self.failover.advance()
        if self.coordinator is not None:
            self.coordinator.advance()
        return busy or bool(messages)

    def _advance_snapshot(self, served: ShardService) -> None:
        """Get on with a snapshot of a shard, and its checkpoint."""
        step = served.reach(self._job.base_step)
        if step is not None:
            if served.agreement.phase is Phase.LAST:
                self._cluster.send(self._cluster.roles.coordinator, "reached")
            served.hold_or_go_on()
            if self.coordinator and served.store is self.coordinator.server:
                self.coordinator.snapshot_reached(step)
        served.advance_saver()

    def _report_done(self) -> None:
        """Tell the coordinator which shards have all pushes."""
        for served in self.shards:
            if not served.reported_done and served.store.is_done(self.final):
                served.reported_done = True
                self._cluster.send(self._cluster.roles.coordinator, "done", served.rank)

    def _handle(self, source: int, kind: str, payload: Any) -> None:
        if kind in ORDERS:
            if source == self._cluster.roles.coordinator:  # else it has died
                for served in self.shards:
                    ORDERS[kind](served, payload)
        elif kind in self.handlers:
            self.handlers[kind](source, payload)
        elif self.coordinator is not None:
            self.coordinator.handle(source, kind, payload)
        else:
            assert self.failover is not None, f"{kind} sent to a server that is not the coordinator"
            self.failover.keep(source, kind, payload)

    def finished(self, source: int, pushes: int) -> None:
        """Note that a worker will have made so many pushes, and no more."""
        self.final[source] = pushes
        for served in self.shards:
            served.store.finished(source, pushes)

    def shard_of(self, number: int) -> ShardService:
        """Return what serves here the shard of the server of that number."""
        rank = self._cluster.roles.servers[number]
        return next(served for served in self.shards if served.rank == rank)

    def _freeze(self, source: int, said: tuple[int, Any]) -> None:
        for served in self.shards:
            served.store.frozen.note(self._cluster.roles.workers.index(source), *said)
        self._cluster.send(source, "noted")

    def _hurry(self, source: int, _: None) -> None:
        for served in self.shards:
            if served.store.resumes is None:
                served.store.clocks.cancel_wait(source)

    def _end(self, source: int, why: tuple[str, Iterable[int]]) -> None:
        if source == self._cluster.roles.coordinator:
            self.reason, lost = why
            self._cluster.failures.leave_out(lost)
