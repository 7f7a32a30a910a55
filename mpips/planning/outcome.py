"""Outcome of a run on one rank: end, times and counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.config import Config
from mpips.config.jobfile import from_toml
from mpips.config.names import EMA
from mpips.optim import Range, Rule, RuleState

if TYPE_CHECKING:
    from mpips.checkpoint import Checkpoint
    from mpips.planning.job import Job


@dataclass
class Outcome:
    """End of a run on this rank.

    Attributes:
        reason: ``epochs``, ``steps``, ``target``, ``patience``, ``diverged``, or a signal's name.
        step: Updates applied, earlier parts of a resumed run included; only on the coordinator.
        samples: Samples applied, counted likewise.
        epochs: Epochs applied, counted likewise.
        detail: On the coordinator, step and value if the run diverged.
        clocks: On the coordinator, steps of each worker, earlier parts included.
        params: On workers, all parameters at the end, shape (n_params,).
        stats: This rank's part of the summary.
        release: Frees windows and communicators. Collective: yes.
        unsaved: On the coordinator, why the last state is in no checkpoint; empty if it is in one.
        lost: On the coordinator, number of pushes of each worker that has died, by rank.
        taken_over: On the coordinator, the summary's part of each shard whose server has died, by
            rank.
    """

    reason: str
    step: int = 0
    samples: int = 0
    epochs: float = 0.0
    detail: str = ""
    clocks: list[int] = field(default_factory=list)
    params: np.ndarray = field(default_factory=lambda: np.zeros(0))
    stats: dict[str, Any] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None
    unsaved: str = ""
    lost: dict[int, int] = field(default_factory=dict)
    taken_over: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Times:
    """A worker's time in seconds, by activity, and its counts of steps and samples."""

    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    pull_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0


@cache
def parsed(text: str) -> Config:
    """Return the configuration that a checkpoint contains."""
    return from_toml(text)


def _times_applied(config: Config) -> int:
    """Return how often a worker or owner applies the rule in an update of the run."""
    return config.round_steps if config.mode == "local_sgd" else 1


def updates_made(saved: "Checkpoint") -> int:
    """Return the number of updates in a checkpoint's slots, of a mode that has them in a shard."""
    before = int(saved.state.get("steps_before", 0))
    return before + saved.step * _times_applied(parsed(saved.config))


def updates_before(saved: "Checkpoint", config: Config, rule: Rule) -> int:
    """Return `Rule.before` of a resumed run: updates in its slots, less those of the run.

    After mode easgd, where replicas have the slots, they begin anew.
    """
    if config.mode == "easgd":  # replicas count their own steps
        was = parsed(saved.config).mode == "easgd"
        return int(saved.state.get("steps_before", 0)) if was else 0
    slots = set(rule.slots) - {EMA}
    anew = slots and not slots.intersection(saved.slot_names + saved.worker_names)
    return (0 if anew else updates_made(saved)) - saved.step * _times_applied(config)


def skipped_before(job: "Job", before: int) -> dict[str, int]:
    """Return how many updates the resumed run made without each array, by name.

    The result is limited to the number of updates in the slots: another mode counts differently.

    Args:
        job: The run.
        before: See `mpips.optim.Rule`.
    """
    if job.config.mode == "easgd":  # each worker has its own count
        return {}
    if job.checkpoint is None:
        rule_state: RuleState | None = getattr(job.problem, "rule_state", None)
        return dict(rule_state.skipped) if rule_state is not None else {}
    saved = job.checkpoint
    most = before + saved.step * _times_applied(job.config)
    return {name: min(n, most) for name, n in saved.state.get("skipped", {}).items()}


def skipped_updates(job: "Job", now: Mapping[Range, int]) -> dict[str, int]:
    """Return how many updates were made without each array, by name; earlier parts included.

    Args:
        job: The run.
        now: Updates of this job that were made without an array, by its range.
    """
    counts = skipped_before(job, job.rule.before)
    names = {at: name for name, at in job.layout.slices().items()}
    for array, count in now.items():
        counts[names[array]] = counts.get(names[array], 0) + count
    return counts
