"""Local SGD: rounds of local steps on each worker, then an average.

In round r, worker k starts at the average w. It makes steps h = 1 to H with the job's rule,
``x_k <- rule(x_k, g_k(x_k))``, on its part of the round's samples. Let n_k of the n samples be its
part. The round then sets ``w <- sum_k (n_k / n) x_k``. With an outer momentum b and an outer rate
a, it computes ``d = w - sum_k (n_k / n) x_k`` and ``v <- b v + d`` instead. Then it sets
``w <- w - a v``, or, with Nesterov's momentum as in DiLoCo, ``w <- w - a (d + b v)``
(`mpips.rounds.averaging`). With H = 1 and plain SGD it is synchronous SGD. A round of H steps
transfers as much as one step of `sync_sgd`. With a codec, nodes send d, compressed.

The slots of the rule are averaged with the same weights (for momentum as in Yu, Jin and Yang, ICML
2019). So a round ends in one state, of which each owner has a slice as in `sync_sgd`. With
``local_slots = "keep"``, each worker keeps its own slots ("maintain" of SlowMo), and a round
transfers only the parameters. Then a checkpoint has one more file for each worker. If the run is
resumed with another number of workers, all start with the mean of the saved slots.

With P fragments, a round has H / P steps and exchanges one fragment (`mpips.rounds.streaming`).
Then workers keep parameters of their own, as they also do if local steps continue during an
exchange. These are in the workers' files, too. If the run is resumed with another number of
workers, all start with their mean.

Step h of round r has the number ``(r - 1) H / P + h`` in Adam's bias correction and in the
schedule. So the learning rate changes from step to step, even in a warm-up of one round. The last
round of an epoch has fewer steps, the same number on each worker.

References: McDonald, Hall and Mann, NAACL 2010; Stich, ICLR 2019; Lin et al., ICLR 2020;
Douillard et al., arXiv 2311.08105 and 2501.18512.
"""

import math
from typing import TYPE_CHECKING

from mpips.datasets.ledger import Range, split
from mpips.optim import Slots
from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks, taken
from mpips.rounds.averaging import AveragingRound
from mpips.rounds.loop import RoundLoop, RoundWorker
from mpips.rounds.streaming import StreamingRound
from mpips.snapshot.saver import WorkerSaver
from mpips.strategies.replica import Replica
from mpips.transport import wire

if TYPE_CHECKING:
    from mpips.session.metrics import Log


def run(job: Job, log: "Log") -> Tasks[Outcome]:
    """Train in rounds of local steps. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    make_round, make_loop = _kinds(job)
    rounds = make_round(job)
    if job.cluster.rank in job.cluster.roles.owners:
        job.fill(rounds.params, rounds.slots, job.shard)
    if job.own_slots and job.worker_id is not None:
        job.fill_own(rounds.own)
    rounds.publish_start()
    fragment = rounds.shards[0] if isinstance(rounds, StreamingRound) else None
    log.say(wire.announcement(job, fragment))
    worker = LocalWorker(job, rounds) if job.worker_id is not None else None
    return (yield from make_loop(job, rounds, log, worker, _savers(job, rounds.own)).run())


def _kinds(job: Job) -> tuple[type[AveragingRound | StreamingRound], type[RoundLoop]]:
    if job.config.on_death != "shrink":
        return StreamingRound if job.config.streaming else AveragingRound, RoundLoop
    from mpips.rounds.survivable import SurvivableAveraging
    from mpips.rounds.survivable_loop import SurvivableLoop

    return SurvivableAveraging, SurvivableLoop


def _savers(job: Job, own: Slots) -> list[WorkerSaver]:
    """Return the saver of this worker's own parameters and slots; none if it has none."""
    if not job.own_slots or job.worker_id is None:
        return []
    vectors = {name: [(0, vector)] for name, vector in zip(job.own_slots, own, strict=True)}
    return [WorkerSaver(job, job.worker_id, vectors, job.config.snapshot == "stall")]


class LocalWorker(RoundWorker):
    """Makes local steps on its own parameters, which rounds average."""

    def __init__(self, job: Job, rounds: AveragingRound | StreamingRound) -> None:
        super().__init__(job)
        self._rounds, self._rate = rounds, job.rate(steps=job.config.round_steps)
        self._own = Replica(job, rounds.own_params, rounds.own_slots)
        self.vectors = rounds.vectors

    def steps(self, batch: Range) -> list[Range]:
        """Divide this worker's part of a round into steps, as many as every worker makes."""
        together = self._job.config.step_size * self._places
        count = -(-(batch[2] - batch[1]) // together)
        return [step for step in split(self.part(batch), count) if step[2] > step[1]]

    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """Make the local steps of a round; see `RoundWorker.compute`.

        With `overlap_steps`, the exchange begins before the last steps.
        """
        steps = self.steps(batch)
        if not steps:
            return 0.0, 0
        self._rounds.begin()
        self.pushes += 1
        total, samples, c = 0.0, 0, self._job.config
        for h, local in enumerate(steps, 1):
            if h > len(steps) - c.overlap_steps:
                self._rounds.begin_exchange(step + 1)
            number = step * c.round_steps + h
            lr = self._rate(number) * self._job.lr_scale
            size, batches = local[2] - local[1], taken(self._job, self._loader, local)
            with self._rounds.getting_on():
                loss = yield from self._own.step(batches, size, number, lr)
            if self._job.left:
                self.left = sum(end - begin for _, begin, end in steps) - samples
                break
            total, samples = total + loss * size, samples + size
            self.times.steps += 1
            if not math.isfinite(loss):
                break  # the run ends with this round
        self.times.samples += samples
        self.times.compute_s = self._own.busy_s
        return total / max(1, samples), samples
