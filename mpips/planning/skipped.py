"""Counts of updates that left frozen arrays alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpips.optim import Range, RuleState

if TYPE_CHECKING:
    from mpips.planning.job import Job


def skipped_before(job: "Job") -> dict[str, int]:
    """Return how many updates were made without each array, in the run that is resumed.

    They are at most as many as this mode counts: another mode may have counted otherwise.
    """
    if job.config.mode == "easgd":  # each worker has its own
        return {}
    if job.checkpoint is None:
        given: RuleState | None = getattr(job.problem, "rule_state", None)
        return dict(given.skipped) if given is not None else {}
    state, c = job.checkpoint.state, job.config
    most = int(state.get("step", 0)) * (c.round_steps if c.mode == "local_sgd" else 1)
    most += int(state.get("steps_before", 0))
    return {name: min(n, most) for name, n in state.get("skipped", {}).items()}


def skipped_updates(job: "Job", now: Mapping[Range, int]) -> dict[str, int]:
    """Return the same with those of this job, by name.

    Args:
        job: The run.
        now: Updates of this job that were made without an array, by its range.
    """
    found, names = skipped_before(job), {at: name for name, at in job.layout.slices().items()}
    for array, count in now.items():
        found[names[array]] = found.get(names[array], 0) + count
    return found
