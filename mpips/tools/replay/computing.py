"""Recomputation of a worker's gradients."""

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpips.datasets.ledger import Range
from mpips.datasets.loader import Loader
from mpips.kernels.vectors import scale, sum_squares
from mpips.optim import Ranges, clip_factor
from mpips.planning.job import Job
from mpips.problems.accumulate import Accumulator, Tasks, follow, submit, taken
from mpips.transport.rows import Section


class Computed(NamedTuple):
    """What is known of a gradient that has been computed.

    Attributes:
        loss: Mean loss over its samples.
        factor: Of the learning rate, as a program has set it.
        frozen: Arrays that a program has frozen, by their ranges.
        rows: What is pushed of tables, by server and table.
    """

    loss: float
    factor: float = 1.0
    frozen: Ranges = ()
    rows: tuple[tuple[Section, ...], ...] = ()


class Computer:
    """Computes a worker's gradients, clipped, from what is handed to it.

    Args:
        job: Of the worker's rank.
        loader: Of the job's data; all workers of a process may have the same one.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._job, self._loader, self._accumulator = job, loader, Accumulator(job)

    def gradient(
        self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray
    ) -> Tasks[float]:
        """Have the gradient of a step computed; returns the mean loss.

        Args:
            number: Of the push, 1 for the worker's first.
            batch: The samples.
            replica: What it is computed from, shape (n_params,).
            grad: Where it goes, likewise.
        """
        job, rows = self._job, self._job.rows
        if rows is not None:
            rows.begin(number)
        submit(job, self._loader, batch)
        params = job.layout.views(replica, writable=False)
        batches, samples = taken(job, self._loader, batch), batch[2] - batch[1]
        args = params, batches, samples, job.layout.views(grad), grad
        loss = yield from self._accumulator.gradient(*args)
        if job.config.clip:
            trained = grad[: job.trained]
            squares = sum_squares(trained) + (rows.sum_squares() if rows is not None else 0.0)
            factor = clip_factor(squares, job.config.clip)
            scale(trained, factor)
            if rows is not None:
                rows.scale(factor)
        return loss


class Here:
    """Computes a worker's gradients in this process.

    Args:
        job: Of the worker's rank.
        loader: Of the job's data.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._problem, self._computer = job.problem, Computer(job, loader)
        self._generators = _generators()
        self._args: tuple[Any, ...] = ()

    def begin(self, *args: Any) -> None:
        """Begin to compute a gradient; see `Computer.gradient`."""
        self._args = args

    def advance(self, read: Callable[[int], bool]) -> Computed | None:
        """Compute it, with the random generators of this worker's rank."""
        before = _generators()
        _set_generators(self._generators)
        try:
            return Computed(follow(self._problem, self._computer.gradient(*self._args)))
        finally:
            self._generators = _generators()
            _set_generators(before)

    def end(self) -> None:
        """Nothing is to be ended."""


def _generators() -> tuple[Any, ...]:
    """Return the states of `random`, of NumPy's legacy generator and of torch's."""
    torch = sys.modules.get("torch")
    theirs = torch.get_rng_state() if torch is not None else None
    return random.getstate(), np.random.get_state(), theirs


def _set_generators(states: tuple[Any, ...]) -> None:
    ours, legacy, theirs = states
    random.setstate(ours)
    np.random.set_state(legacy)
    if theirs is not None:
        sys.modules["torch"].set_rng_state(theirs)
