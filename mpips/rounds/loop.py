"""The loop of a run in rounds.

All ranks take part in every round; a worker without samples contributes zero. Flags travel with the
round and take effect at its end, on every rank.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.datasets.ledger import Range, epochs_over, split
from mpips.health import status_board
from mpips.mpi import signals
from mpips.planning.job import STOPPED, Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks
from mpips.ps.steps import Times
from mpips.rounds.base import (
    RESULTS,
    SIGNALS,
    Report,
    Round,
    first_reported,
    report_one,
)
from mpips.rounds.checkpoints import RoundCheckpoints
from mpips.rounds.evaluation import RoundEvaluation
from mpips.rounds.worker import RoundWorker
from mpips.snapshot.saver import Snapshots

if TYPE_CHECKING:
    from mpips.session.metrics import Log

AHEAD = 2  # batches that a worker reads before their round, unless its reader wants more


class RoundLoop:
    """The rounds of a run; every rank has one, and all do the same.

    Args:
        job: The run.
        rounds: The round.
        log: Of the run.
        worker: What this rank computes; None on servers.
        savers: Of what this rank has beside its shard and the round's own state.
    """

    def __init__(
        self,
        job: Job,
        rounds: Round,
        log: "Log",
        worker: RoundWorker | None,
        savers: Sequence[Snapshots] = (),
    ) -> None:
        self._job, self._cluster, self._rounds, self._log = job, job.cluster, rounds, log
        self._worker, self._times = worker, worker.times if worker is not None else Times()
        self._allocator = job.allocator()
        self._ahead: deque[Range] = deque()
        self._depth = max(AHEAD, 1 + worker.ahead) if worker is not None else AHEAD
        self._weights: dict[int, np.ndarray] = {}  # by the samples of a round's batch
        epochs = self._allocator.epochs_done
        self._evaluation = RoundEvaluation(job, rounds.replica, epochs)
        self._checkpoints = RoundCheckpoints(job, rounds, log, savers)
        self._step, self._samples = job.base_step, job.base_samples
        self._detail = ""

    def run(self) -> Tasks[Outcome]:
        """Go through the rounds, until there is no data or a flag says stop."""
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
        self._checkpoints.finish()  # what is under way is whole in the end
        if reason != "diverged":
            self._checkpoints.save_last(self._step, self._samples, self._allocator)
        if reason != "diverged" and self._checkpoints.refused():
            reason, self._detail = "diverged", f"parameters not finite at step {self._step}"
        if self._worker is not None:
            self._worker.close()
        return self._outcome(reason)

    def _next_batch(self) -> Range | None:
        while len(self._ahead) < self._depth and (batch := self._allocator.next(0)) is not None:
            self._ahead.append(batch)
            if self._worker is not None:
                self._worker.read_ahead(batch)
        return self._ahead.popleft() if self._ahead else None

    def _round(self, batch: Range) -> Tasks[str]:
        """Run one round; returns why the run ends with it, or an empty text."""
        found, n = (0.0, 0), batch[2] - batch[1]
        self._job.few = n < len(self._cluster.roles.workers)
        status_board.set_phase(status_board.COMPUTING, time.perf_counter())
        if self._worker is not None:
            found = yield from self._worker.compute(batch, self._step)
        report = self._report(*found, n)
        if n not in self._weights:
            parts = split(batch, len(self._cluster.roles.workers))
            self._weights[n] = np.array([(e - b) / n for _, b, e in parts])
        self._allocator.applied(0, batch)
        tables = self._rounds.tables
        if tables is not None and tables.of_epoch(batch[0], epochs_over(self._allocator)):
            self._checkpoints.finish()  # before rows are evicted
        transfers = self._rounds.transfers
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
        self._samples += n
        self._log.count(agreed.loss_sum / n, n)
        if found[1]:
            yield None
        return self._end_of_round(agreed)

    def _report(self, loss: float, samples: int, n: int) -> Report:
        """Put together what this rank brings into the round beside its gradient."""
        epochs = self._allocator.epochs_done + n / self._job.info.n_train
        refused, due = self._checkpoints.wanted(self._step + 1, epochs)
        asked = self._evaluation.asked()
        return Report(
            loss * samples,
            checkpoint=due,
            diverged=refused or not math.isfinite(loss),
            found=report_one(RESULTS, asked),
            stopped=self._job.stopping,
            signals=report_one(SIGNALS, signals.received() or asked),
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
        job, transfers = self._job, self._rounds.transfers
        rounds = self._step - job.base_step
        found: dict[str, Any] = {
            "bytes_sent": round(transfers.bytes_sent),
            "bytes_received": round(transfers.bytes_received),
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
            tables = self._rounds.tables
            if tables is not None and tables.owned is not None:
                found["bytes"] += tables.owned.nbytes
                found["rows_changed"] = tables.owned.rows_changed
                found["rows_evicted"] = tables.owned.rows_evicted
        return found

    def _release(self) -> None:
        self._worker = None  # it holds views, as the savers do
        self._checkpoints.free()
        self._rounds.free()
        self._evaluation.free()
