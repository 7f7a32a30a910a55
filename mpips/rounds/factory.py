"""Choice of the round that a configuration asks for."""

from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.rounds.allreduce import AllreduceRound
from mpips.rounds.base import Round, Transfers
from mpips.rounds.powersgd import PowerSgdRound
from mpips.rounds.shared import SharedRound


def make_round(job: Job, rule: Rule | None = None, transfers: Transfers | None = None) -> Round:
    """Build the round that the configuration asks for. Collective: yes.

    Args:
        job: The run.
        rule: Takes the sum as it is, not clipped, in place of the job's rule.
        transfers: Where to count, by default a fresh one.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    if job.config.codec == "powersgd" and job.cluster.nodes > 1 and rule is None:
        return PowerSgdRound(job)
    kind = AllreduceRound if job.config.reduce == "allreduce" else SharedRound
    return kind(job, rule, transfers)
