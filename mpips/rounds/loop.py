"""Loop of a run in rounds: work, evaluation, and flags.

All ranks take part in every round; a worker without samples contributes zero. Flags travel with the
round and take effect at its end, on every rank.
"""

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.datasets.ledger import Range, epochs_over, is_uneven, leave, part, split
from mpips.health import status_board
from mpips.mpi import signals
from mpips.mpi.collectives import cluster_subset, free, gather_polled
from mpips.planning.job import STOPPED, Job
from mpips.planning.outcome import Outcome, Times
from mpips.problems.accumulate import Accumulator, Tasks, make_loader, submit, taken, units_ahead
from mpips.problems.evaluation import evaluate, mean_evaluation, next_evaluation, share
from mpips.rounds.base import (
    DIGIT,
    RESULTS,
    SIGNALS,
    STOPS,
    Report,
    Round,
    first_reported,
    report_one,
)
from mpips.rounds.checkpoints import RoundCheckpoints
from mpips.snapshot.saver import ArraySaver

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class RoundEvaluation:
    """Periodic evaluation, whose result all workers know. Collective: construction, `free`.

    With evaluators, these evaluate, and the coordinator polls their results.

    Args:
        job: The run.
        rounds: The round; workers evaluate its replica.
        epochs: Epochs done.
    """

    def __init__(self, job: Job, rounds: Round, epochs: float) -> None:
        self._job, self._cluster, self._rounds = job, job.cluster, rounds
        self._workers = cluster_subset(self._cluster, self._cluster.roles.workers)
        self._takes_part, self._tells = job.worker_id is not None, job.worker_id == 0
        self._params = job.layout.views(rounds.replica, writable=False) if self._takes_part else {}
        c, self._reached = job.config, False
        self._next = next_evaluation(epochs, 0.0 if c.evaluators else c.eval_every)

    def stop_reason(self) -> str:
        """Return why to end the run: ``target``, ``patience`` or a signal's name; else empty."""
        if self._job.evaluations is not None:
            return self._job.evaluations.poll()
        return "target" if self._reached else ""

    def run_when_due(self, step: int, epochs: float) -> None:
        """Evaluate after update `step`, if an evaluation is due at this number of epochs.

        Raises:
            UserError: If some workers lack a metric of others.
        """
        if not self._job.info.n_test or epochs < self._next:
            return
        self._next = next_evaluation(epochs, self._job.config.eval_every)
        if not self._takes_part:
            return
        status_board.set_phase(status_board.EVALUATING, time.perf_counter())
        if (tables := self._rounds.tables) is not None:
            tables.settle(step)
        means = self._means()
        target = self._job.config.target_accuracy
        self._reached = bool(target) and means.get("accuracy", 0.0) >= target
        if self._tells:
            payload = {"step": step, "epoch": round(epochs, 4), **means}
            self._cluster.send(self._cluster.roles.coordinator, "eval", payload)

    def _means(self) -> dict[str, float]:
        """Return the mean metrics over all workers' shares."""
        worker = self._job.worker_id
        assert worker is not None, "servers evaluate nothing"
        begin, end = share(self._job.info.n_test, worker, len(self._cluster.roles.workers))
        mine = evaluate(self._job, self._params, begin, end)
        found = gather_polled(self._workers, mine, self._cluster.wait_request)
        return mean_evaluation(self._job, found)

    def free(self) -> None:
        """Free the workers' communicator; may be called twice."""
        self._params = {}
        free(self._workers)


class RoundWorker(ABC):
    """Reads the samples of a worker's part of each round, and computes.

    Attributes:
        times: Times by activity.
        pushes: Number of rounds to which it contributed.
        ahead: Number of later rounds whose samples its reader needs to know.
        left: Number of last samples of its part that its program skipped.
        vectors: Number of vectors of the parameters' size that a round moves.
    """

    vectors: float = 1

    def __init__(self, job: Job) -> None:
        assert job.worker_id is not None, "servers have no part of a batch"
        self._job = job
        self._loader = make_loader(job)
        self._place, self._places = job.worker_id, len(job.cluster.roles.workers)
        self.times, self.pushes, self.ahead = Times(), 0, units_ahead(job)
        self.left = 0

    def part(self, batch: Range) -> Range:
        """Return this worker's part of a round's batch."""
        return part(batch, self._place, self._places)

    def reassign(self, place: int, places: int) -> None:
        """Take another part of each batch from now on; drops batches read ahead."""
        self._place, self._places = place, places
        self._loader.close()
        self._loader = make_loader(self._job)

    def steps(self, batch: Range) -> list[Range]:
        """Return the samples that this worker reads for a round, one range a step."""
        return [self.part(batch)]

    def read_ahead(self, batch: Range) -> None:
        """Begin to read the samples of a round."""
        for step in self.steps(batch):
            submit(self._job, self._loader, step)

    @abstractmethod
    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """Compute this worker's contribution to a round.

        Args:
            batch: Batch of the round.
            step: Number of updates applied before it.

        Returns:
            The mean loss and the number of samples.
        """

    def close(self) -> None:
        """Stop reading."""
        self._loader.close()


class GradientWorker(RoundWorker):
    """Computes the gradient of its part of the batch at the round's replica."""

    def __init__(self, job: Job, rounds: Round) -> None:
        super().__init__(job)
        self._params = job.layout.views(rounds.replica, writable=False)
        self._flat, self._grad = rounds.grad, job.layout.views(rounds.grad)
        self._accumulator = Accumulator(job)
        self._tables = rounds.tables

    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """See `RoundWorker.compute`."""
        mine, rows = self.part(batch), self._job.rows
        samples = mine[2] - mine[1]
        if rows is not None:
            rows.begin(step + 1)
        if not samples:
            return 0.0, 0
        batches = taken(self._job, self._loader, mine)
        args = self._params, batches, samples, self._grad, self._flat
        with nullcontext() if self._tables is None else self._tables.serving():
            loss = yield from self._accumulator.gradient(*args)
        self.times.compute_s = self._accumulator.compute_s
        if self._job.left:
            self.left = samples
            self._flat.fill(0)
            if rows is not None:
                rows.begin(step + 1)  # drops the gradients of earlier batches of this step
            return 0.0, 0
        self.times.steps += 1
        self.times.samples += samples
        self.pushes += 1
        return loss, samples


AHEAD = 2  # batches that a worker reads before their round, unless its reader needs more


class RoundLoop:
    """Rounds of a run; every rank has one, and all do the same.

    Args:
        job: The run.
        rounds: The round.
        log: Log of the run.
        worker: Computes this rank's contribution; None on servers.
        savers: Savers of this rank's state beside its shard and the round's own state.
    """

    evaluation: type[RoundEvaluation] = RoundEvaluation

    def __init__(
        self, job: Job, rounds: Round, log: "Log", worker: RoundWorker | None,
        savers: Sequence[ArraySaver] = (),
    ) -> None:  # fmt: skip
        self._job, self._cluster, self._rounds, self._log = job, job.cluster, rounds, log
        self._worker, self._times = worker, worker.times if worker is not None else Times()
        self._allocator = job.allocator()
        self._ahead: deque[Range] = deque()
        self._depth = max(AHEAD, 1 + worker.ahead) if worker is not None else AHEAD
        self._weights: dict[int, np.ndarray] = {}  # by the number of samples of a round
        epochs = self._allocator.epochs_done
        self._evaluation = self.evaluation(job, rounds, epochs)
        self._checkpoints = RoundCheckpoints(job, rounds, log, savers)
        self._step, self._samples = job.base_step, job.base_samples
        self._detail = ""

    def run(self) -> Tasks[Outcome]:
        """Run the rounds until the data is exhausted or a flag says stop."""
        if not self._job.checkpoint:
            self._checkpoints.save(self._step, self._samples, self._allocator)
        self._log.start_at(self._samples)
        reason = ""
        while not reason:
            batch = self._next_batch()
            if batch is None:
                reason = "steps" if self._job.config.steps else "epochs"
                break
            reason = yield from self._round(batch)
            if reason:
                self._log.event("stop", self._step, reason=reason)
        self._end_rounds()
        if reason != "diverged":
            self._checkpoints.save_last(self._step, self._samples, self._allocator)
        if reason != "diverged" and self._checkpoints.refused():
            reason, self._detail = "diverged", f"parameters not finite at step {self._step}"
        if self._rounds.tables is not None:
            self._rounds.tables.settle(self._step)
        if self._worker is not None:
            self._worker.close()
        return self._outcome(reason)

    def _end_rounds(self) -> None:
        """Complete the checkpoint under way."""
        self._checkpoints.finish()

    def _next_batch(self) -> Range | None:
        while len(self._ahead) < self._depth and (batch := self._allocator.next(0)) is not None:
            self._ahead.append(batch)
            if self._worker is not None:
                self._worker.read_ahead(batch)
        return self._ahead.popleft() if self._ahead else None

    def _round(self, batch: Range) -> Tasks[str]:
        """Run one round; returns the reason if the run ends with it, else an empty text."""
        found, n, c = (0.0, 0), batch[2] - batch[1], self._job.config
        self._job.few = is_uneven(n, len(self._cluster.roles.workers), c.step_size, c.batch_size)
        status_board.set_phase(status_board.COMPUTING, time.perf_counter())
        if self._worker is not None:
            found = yield from self._worker.compute(batch, self._step)
        report = self._report(*found, n)
        if n not in self._weights:
            self._weights[n] = np.array([(e - b) / n for _, b, e in self._parts(batch)])
        self._allocator.applied(0, batch)
        tables, transfers = self._rounds.tables, self._rounds.transfers
        if tables is not None and tables.of_epoch(batch[0], epochs_over(self._allocator)):
            self._checkpoints.finish()  # no row may be evicted during a checkpoint
        start, waited = time.perf_counter(), transfers.waited_s
        status_board.set_phase(status_board.SUMMING, start)
        agreed = self._rounds.exchange(self._step + 1, self._weights[n], report)
        waited = transfers.waited_s - waited
        self._times.wait_s += waited
        end = time.perf_counter()
        self._times.push_s += end - start - waited
        self._job.begun = True
        self._step += 1
        status_board.report(status_board.CLOCK, self._step)
        status_board.set_phase(status_board.BETWEEN, end)
        self._job.versions[0] = self._step
        n -= self._give_back(batch, agreed)
        self._samples += n
        if n:
            self._log.count((agreed.loss_sum / n, n))
        if found[1]:
            yield None
        return self._end_of_round(agreed)

    def _parts(self, batch: Range) -> list[Range]:
        """Return each worker's part of a batch."""
        return split(batch, len(self._cluster.roles.workers))

    def _give_back(self, batch: Range, agreed: Report) -> int:
        """Return the samples that workers skipped to the allocator; returns their number.

        Collective: yes.
        """
        if agreed.stopped < DIGIT:
            return 0
        mine, cluster = 0 if self._worker is None else self._worker.left, self._cluster
        counts = gather_polled(cluster.comm, mine, cluster.wait_request)
        of_workers = [counts[rank] for rank in cluster.roles.workers]
        parts = zip(split(batch, len(of_workers)), of_workers, strict=True)
        left = [(epoch, end - count, end) for (epoch, _, end), count in parts if count]
        if sum(of_workers) == batch[2] - batch[1]:  # no update was made
            left, self._job.base_position = [batch], self._job.base_position - 1
        leave(self._allocator, batch, left)
        return sum(of_workers)

    def _report(self, loss: float, samples: int, n: int) -> Report:
        """Return this rank's report of the round."""
        epochs = self._allocator.epochs_done + n / self._job.info.n_train
        refused, due = self._checkpoints.wanted(self._step + 1, epochs)
        reason = self._evaluation.stop_reason()
        return Report(
            loss * samples,
            checkpoint=due,
            diverged=refused or not math.isfinite(loss),
            found=report_one(RESULTS, reason),
            stopped=report_one(STOPS, STOPS[self._job.left]) if self._job.stopping else 0.0,
            signals=report_one(SIGNALS, signals.received() or reason),
            rate=(self._job.rate_factor - 1) * samples / n,
            frozen=self._rounds.frozen_anew,
        )

    def _end_of_round(self, agreed: Report) -> str:
        if self._log.due():
            self._log.progress(self._step, self._allocator.epochs_done, self._samples)
        if agreed.diverged:
            bad = "parameters not finite" if math.isfinite(agreed.loss_sum) else "loss not finite"
            self._detail = f"{bad} at step {self._step}"
            return "diverged"
        if agreed.checkpoint:
            self._checkpoints.save(self._step, self._samples, self._allocator)
        self._checkpoints.attend()
        self._evaluation.run_when_due(self._step, self._allocator.epochs_done)
        if agreed.signals:
            return first_reported(SIGNALS, agreed.signals)
        if agreed.stopped:
            return STOPPED
        return first_reported(RESULTS, agreed.found)

    def _outcome(self, reason: str) -> Outcome:
        clocks = self._allocator.clocks * len(self._cluster.roles.workers)
        outcome = Outcome(
            reason, self._step, self._samples, self._allocator.epochs_done, self._detail, clocks,
            stats=self._stats(), release=self._release,
        )  # fmt: skip
        if reason != "diverged":
            outcome.unsaved = self._checkpoints.unsaved(self._step)
        if self._worker is not None:
            outcome.params = self._rounds.replica
        return outcome

    def _stats(self) -> dict[str, Any]:
        """Return this rank's part of the summary."""
        job, transfers, tables = self._job, self._rounds.transfers, self._rounds.tables
        rounds = self._step - job.base_step
        found: dict[str, Any] = {
            "bytes_sent": round(transfers.bytes_sent),
            "bytes_received": round(transfers.bytes_received),
            "clock_distance_max": tables.distance_max if tables is not None else 0,
        }
        if (worker := self._worker) is not None:
            moved = int(rounds * worker.vectors * job.layout.size * job.dtype.itemsize)
            found |= {
                **dataclasses.asdict(self._times),
                "pushes_sent": worker.pushes, "bytes_pushed": moved, "bytes_pulled": moved,
                "torn_reads": 0, "tables": job.rows.stats() if job.rows is not None else {},
            }  # fmt: skip
            if job.rows is not None:
                sent, received = job.rows.bytes_moved
                found["bytes_sent"] += sent
                found["bytes_received"] += received
        if self._cluster.rank in self._cluster.roles.owners:
            found |= {
                "bytes": self._rounds.params.nbytes * (1 + len(self._rounds.slots)),
                "applied": rounds,
                "busy_s": transfers.busy_s,
            }
            if tables is not None and tables.owner is not None:
                found["bytes"] += tables.owner.nbytes
                found["rows_changed"] = tables.owner.changed
                found["rows_evicted"] = tables.owner.evicted
        return found

    def _release(self) -> None:
        self._worker = None  # it holds views of the window, as the savers do
        self._checkpoints.free()
        self._rounds.free()
        self._evaluation.free()
