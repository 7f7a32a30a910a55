"""Loop of an asynchronous server, and its shards.

A server applies pushes until all workers have finished and all their pushes are applied. It also
serves the shards that it has taken over. One server is the coordinator, too
(`mpips.ps.coordinator`). Snapshots: see `mpips.snapshot.agreement`. Deaths of ranks: see
`mpips.failover.takeover`.
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


TURN_S = 50e-6  # a server applies pushes for so long before it handles reads and messages
LOCAL_TURNS = 20  # length of a turn of the compiled loop in TURN_S: only messages can wait then


class ShardService:
    """A shard, and all that a server does for it. Collective: no.

    Args:
        job: The run.
        half: This server's half of the store.
        rank: Rank of the server that had the shard at the start.
        store: Applies pushes to the shard.
        receiver: Receives the pushes.

    Attributes:
        agreement: This shard's part in agreeing on the pushes of a checkpoint.
        saver: Writes the shard's checkpoints.
        local: Compiled loop that applies pushes; None if the design needs more than the loop can
            do.
        reported_done: Whether the coordinator knows that all pushes are applied.
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
        """Apply pushes that have come, for a bounded time.

        Args:
            waits: Whether to wait a little for the next push.

        Returns:
            Whether a push was applied.
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
        """Have the compiled loop return when a worker needs a batch."""
        if self.local is not None:
            self.local.others = coordinator.dispatcher.wants

    @property
    def at_rest(self) -> bool:
        """Whether neither a snapshot nor a checkpoint is under way."""
        return self.agreement.phase is Phase.FREE and not self.saver.busy

    def give_up(self) -> None:
        """Give up the current snapshot and its checkpoint: their coordinator has died."""
        self.agreement.give_up()
        self.saver.give_up()

    def reach(self, base_step: int) -> int | None:
        """Advance the current snapshot, and copy the shard when it is reached.

        Args:
            base_step: Step at which the job began.

        Returns:
            Step of the checkpoint once the shard is copied, else None.
        """
        if self.store.resumes is not None or not self.agreement.advance(self.receiver.bodies):
            return None
        step = self.store.settle(base_step + int(self.agreement.target.sum()))
        self.saver.snapshot(step)
        if self.store.recorder is not None:
            self.store.recorder.flush()
        return step

    def write_into(self, folder: str) -> None:
        """Note the folder of a checkpoint, if the shard is part of it."""
        if not self.at_rest:
            self.saver.write_into(folder)

    def epochs_over(self, over: tuple[int, list[int]]) -> None:
        """Note the number of completed epochs, and each worker's number of pushes in them."""
        assert self.store.rows is not None, "no rows are to be evicted"
        self.store.rows.epochs_over(*over)

    def hold_or_go_on(self) -> None:
        """Take pushes again, unless the live shard must stay unchanged until it is written."""
        self.agreement.phase = Phase.HOLD if self.saver.holds else Phase.FREE

    def advance_saver(self) -> None:
        """Advance the current checkpoint."""
        self.saver.poll()
        if self.agreement.phase is Phase.HOLD:
            self.hold_or_go_on()

    def close(self) -> None:
        """Stop serving the shard."""
        self.store.close()
        self.receiver.close()


# Messages of the coordinator that concern each shard.
ORDERS: dict[str, Callable[[ShardService, Any], object]] = {
    "snapshot": lambda served, begun: served.agreement.begin(*begun),
    "agreed": lambda served, target: served.agreement.agree_on(target),
    "write": ShardService.write_into,
    "saved": lambda served, step: served.saver.committed(step),
    "over": ShardService.epochs_over,
}


class AsyncServer:
    """A server's loop: serves shards until the coordinator ends the run.

    Args:
        job: The run.
        half: The server's half of the store.
        coordinator: The coordinator, on server 0 of a run that assigns batches; else None.
        failover: Handles deaths of ranks; None if the run ends when a rank dies.

    Attributes:
        store: Server of its own shard.
        shards: All shards that it serves, its own first.
        handlers: Handler of each kind of message.
        final: Final number of pushes of each finished worker, by rank.
        reported_signal: Whether the coordinator knows of a request to stop.
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
        self.reported_signal = False
        self.handlers: dict[str, Handler] = {
            "fin": self.finished,
            "read": lambda source, asked: self.shard_of(asked[0]).store.want_read(
                source, asked[1:]
            ),
            "frozen": self._freeze,
            "cancel wait": self._cancel_wait,
            "end": self._end,
        }
        self.coordinator: Coordinator | None = None
        if coordinator is not None:
            self.become(coordinator)
        self.failover = failover
        if failover is not None:
            failover.join(self)

    def become(self, coordinator: Coordinator) -> None:
        """Take the coordinator's duties, too."""
        self.coordinator = coordinator
        observer = Observer(
            lambda push, *_: coordinator.applied(push.batches),
            lambda headers, *_: coordinator.applied(batches_of(headers)),
        )
        coordinator.server.observers.append(observer)
        for served in self.shards:
            served.serve_beside(coordinator)

    def start(self) -> None:
        """Save the state before the first step, unless the run is resumed."""
        if self._job.checkpoint:
            return
        self.shards[0].saver.snapshot(0)
        self.shards[0].hold_or_go_on()
        if self.coordinator:
            self.coordinator.snapshot_reached(0)

    def serve(self) -> str:
        """Apply pushes until the coordinator ends the run.

        Returns:
            Why the run ended.

        Raises:
            Lost: If a rank dies that the run needs.
        """
        failover = self.failover
        if failover is not None:
            failover.begin()
        status_board.set_phase(status_board.SERVING, time.perf_counter())
        read = failover.remote_resender.all_reads_done if failover is not None else lambda: True
        self.serve_until(lambda: self.reason is not None and read())
        self.close()
        assert self.reason is not None
        return self.reason

    def serve_until(self, done: Callable[[], bool]) -> None:
        """Serve until `done()`, which must become true by a message, another rank or a turn."""
        take_turns(self.turn, done, self._cluster.ranks_per_core)

    def close(self) -> None:
        """Stop serving. Collective: over the servers."""
        for served in self.shards[1:]:
            served.close()
        for served in self.shards:
            served.saver.close()
        if self.coordinator is not None:
            self.coordinator.snapshots.close()
        self.handlers.clear()  # breaks the cycle of references: they are methods of this object
        self._half.close()

    def turn(self) -> bool:
        """Handle pushes, reads, messages and snapshots that are due now.

        Returns:
            Whether there was anything to do.

        Blocks: only for local reads.
        """
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
        if not self.reported_signal and (name := signals.received()):
            self.reported_signal = True
            self._cluster.send(self._cluster.roles.coordinator, "stop", name)
        if self.failover is not None:
            self.failover.advance()
        if self.coordinator is not None:
            self.coordinator.advance()
        return busy or bool(messages)

    def _advance_snapshot(self, served: ShardService) -> None:
        """Advance the snapshot and the checkpoint of a shard."""
        step = served.reach(self._job.base_step)
        if step is not None:
            if served.agreement.phase is Phase.LAST:
                self._cluster.send(self._cluster.roles.coordinator, "reached")
            served.hold_or_go_on()
            if self.coordinator and served.store is self.coordinator.server:
                self.coordinator.snapshot_reached(step)
        served.advance_saver()

    def _report_done(self) -> None:
        """Tell the coordinator which shards have applied all pushes."""
        for served in self.shards:
            if not served.reported_done and served.store.is_done(self.final):
                served.reported_done = True
                self._cluster.send(self._cluster.roles.coordinator, "done", served.rank)

    def _handle(self, source: int, kind: str, payload: Any) -> None:
        if kind in ORDERS:
            if source == self._cluster.roles.coordinator:  # else the sender has died
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
        """Note that the worker at a rank makes no pushes beyond number `pushes`."""
        self.final[source] = pushes
        for served in self.shards:
            served.store.finished(source, pushes)

    def shard_of(self, number: int) -> ShardService:
        """Return the service of the shard that the server of this number had at the start."""
        rank = self._cluster.roles.servers[number]
        return next(served for served in self.shards if served.rank == rank)

    def _freeze(self, source: int, message: tuple[int, Any]) -> None:
        for served in self.shards:
            served.store.frozen.note(self._cluster.roles.workers.index(source), *message)
        self._cluster.send(source, "noted")

    def _cancel_wait(self, source: int, _: None) -> None:
        for served in self.shards:
            served.store.clocks.cancel_wait(source)

    def _end(self, source: int, why: tuple[str, Iterable[int]]) -> None:
        if source == self._cluster.roles.coordinator:
            self.reason, lost = why
            self._cluster.failures.leave_out(lost)
