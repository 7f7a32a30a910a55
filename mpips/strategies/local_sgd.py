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

from mpips.cut.saver import WorkerSaver
from mpips.datasets.ledger import Range, split
from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks, taken
from mpips.rounds.averaging import AveragingRound
from mpips.rounds.loop import RoundLoop
from mpips.rounds.worker import RoundWorker
from mpips.strategies.replica import Replica

if TYPE_CHECKING:
    from mpips.session.metrics import Log


def run(job: Job, log: "Log") -> Tasks[Outcome]:
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
    worker = LocalWorker(job, rounds) if job.worker_id is not None else None
    return (yield from RoundLoop(job, rounds, log, worker, _savers(job, rounds)).run())


def _savers(job: Job, rounds: AveragingRound) -> list[WorkerSaver]:
    """Return what saves the slots that this worker keeps, if it keeps any."""
    if not job.own_slots or job.worker_id is None:
        return []
    slots = zip(job.own_slots, rounds.own_slots, strict=True)
    own = {name: [(0, slot)] for name, slot in slots}
    args = own, job.layout.size, job.dtype, job.config.snapshot == "stall"
    return [WorkerSaver(job.cluster, job.worker_id, *args)]


class LocalWorker(RoundWorker):
    """Makes local steps on its own parameters, which the round averages."""

    def __init__(self, job: Job, rounds: AveragingRound) -> None:
        super().__init__(job)
        self._averages, self._rate = rounds, job.rate()
        self._own = Replica(job, rounds.grad, rounds.own_slots)
        self.vectors = rounds.vectors

    def steps(self, batch: Range) -> list[Range]:
        """Return this worker's part of a round, cut into as many steps as every worker makes."""
        together = self._job.config.step_size * len(self._job.cluster.roles.workers)
        count = -(-(batch[2] - batch[1]) // together)
        return [step for step in split(self.part(batch), count) if step[2] > step[1]]

    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """Make the local steps of a round; see `RoundWorker.compute`."""
        steps = self.steps(batch)
        if not steps:
            return 0.0, 0
        self._averages.begin()
        self.pushes += 1
        total, samples = 0.0, 0
        for h, local in enumerate(steps, 1):
            number = step * self._job.config.local_steps + h
            size, batches = local[2] - local[1], taken(self._job, self._loader, local)
            loss = yield from self._own.step(batches, size, number, self._rate(step + 1))
            total, samples = total + loss * size, samples + size
            self.times.steps += 1
            if not math.isfinite(loss):
                break  # the run ends with this round
        self.times.samples += samples
        self.times.compute_s = self._own.busy_s
        return total / samples, samples
