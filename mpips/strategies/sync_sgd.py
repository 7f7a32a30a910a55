"""Synchronous SGD: one update for each round, by the mean gradient.

``w <- w - lr * sum_k (n_k / n) g_k(w)``, where worker k has n_k of the round's n samples. This
equals SGD with one large batch of n samples (Chen et al., ICLR 2016 workshop, section 2). Gradients
of table rows are summed and applied in the same way.
"""

from typing import TYPE_CHECKING

from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks
from mpips.rounds.loop import GradientWorker, RoundLoop
from mpips.rounds.shared import make_round
from mpips.snapshot.worker_state import fill, resume_notes
from mpips.transport import wire

if TYPE_CHECKING:
    from mpips.session.metrics import Log


def run(job: Job, log: "Log") -> Tasks[Outcome]:
    """Train in rounds. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    return (yield from run_rounds(job, log, GradientWorker))


def run_rounds(job: Job, log: "Log", kind: type[GradientWorker]) -> Tasks[Outcome]:
    """Train in rounds. Collective: yes.

    Args:
        job: The run.
        log: Log of the run.
        kind: Class of the workers.

    Raises:
        UserError: As `run`.
    """
    rounds = make_round(job)
    if job.cluster.rank in job.cluster.roles.owners:
        job.fill(rounds.params, rounds.slots, job.shard)
    if rounds.tables is not None:
        job.rows = rounds.tables.rows
        if rounds.tables.owned is not None:
            rounds.tables.owned.fill(job)
    fill(job, rounds.own_state())
    rounds.publish_start()
    for line in (wire.announcement(job), *resume_notes(job)):
        log.say(line)
    worker = kind(job, rounds) if job.worker_id is not None else None
    loop: type[RoundLoop] = RoundLoop
    if job.config.on_death == "shrink":
        from mpips.rounds.survivable_loop import SurvivableLoop

        loop = SurvivableLoop
    return (yield from loop(job, rounds, log, worker).run())
