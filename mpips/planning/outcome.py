"""Outcome of a run on one rank."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Outcome:
    """How a run ended on this rank.

    Attributes:
        reason: ``epochs``, ``steps``, ``target``, ``patience``, ``diverged``, or a signal's name.
        step: Updates applied, in resumed runs too; known on the coordinator.
        samples: Samples applied, likewise.
        epochs: Epochs applied, likewise.
        detail: On the coordinator, where the run diverged.
        clocks: On the coordinator, steps of each worker, in resumed runs too.
        params: All parameters at the end, shape (n_params,), on workers.
        stats: This rank's part of the summary.
        release: Frees windows and communicators. Collective: yes.
        unsaved: On the coordinator, why the last state is in no checkpoint; empty if it is.
        lost: On the coordinator, pushes of each worker that has died, by rank.
        taken_over: Likewise what there is to say of the shard of each server that has died.
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
