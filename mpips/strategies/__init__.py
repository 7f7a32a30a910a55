"""Consistency models, one a file; each has ``run(job, log) -> Outcome``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpips.planning.job import Job
    from mpips.session.metrics import Log


@dataclass
class Outcome:
    """How a run ended on this rank.

    Attributes:
        reason: ``epochs``, ``steps``, ``target``, ``diverged``, or the name of a signal.
        step: Updates applied, in resumed runs too; known on the chief.
        samples: Samples applied, likewise.
        epochs: Epochs applied, likewise.
        detail: On the chief, where the run diverged.
        clocks: On the chief, steps of each worker, in resumed runs too.
        params: All parameters at the end, shape (n_params,), on workers.
        stats: This rank's part of the summary.
        release: Frees windows and communicators. Collective: yes.
        unsaved: On the chief, why the last state is in no checkpoint; empty if it is.
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


def strategy(mode: str) -> "Callable[[Job, Log], Outcome]":
    """Return the strategy called `mode`, such as ``async``; it is imported only now."""
    import importlib

    name = {"async": "async_sgd", "sync": "sync_sgd"}.get(mode, mode)
    run: Callable[[Job, Log], Outcome] = importlib.import_module(f"mpips.strategies.{name}").run
    return run
