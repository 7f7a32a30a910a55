"""Coordinator: assigns batches, starts checkpoints, ends runs.

The coordinator is server 0. If server 0 dies, its successor is the coordinator and also serves the
shard of server 0 (`mpips.failover.coordinator_failover`).

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


class Checkpoints:
    """Checkpoints of the run: when they are due, their start, and their state beside the shards.

    Args:
        job: The run.
        committer: Collects the files of a checkpoint and commits it.
        holding: Holds the workers for a snapshot, if they have state of their own; else None.

    Attributes:
        committer: See Args.
        begun: Number of snapshots begun.
        under_way: Whether a snapshot has begun that this server has not reached.
        again: Whether a snapshot was given up, so that the next one is due at once.
        saved_samples: Samples applied in the newest checkpoint; -1 if unknown.
        unsaved: Why the last checkpoint is not written; empty if it is.
    """

    def __init__(self, job: Job, committer: Committer, holding: Holding | None = None) -> None:
        self._job, self.committer, self._holding = job, committer, holding
        self.saved_samples = self._snapshot_samples = job.base_samples
        self.begun, self.under_way, self.again = 0, False, False
        self._tries, self.unsaved = 0, ""  # attempts to write the last checkpoint
        self._applied: dict[int, list[int]] = {}  # ledgers by server, until all have come

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of message about checkpoints."""
        own: dict[str, Handler] = {
            "files": lambda _, answer: self.committer.collect(*answer),
            "applied": self.hear,
        }
        return own if self._holding is None else own | self._holding.handlers

    def advance(self) -> bool:
        """Collect answers, and commit. Blocks: no.

        Returns:
            Whether any rank is still busy with a checkpoint.
        """
        if self.committer.poll():
            self.saved_samples = self._snapshot_samples
        return self.under_way or self.committer.busy

    def is_due(self, step: int, epochs: float) -> bool:
        """Return whether a checkpoint is due after these numbers of updates and epochs."""
        again, self.again = self.again, False
        return again or self.committer.is_due(step, epochs)

    def begin(self, step: int) -> None:
        """Have all servers take a snapshot; `step` is the present number of updates."""
        self.under_way = True
        self.begun += 1
        self._applied.clear()
        self.committer.note(step)
        if self._holding is not None:
            self._holding.begin()
            return
        self._job.cluster.send(self._job.cluster.roles.servers, "snapshot", (self.begun, None))

    def hear(self, _: int, message: tuple[int, list[int]]) -> None:
        """Note a server's ledger. With the last one, send all servers the elementwise maximum.

        Args:
            message: Number of the server, and its number of applied pushes of each worker.
        """
        number, self._applied[number] = message
        servers = self._job.cluster.roles.servers
        if len(self._applied) == len(servers):
            most = [max(pushes) for pushes in zip(*self._applied.values(), strict=True)]
            self._applied.clear()
            self._job.cluster.send(servers, "agreed", most)

    def forget(self, number: int) -> None:
        """Discard a server's ledger: the server that serves its shard now sends it again."""
        self._applied.pop(number, None)

    def reached(self, step: int, epochs: float, samples: int, state: dict[str, Any]) -> None:
        """Open the checkpoint of `step`: this server has just reached the snapshot.

        Args:
            step: Number of updates applied.
            epochs: Number of epochs applied.
            samples: Number of samples applied.
            state: State that the checkpoint contains beside the shards.
        """
        self.under_way = False
        self._snapshot_samples = samples
        own = self._holding.numbers if self._holding else []
        self.committer.open(step, epochs, state | ({"own": own} if own else {}), bool(own))

    def finish(self, step: int, samples: int) -> bool:
        """Save the final state. Blocks: no.

        Args:
            step: Number of updates of the run.
            samples: Number of samples of the run, with those of dropped pushes, which may make no
                update.

        Returns:
            Whether the state is saved, or all attempts have failed. If False, call again.
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
        """End the thread that commits. Blocks: until the current commit is done."""
        self.committer.thread.shutdown()


class Coordinator:
    """Assignment of batches, checkpoints and end of a run; part of an `AsyncServer`.

    Args:
        job: The run.
        server: The server of shard 0.
        dispatcher: Assigns batches to workers.
        snapshots: Checkpoints of the run.
        log: Log of the run.

    Attributes:
        samples: Number of samples applied, over all jobs of a run.
        dispatcher: See Args.
        allocator: The dispatcher's allocator.
        snapshots: See Args.
        lost: Number of pushes of each dead rank.
        diverged: Name of the values that are not finite; None if all values are finite.
    """

    lost: Mapping[int, int] = {}

    def __init__(
        self, job: Job, server: Server, dispatcher: Dispatcher, snapshots: Checkpoints, log: "Log"
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
        self._epochs_sent = 0  # completed epochs that servers know, if they evict rows
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
        """Number of updates, over all jobs of a run."""
        return self.server.version

    def applied(self, pushes: Iterable[Batch]) -> None:
        """Note that pushes were applied here, in this order: their batches are done."""
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
        """Assign no more batches, and tell the workers to finish their steps."""
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
        """Log state for a successor; does nothing if no other server can become coordinator."""

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
        """Assign batches, and start or finish checkpoints, evaluations and the run. Blocks: no."""
        snapshots, evaluations = self.snapshots, self._job.evaluations
        self.dispatcher.serve()
        if self._evicts and self.allocator.cursor[0] > self._epochs_sent:
            epochs = epochs_over(self.allocator)
            if epochs > self._epochs_sent:
                self._epochs_sent = epochs
                message = epochs, self.server.ledger
                self._cluster.send(self._cluster.roles.servers, "over", message)
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
        """Return whether the next checkpoint and the end of the run must wait for another event."""
        return False

    def snapshot_reached(self, step: int) -> None:
        """Open the checkpoint of `step`: this server has just reached the snapshot."""
        skipped = self.server.dense.leaving.skipped
        state = self._job.state(step, self.allocator.state(), self.samples, skipped)
        # Steps that rounds of earlier jobs have made one update of.
        state["merged"] = sum(self.allocator.before) - self._job.base_step
        self.snapshots.reached(step, self.allocator.epochs_done, self.samples, state)

    def _end(self) -> None:
        """Save the final state if it is not saved, and then end the run."""
        if self.diverged is None and not self.snapshots.finish(self.step, self.samples):
            return
        self._ended = True
        reason = self._stop or ("steps" if self._job.config.steps else "epochs")
        if self.diverged is not None:
            reason = "diverged"
        self._cluster.send(range(self._cluster.world), "end", (reason, self._dead()))

    def _dead(self) -> list[int]:
        """Return the dead ranks that the run has left out."""
        return []
