"""Consistency models, one a file; each has ``run(job, log)``.

It yields what is to be computed, and returns the `Outcome`: see `mpips.problems.accumulate`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpips.planning.job import Job
    from mpips.planning.outcome import Outcome
    from mpips.problems.accumulate import Tasks
    from mpips.session.metrics import Log


def strategy(mode: str) -> "Callable[[Job, Log], Tasks[Outcome]]":
    """Return the strategy called `mode`, such as ``async``; it is imported only now."""
    import importlib

    name = {"async": "async_sgd", "sync": "sync_sgd"}.get(mode, mode)
    module = importlib.import_module(f"mpips.strategies.{name}")
    return module.run


def survivable_ranks(job: "Job") -> tuple[int, ...]:
    """Return the ranks that a run can do without if they die. The same on all ranks."""
    if not job.cluster.failures.on:
        return ()
    from mpips.failover.policy import survivable

    return survivable(job)
