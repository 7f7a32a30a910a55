"""Coordinator: assigns batches, starts checkpoints, ends runs.

It is server 0, and after its death its successor, which then serves the shard of server 0 as
well (`mpips.failover.coordinator_failover`).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mpips.datasets.ledger import Range, epochs_over
from mpips.mpi.collectives import Handler
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.ps.dispatch import Dispatcher
from mpips.ps.shard import Server
from mpips.snapshot.committer import LAST_TRIES, Committer
from mpips.snapshot.worker_state import Holding
from mpips.transport.push import Batch

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class Snapshots:
    """When a checkpoint is due, what begins it, and what it holds beside the shards.

    Args:
        job: The run.
        committer: Writes what a snapshot holds.
        holding: Where workers have state of their own.

    Attributes:
        committer: As given.
        begun: Snapshots begun so far.
        under_way: Whether one has begun that this server has not reached.
        again: Whether one was given up, so that another one is due.
        saved_samples: Samples applied in the newest checkpoint; -1 if that is not known.
        unsaved: Why the last checkpoint is not written; empty if it is.
    """

    def __init__(self, job: Job, committer: Committer, holding: Holding | None = None) -> None:
        self._job, self.committer, self._holding = job, committer, holding
        self.saved_samples = self._cut_samples = job.base_samples
        self.begun, self.under_way, self.again = 0, False, False
        self._tries, self.unsaved = 0, ""  # to write the last one
        self._applied: dict[int, list[int]] = {}  # by server, until all have told

    @property
    def handlers(self) -> dict[str, Handler]:
        """What is done with each kind of message about checkpoints."""
        found: dict[str, Handler] = {
            "files": lambda _, answer: self.committer.collect(*answer),
            "applied": self.hear,
        }
        return found if self._holding is None else found | self._holding.handlers

    def advance(self) -> bool:
        """Get on; returns whether a checkpoint is under way anywhere. Blocks: no."""
        if self.committer.poll():
            self.saved_samples = self._cut_samples
        return self.under_way or self.committer.busy

    def is_due(self, step: int, epochs: float) -> bool:
        """Return whether one is to begin after so many updates and epochs."""
        again, self.again = self.again, False
        return again or self.committer.is_due(step, epochs)

    def begin(self, step: int) -> None:
        """Have all servers make a snapshot after an update of theirs."""
        self.under_way = True
        self.begun += 1
        self._applied.clear()
        self.committer.note(step)
        if self._holding is not None:
            self._holding.begin()
            return
        self._job.cluster.send(self._job.cluster.roles.servers, "snapshot", (self.begun, None))

    def hear(self, _: int, said: tuple[int, list[int]]) -> None:
        """Learn what a server, by its number, has applied; tell all of them the maximum."""
        number, self._applied[number] = said
        servers = self._job.cluster.roles.servers
        if len(self._applied) == len(servers):
            most = [max(pushes) for pushes in zip(*self._applied.values(), strict=True)]
            self._applied.clear()
            self._job.cluster.send(servers, "agreed", most)

    def forget(self, number: int) -> None:
        """Have a server's shard say once more what is applied: another serves it now."""
        self._applied.pop(number, None)

    def reached(self, step: int, epochs: float, samples: int, state: dict[str, Any]) -> None:
        """Open the checkpoint of `step`, which this server has just reached.

        Args:
            step: Updates applied.
            epochs: Likewise.
            samples: Likewise.
            state: What the checkpoint holds beside the shards.
        """
        self.under_way = False
        self._cut_samples = samples
        own = self._holding.numbers if self._holding else []
        self.committer.open(step, epochs, state | ({"own": own} if own else {}), bool(own))

    def finish(self, step: int, samples: int) -> bool:
        """Have the final state saved; returns whether it is, or cannot be. Blocks: no.

        Args:
            step: Updates applied in all.
            samples: Likewise; a push that was dropped makes no step.
        """
        committer = self.committer
        if self.saved_samples == samples and committer.has_saved(step):
            return True
        if committer.pauses():
            return False
        if self._tries < LAST_TRIES:
            self._tries += 1
            self.begin(step)
            return False
        self.unsaved = f"{committer.failure}; {committer.kept}"
        return True

    def close(self) -> None:
        """End the thread that commits. Blocks: until what it commits is there."""
        self.committer.thread.shutdown()


class Coordinator:
    """Data, checkpoints, the end; an `AsyncServer` calls it.

    Args:
        job: The run.
        server: Server 0's shard.
        dispatcher: Gives batches to workers.
        snapshots: Begins checkpoints.
        log: Where it is told.

    Attributes:
        samples: Applied, in resumed runs too.
        dispatcher: As given; `allocator` is its.
        snapshots: As given.
        lost: Pushes of each rank that has died.
        diverged: What is not finite; None where all is.
    """

    lost: Mapping[int, int] = {}

    def __init__(
        self, job: Job, server: Server, dispatcher: Dispatcher, snapshots: Snapshots, log: "Log"
    ) -> None:
        self._job, self._cluster, self.server = job, job.cluster, server
        self.dispatcher, self.snapshots, self._log = dispatcher, snapshots, log
        self.allocator = dispatcher.allocator
        self._done: set[int] = set()
        self._stop: str | None = None
        self._ended = False
        self.samples = job.base_samples
        self.diverged: str | None = None
        self._evicts = any(table.table.evict_after is not None for table in tables_of(job))
        self._epochs_told = 0  # where rows are evicted by them
        self._on: dict[str, Handler] = {
            "more": dispatcher.answer,
            "stop": lambda _, reason: self.stop(reason),
            "done": lambda _, rank: self._done.add(rank),
            "eval": self._evaluated,
            "log": lambda _, lines: log.heard("log", lines),
            "diverged": lambda _, text: self._diverge(text),
            **snapshots.handlers,
        }

    @property
    def step(self) -> int:
        """Updates applied, in resumed runs too."""
        return self.server.version

    def applied(self, pushes: Iterable[Batch]) -> None:
        """Note pushes that were applied here, in their order: their batches are done."""
        losses, batches = list[tuple[float, int]](), dict[int, list[Range]]()
        for worker, batch, samples, loss in pushes:
            batches.setdefault(worker, []).append(batch)
            losses.append((loss, samples))
            self.samples += samples
        for worker, done in batches.items():
            self.allocator.applied(worker, *done)
        self._log.count(*losses)

    def handle(self, source: int, kind: str, payload: Any) -> None:
        """Act on a message to the coordinator."""
        self._on[kind](source, payload)

    def stop(self, reason: str) -> None:
        """Assign nothing more and have the workers finish their steps."""
        if self._stop is None:
            self._stop, self.allocator.stopped = reason, True
            self.note()
            self._log.event("stop", self.step, reason=reason)
            self._tell_stop()

    def _tell_stop(self) -> None:
        self._cluster.send(self._cluster.roles.workers, "stop")

    def _diverge(self, text: str) -> None:
        self.diverged = self.diverged or text
        self.stop("diverged")

    def note(self) -> None:
        """Note what a successor has to know, where there is one."""

    def lose(self, rank: int, pushes: int) -> None:
        """Go on without a worker that has died.

        See `mpips.failover.coordinator_failover.SurvivingCoordinator`.
        """
        raise AssertionError("no rank may die")

    def _evaluated(self, _: int, metrics: dict[str, float]) -> None:
        self._log.heard("eval", metrics)
        target = self._job.config.target_accuracy
        if target and metrics.get("accuracy", 0.0) >= target:
            self.stop("target")

    def advance(self) -> None:
        """Get on with everything. Blocks: no."""
        snapshots, evaluations = self.snapshots, self._job.evaluations
        self.dispatcher.serve()
        if self._evicts and self.allocator.cursor[0] > self._epochs_told:
            over = epochs_over(self.allocator)
            if over > self._epochs_told:
                self._epochs_told = over
                told = over, self.server.ledger
                self._cluster.send(self._cluster.roles.servers, "over", told)
        busy = snapshots.advance()
        if evaluations is not None and (reason := evaluations.poll()):
            self.stop(reason)
        if snapshots.committer.refused:
            snapshots.committer.refused = False
            self._diverge(f"parameters not finite at step {self.step}")
        if self._log.due():
            recent = self.server.tally.recent()
            self._log.progress(
                self.step, self.allocator.epochs_done, self.samples, staleness=recent
            )
        if self._ended or busy or self._waits():
            return
        if len(self._done) == len(self._cluster.roles.servers):
            self._end()
        elif not self._stop and snapshots.is_due(self.step, self.allocator.epochs_done):
            snapshots.begin(self.step)

    def _waits(self) -> bool:
        """Return whether something has to come before the next checkpoint, and the end."""
        return False

    def snapshot_reached(self, step: int) -> None:
        """Open the checkpoint of `step`: this server has just reached the snapshot."""
        skipped = self.server.dense.leaving.skipped
        state = self._job.state(step, self.allocator.state(), self.samples, skipped)
        self.snapshots.reached(step, self.allocator.epochs_done, self.samples, state)

    def _end(self) -> None:
        """Save the final state if that is not done, then end the run."""
        if self.diverged is None and not self.snapshots.finish(self.step, self.samples):
            return
        self._ended = True
        reason = self._stop or ("steps" if self._job.config.steps else "epochs")
        if self.diverged is not None:
            reason = "diverged"
        self._cluster.send(range(self._cluster.world), "end", (reason, self._dead()))

    def _dead(self) -> list[int]:
        """Return the ranks that the run has gone on without."""
        return []
