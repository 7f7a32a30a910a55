"""Local SGD: each worker makes H steps by itself, then the replicas are averaged.

In round r, worker k begins at the average w and makes steps h = 1 to H with the job's rule, ``x_k
<- rule(x_k, g_k(x_k))``, on its own part of the round's samples; then ``w <- sum_k (n_k / n) x_k``,
n_k of the n samples being its own; or, with an outer momentum b, ``v <- b v + (w - sum_k (n_k / n)
x_k)`` and ``w <- w - v`` (see `mpips.rounds.averaging`). With H = 1 and plain SGD it is synchronous
SGD. A round moves as much as one of `sync_sgd`, for H steps.

The slots of the rule are averaged as well, with the same weights (for momentum as in Yu, Jin and
Yang, ICML 2019): so a round ends in one state, which is owned by slices like that of `sync_sgd`.
With ``local_slots = "keep"`` each worker keeps its own ("maintain" of SlowMo), and a round moves
one vector instead of one and the slots; then a checkpoint has a file a worker beside the shards,
and on another number of workers all begin with the mean of the saved slots.

Step h of round r has the number ``(r - 1) H + h`` in Adam's bias correction, and the learning
rate of update r. The last round of an epoch has fewer steps, equally many on each worker.

References: McDonald, Hall and Mann, NAACL 2010; Stich, ICLR 2019; Lin et al., ICLR 2020.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from mpips.cut.saver import WorkerSaver
from mpips.datasets.ledger import Range, split
from mpips.planning.job import Job
from mpips.problems.accumulate import taken
from mpips.rounds.averaging import Average, SlowMomentum
from mpips.rounds.rounds import Report, Round, Weights, make_round
from mpips.strategies import Outcome
from mpips.strategies.replica import Replica
from mpips.strategies.sync_sgd import SyncLoop

if TYPE_CHECKING:
    from mpips.session.metrics import Log


def run(job: Job, log: "Log") -> Outcome:
    """Train in rounds of local steps. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    rounds = AveragingRound(job)
    if job.cluster.rank in job.cluster.roles.owners:
        job.fill(rounds.params, rounds.slots, job.shard)
    if job.own_slots and job.worker_id is not None:
        job.fill_own(rounds.own_slots)
    rounds.publish_start()
    return LocalLoop(job, rounds, log).run()


class AveragingRound(Round):
    """The averages of a round: of the replicas, and of each slot of the rule that is not kept.

    Here `grad` is not a gradient but this worker's own parameters, and `slots` of an owner are
    those of the job: the rule's, averaged, and the outer velocity.

    Attributes:
        own_slots: This worker's slots, each of shape (n_params,).
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        beta = job.config.outer_momentum
        moved = () if job.own_slots else job.rule.slots
        self._slots = [make_round(job, Average()) for _ in moved]
        self._main = make_round(job, SlowMomentum(momentum=beta) if beta else Average())
        self._all = [*self._slots, self._main]
        self.replica = self._main.replica
        if job.worker_id is not None:
            self.grad = self._main.grad
            kept = tuple(np.zeros(job.layout.size, job.dtype) for _ in job.own_slots)
            self.own_slots = kept or tuple(r.grad for r in self._slots)
        if self._cluster.rank in self._cluster.roles.owners:
            self.params = self._main.params
            self.slots = (*(r.params for r in self._slots), *self._main.slots)

    @property
    def vectors(self) -> int:
        """Vectors of the parameters' size that a round averages."""
        return len(self._all)

    def begin(self) -> None:
        """Let this worker's parameters, and slots unless kept, begin at the averages."""
        for each in self._all:
            np.copyto(each.grad, each.replica)

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        for each in self._slots:
            each.exchange(step, weights, Report())
        agreed = self._main.exchange(step, weights, report)
        for name in ("waited_s", "busy_s", "bytes_sent", "bytes_received"):
            setattr(self, name, sum(getattr(each, name) for each in self._all))
        return agreed

    def publish_start(self) -> None:
        """See `Round.publish_start`."""
        for each in self._all:
            each.publish_start()

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self.own_slots = ()
        for each in self._all:
            each.free()


class LocalLoop(SyncLoop):
    """The rounds of a run; every rank has one, and all do the same."""

    def __init__(self, job: Job, rounds: AveragingRound, log: "Log") -> None:
        super().__init__(job, rounds, log)
        self._averages, self._rate = rounds, job.rate()
        self._taken_part = 0
        if self._loader:
            self._own = Replica(job, rounds.grad, rounds.own_slots)
            if job.own_slots:
                slots = zip(job.own_slots, rounds.own_slots, strict=True)
                own = {name: [(0, slot)] for name, slot in slots}
                args = own, job.layout.size, job.dtype, job.config.snapshot == "stall"
                assert job.worker_id is not None, "only workers read"
                self._savers.append(WorkerSaver(job.cluster, job.worker_id, *args))

    def _steps(self, batch: Range) -> list[Range]:
        """Return this worker's part of a round, cut into as many steps as every worker makes."""
        together = self._job.config.step_size * len(self._cluster.roles.workers)
        count = -(-(batch[2] - batch[1]) // together)
        return [step for step in split(self._part(batch), count) if step[2] > step[1]]

    def _compute(self, batch: Range) -> tuple[float, int]:
        """Make the local steps of a round; returns the mean loss and the number of samples."""
        steps = self._steps(batch) if self._loader else []
        if not self._loader or not steps:
            return 0.0, 0
        self._averages.begin()
        self._taken_part += 1
        total, samples = 0.0, 0
        for h, step in enumerate(steps, 1):
            number = self.step * self._job.config.local_steps + h
            size, batches = step[2] - step[1], taken(self._job, self._loader, step)
            loss = self._own.step(batches, size, number, self._rate(self.step + 1))
            total, samples = total + loss * size, samples + size
            self.times.steps += 1
            if not math.isfinite(loss):
                break  # the run ends with this round
        self.times.samples += samples
        self.times.compute_s = self._own.busy_s
        return total / samples, samples

    def _outcome(self, reason: str) -> Outcome:
        outcome = super()._outcome(reason)
        if self._loader:
            for moved in ("bytes_pushed", "bytes_pulled"):
                outcome.stats[moved] *= self._averages.vectors
            outcome.stats["pushes_sent"] = self._taken_part
        return outcome

    def _release(self) -> None:
        vars(self).pop("_own", None)
        super()._release()
