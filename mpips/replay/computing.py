"""How a worker's gradients are computed again: in this process, one after the other."""

from typing import NamedTuple

import numpy as np

from mpips.datasets.ledger import Range
from mpips.datasets.loader import Loader
from mpips.kernels.vectors import scale, sum_squares
from mpips.optim import Ranges, clip_factor
from mpips.planning.job import Job
from mpips.problems.accumulate import Accumulator, Tasks, follow, submit, taken
from mpips.replay.draws import Draws


class Computed(NamedTuple):
    """What is known of a gradient that has been computed.

    Attributes:
        loss: Mean loss over its samples.
        factor: Of the learning rate, as a program has set it.
        frozen: Arrays that a program has frozen, by their ranges.
    """

    loss: float
    factor: float = 1.0
    frozen: Ranges = ()


class Computer:
    """Computes a worker's gradients, clipped, from what is handed to it.

    Args:
        job: Of the worker's rank.
        loader: Of the job's data; all workers of a process may have the same one.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._job, self._loader, self._accumulator = job, loader, Accumulator(job)

    def gradient(self, batch: Range, replica: np.ndarray, grad: np.ndarray) -> Tasks[float]:
        """Have the gradient of a step computed; returns the mean loss.

        Args:
            batch: The samples.
            replica: What it is computed from, shape (n_params,).
            grad: Where it goes, likewise.
        """
        job = self._job
        submit(job, self._loader, batch)
        params = job.layout.views(replica, writable=False)
        batches, samples = taken(job, self._loader, batch), batch[2] - batch[1]
        args = params, batches, samples, job.layout.views(grad), grad
        loss = yield from self._accumulator.gradient(*args)
        if job.config.clip:
            trained = grad[: job.trained]
            scale(trained, clip_factor(sum_squares(trained), job.config.clip))
        return loss


class Here:
    """Computes a worker's gradients in this process.

    Args:
        job: Of the worker's rank.
        loader: Of the job's data.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._problem, self._computer, self._draws = job.problem, Computer(job, loader), Draws()

    def compute(self, batch: Range, replica: np.ndarray, grad: np.ndarray) -> Computed:
        """Compute a gradient; see `Computer.gradient`."""
        with self._draws.own():
            return Computed(follow(self._problem, self._computer.gradient(batch, replica, grad)))

    def end(self) -> None:
        """Nothing is to be ended."""
