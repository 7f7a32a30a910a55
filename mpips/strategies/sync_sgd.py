"""Synchronous SGD: w <- w - lr * sum_w (n_w / n) g_w(w), one update a round.

Equal to SGD with the large batch of n = sum n_w samples that the workers' batches make together
(Chen et al., ICLR 2016 workshop, section 2). All ranks take part in every round; a worker without
samples contributes zero. Flags travel with the round and take effect at its end, on every rank.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpips.cluster import signals
from mpips.cluster.world import cluster_subset, free
from mpips.cut.saver import (
    LAST_PAUSE_S,
    LAST_TRIES,
    RETRY_S,
    Committer,
    Contents,
    Saver,
    Snapshots,
)
from mpips.datasets.ledger import Range, part, split
from mpips.datasets.loader import Loader
from mpips.planning.job import Job
from mpips.problems.accumulate import Accumulator, submit, taken
from mpips.problems.evaluation import evaluate, next_evaluation, share, share_evaluation
from mpips.ps.worker import Times, make_loader
from mpips.rounds import state as round_state
from mpips.rounds.rounds import Report, Round, make_round
from mpips.strategies import Outcome
from mpips.transport import wire

if TYPE_CHECKING:
    from mpips.session.metrics import Log

AHEAD = 2  # batches that a worker reads before their round


def run(job: Job, log: "Log") -> Outcome:
    """Train in rounds. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    rounds = make_round(job)
    if job.cluster.rank in job.cluster.roles.owners:
        job.fill(rounds.params, rounds.slots, job.shard)
    round_state.fill(job, rounds.own_state())
    rounds.publish_start()
    roles, node_of = job.cluster.roles, job.cluster.node_of
    packed = wire.told(job.config, roles, node_of, job.shards, job.layout)
    if packed is not None:
        log.say(packed)
    for line in round_state.told(job):
        log.say(line)
    return SyncLoop(job, rounds, log).run()


class SyncLoop:
    """The rounds of a run; every rank has one, and all do the same."""

    def __init__(self, job: Job, rounds: Round, log: "Log") -> None:
        self._job, self._cluster, self._rounds, self._log = job, job.cluster, rounds, log
        self._handout = job.handout()
        self._ahead: deque[Range] = deque()
        self._weights: dict[int, np.ndarray] = {}  # by the samples of a round's batch
        self._workers = cluster_subset(self._cluster, self._cluster.roles.workers)
        self._saver: Saver | None = None
        self._savers: list[Snapshots] = []
        self._committer: Committer | None = None
        self._loader: Loader | None = None
        stall = job.config.snapshot == "stall"
        if self._cluster.rank in self._cluster.roles.owners:
            slots = dict(zip(job.slots, rounds.slots, strict=True))
            self._saver = Saver(self._cluster, job.shard, rounds.params, slots, stall)
            self._savers.append(self._saver)
        if (own := round_state.saver_of(job, rounds.own_state(), stall)) is not None:
            self._savers.append(own)
        if job.place is not None:
            kept = round_state.names(job)
            ranks = tuple(range(self._cluster.world)) if kept else None
            contents = Contents.of(job, kept, ranks)
            self._committer = Committer(self._cluster, job.place, contents, log)
            self._committer.saved_step = job.base_step if job.resumed else None
        self._worker_id = job.worker_id
        if self._worker_id is not None:
            self._loader = make_loader(job)
            self._grad = job.layout.views(rounds.grad)
            self._accumulator = Accumulator(job)
        self._params: dict[str, np.ndarray] = {}
        if self._loader:
            self._params = job.layout.views(rounds.replica, writable=False)
        self.step, self.samples = job.base_step, job.base_samples
        self._period = job.config.checkpoint_period
        self._last_save = (time.perf_counter(), job.base_step)
        self._next_eval = next_evaluation(self._handout.epochs_done, job.config.eval_every)
        self._target_reached = False
        self._detail = ""
        self.times = Times()

    def run(self) -> Outcome:
        """Go through the rounds, until there is no data or a flag says stop."""
        if not self._job.resumed:
            self._save()
        self._log.start_at(self.samples)
        reason = ""
        while not reason:
            batch = self._next_batch()
            if batch is None:
                reason = "steps" if self._job.config.steps else "epochs"
                break
            reason = self._round(batch)
            if reason:
                self._log.event("stop", self.step, reason=reason)
        self._cluster.wait(lambda: not self._attend())  # what is under way is whole in the end
        if reason != "diverged":
            self._save_last()
        if reason != "diverged" and self._chief_says(lambda committer: committer.refused):
            reason, self._detail = "diverged", f"parameters not finite at step {self.step}"
        if self._loader:
            self._loader.close()
        return self._outcome(reason)

    def _save_last(self) -> None:
        """Save the last state if that is not done, with several tries. Collective: yes."""
        for _ in range(LAST_TRIES):
            if not self._chief_says(lambda c: not (c.refused or c.has_saved(self.step))):
                return
            self._cluster.wait(lambda: not self._pauses())
            self._save()
            self._cluster.wait(lambda: not self._attend())

    def _pauses(self) -> bool:
        """Whether a checkpoint has failed just now."""
        c = self._committer
        return c is not None and bool(c.failure) and not c.failed_for(LAST_PAUSE_S)

    def _chief_says(self, ask: Callable[[Committer], bool]) -> bool:
        """Return what is so of the chief's checkpoints, on every rank. Collective: yes."""
        said = np.array([bool(self._committer and ask(self._committer))])
        chief = self._cluster.roles.chief
        self._cluster.wait_request(self._cluster.comm.Ibcast(said, chief))
        return bool(said[0])

    def _next_batch(self) -> Range | None:
        while len(self._ahead) < AHEAD and (batch := self._handout.next(0)) is not None:
            self._ahead.append(batch)
            if self._loader:
                for step in self._steps(batch):
                    submit(self._job, self._loader, step)
        return self._ahead.popleft() if self._ahead else None

    def _part(self, batch: Range) -> Range:
        assert self._worker_id is not None, "servers have no part of a batch"
        return part(batch, self._worker_id, len(self._cluster.roles.workers))

    def _steps(self, batch: Range) -> list[Range]:
        """Return what this worker reads for a round, one part a step."""
        return [self._part(batch)]

    def _round(self, batch: Range) -> str:
        """Run one round; returns why the run ends with it, or an empty text."""
        report = self._report(*self._compute(batch))
        n = batch[2] - batch[1]
        if n not in self._weights:
            parts = split(batch, len(self._cluster.roles.workers))
            self._weights[n] = np.array([(e - b) / n for _, b, e in parts])
        start, waited = time.perf_counter(), self._rounds.waited_s
        agreed = self._rounds.exchange(self.step + 1, self._weights[n], report)
        waited = self._rounds.waited_s - waited
        self.times.wait_s += waited
        self.times.push_s += time.perf_counter() - start - waited
        self._job.begun = True
        self.step += 1
        self.samples += n
        self._handout.applied(0, batch)
        self._log.count(agreed.loss_sum / n, n)
        return self._end_of_round(agreed)

    def _compute(self, batch: Range) -> tuple[float, int]:
        """Compute this worker's gradient; returns the mean loss and the number of samples."""
        if self._loader is None:
            return 0.0, 0
        mine = self._part(batch)
        samples = mine[2] - mine[1]
        if not samples:
            return 0.0, 0
        batches = taken(self._job, self._loader, mine)
        args = self._params, batches, samples, self._grad, self._rounds.grad
        loss = self._accumulator.gradient(*args)
        self.times.compute_s = self._accumulator.compute_s
        self.times.steps += 1
        self.times.samples += samples
        return loss, samples

    def _report(self, loss: float, samples: int) -> Report:
        """Put together what this rank brings into the round beside its gradient."""
        flags = {"diverged": not math.isfinite(loss), "target": self._target_reached}
        if self._committer:
            flags["diverged"] |= self._committer.refused
            flags["checkpoint"] = self._checkpoint_due()
        if name := signals.received():
            flags[name.lower()] = True
        return Report(loss * samples, samples, **flags)

    def _checkpoint_due(self) -> bool:
        assert self._committer is not None
        if self._committer.busy:
            return False
        if self._committer.failed_for(RETRY_S):
            return True
        seconds, steps = self._period
        then, saved = self._last_save
        due = seconds is not None and time.perf_counter() - then >= seconds
        return due or (steps is not None and self.step + 1 - saved >= steps)

    def _end_of_round(self, agreed: Report) -> str:
        if self._log.due():
            self._log.progress(self.step, self._handout.epochs_done, self.samples)
        if agreed.diverged:
            bad = "parameters not finite" if math.isfinite(agreed.loss_sum) else "loss not finite"
            self._detail = f"{bad} at step {self.step}"
            return "diverged"
        if agreed.checkpoint:
            self._save()
        self._attend()
        self._evaluate_when_due()
        for name in ("sigusr1", "sigterm", "sigint"):
            if getattr(agreed, name):
                return name.upper()
        return "target" if agreed.target else ""

    def _save(self) -> None:
        """Begin a checkpoint of this round's end. Collective; blocks for a copy."""
        self._last_save = (time.perf_counter(), self.step)
        self._rounds.compare(self.step)
        if not self._savers:
            return
        self._cluster.wait(lambda: not self._attend())
        for saver in self._savers:
            saver.snapshot(self.step)
        if self._committer:
            handout = self._handout.state()
            handout["clocks"] *= len(self._cluster.roles.workers)
            state = self._job.state(self.step, handout, self.samples)
            self._committer.open(self.step, state)
        self._cluster.wait(lambda: not self._attend() or not any(s.holds for s in self._savers))

    def _attend(self) -> bool:
        """Act on messages, get on with a checkpoint; returns whether one is under way here."""
        for _, kind, payload in self._cluster.poll():
            self._handle(kind, payload)
        for saver in self._savers:
            saver.poll()
        busy = any(saver.busy for saver in self._savers)
        if self._committer:
            self._committer.poll()
            busy = busy or self._committer.busy
        return busy

    def _handle(self, kind: str, payload: object) -> None:
        if kind == "write":
            assert isinstance(payload, str)
            for saver in self._savers:
                saver.write_into(payload)
        elif kind == "shard":
            assert self._committer is not None
            self._committer.collect(payload)  # type: ignore[arg-type]
        elif kind == "own":
            assert self._committer is not None
            self._committer.collect_own(payload)  # type: ignore[arg-type]
        elif kind == "eval":
            self._log.evaluation(payload)  # type: ignore[arg-type]
        else:
            raise AssertionError(f"unknown message {kind!r} in a synchronous run")

    def _evaluate_when_due(self) -> None:
        """Evaluate in parts on all workers, which then all know the result.

        Raises:
            UserError: If a metric is some workers' only.
        """
        config, info = self._job.config, self._job.info
        if not config.eval_every or not info.n_test or self._handout.epochs_done < self._next_eval:
            return
        self._next_eval = next_evaluation(self._handout.epochs_done, config.eval_every)
        if self._worker_id is None:
            return
        begin, end = share(info.n_test, self._worker_id, len(self._cluster.roles.workers))
        mine = evaluate(self._job, self._params, begin, end)
        means = share_evaluation(self._job, self._workers, mine)
        target = config.target_accuracy
        self._target_reached = bool(target) and means.get("accuracy", 0.0) >= target
        if self._worker_id == 0:
            epoch = round(self._handout.epochs_done, 4)
            payload = {"step": self.step, "epoch": epoch, **means}
            self._cluster.send(self._cluster.roles.chief, "eval", payload)

    def _outcome(self, reason: str) -> Outcome:
        job = self._job
        clocks = self._handout.clocks * len(self._cluster.roles.workers)
        outcome = Outcome(
            reason, self.step, self.samples, self._handout.epochs_done, self._detail, clocks,
            release=self._release,
        )  # fmt: skip
        if (c := self._committer) and reason != "diverged" and not c.has_saved(self.step):
            outcome.unsaved = f"{c.failure}; {c.kept}"
        outcome.stats = {
            name: getattr(self._rounds, name) for name in ("bytes_sent", "bytes_received")
        }
        rounds = self.step - job.base_step
        if self._worker_id is not None:
            outcome.params = self._rounds.replica
            moved = rounds * job.layout.size * job.dtype.itemsize
            outcome.stats |= {
                **dataclasses.asdict(self.times),
                "pushes_sent": self.times.steps, "bytes_pushed": moved, "bytes_pulled": moved,
                "torn_reads": 0,
            }  # fmt: skip
        if self._saver:
            outcome.stats |= {
                "bytes": self._rounds.params.nbytes * (1 + len(self._rounds.slots)),
                "applied": rounds,
                "busy_s": self._rounds.busy_s,
            }
        return outcome

    def _release(self) -> None:
        self._params, self._grad = {}, {}
        self._saver, self._savers = None, []
        self._rounds.free()
        free(self._workers)
