"""Training modes, one in each file, with a function ``run(job, log)``.

``run`` yields the gradient tasks of `mpips.problems.accumulate`, and returns the `Outcome`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpips.planning.job import Job
    from mpips.planning.outcome import Outcome
    from mpips.problems.accumulate import Tasks
    from mpips.session.metrics import Log


def strategy(mode: str) -> "Callable[[Job, Log], Tasks[Outcome]]":
    """Import a mode, such as ``async``, and return its function ``run``."""
    import importlib

    name = {"async": "async_sgd", "sync": "sync_sgd"}.get(mode, mode)
    module = importlib.import_module(f"mpips.strategies.{name}")
    return module.run


def survivable_ranks(job: "Job") -> tuple[int, ...]:
    """Return the ranks whose death the run survives. All ranks return the same."""
    if not job.cluster.failures.on:
        return ()
    from mpips.failover.policy import survivable

    return survivable(job)
