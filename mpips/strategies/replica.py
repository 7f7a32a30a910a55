"""Replica of a worker, trained locally between two exchanges."""

import math
import time
from collections.abc import Iterable

import numpy as np

from mpips.datasets import Batch
from mpips.kernels.vectors import scale, sum_squares
from mpips.optim import Part, Slots, clip_factor
from mpips.planning.job import Job
from mpips.problems.accumulate import Accumulator, Tasks


class Replica:
    """Parameters and slots of one worker, updated by the job's rule.

    Args:
        job: The run.
        params: The parameters, shape (n_params,); updated in place.
        slots: One vector for each slot of the rule, shape (n_params,); updated in place.

    Attributes:
        busy_s: Seconds spent in computing and applying gradients.
    """

    def __init__(self, job: Job, params: np.ndarray, slots: tuple[np.ndarray, ...]) -> None:
        self.params, self.slots = params, slots
        self._job, self._max_norm = job, job.config.clip
        self._views = job.layout.views(params, writable=False)
        self._grad = np.zeros_like(params)
        self._parts = self._cut()
        self._out = job.layout.views(self._grad)
        self._accumulator = Accumulator(job)
        self.busy_s = 0.0

    def _cut(self) -> list[tuple[Part, np.ndarray, np.ndarray, Slots]]:
        found = []
        for part in self._job.leaving.rule.parts(0, self.params.size):
            at = slice(part.begin, part.end)
            of_part = tuple(slot[at] for slot in self.slots)
            found.append((part, self.params[at], self._grad[at], of_part))
        return found

    def step(
        self, batches: "Iterable[Batch]", samples: int, number: int, lr: float
    ) -> Tasks[float]:
        """Make one local step; with `clip`, the gradient is clipped by its norm.

        Args:
            batches: The step's batches.
            samples: Number of samples in all batches.
            number: Number of the step, from 1, for the update rule.
            lr: Learning rate, without the factor that the user's program has set.

        Returns:
            The mean loss before the step. If it is not finite, the step changes nothing.

        Raises:
            UserError: As `Accumulator.gradient`.
        """
        before = self._accumulator.compute_s
        args = self._views, batches, samples, self._out, self._grad
        loss = yield from self._accumulator.gradient(*args)
        start = time.perf_counter()
        if math.isfinite(loss):
            if self._max_norm:
                trained = self._grad[: self._job.trained]
                scale(trained, clip_factor(sum_squares(trained), self._max_norm))
            if self._job.leaving.leave(self._job.frozen):
                self._parts = self._cut()
            lr *= self._job.rate_factor
            for part, params, grad, slots in self._parts:
                part.rule.apply(params, grad, slots, number, lr * part.scale)
            self._job.leaving.count()
        self.busy_s += time.perf_counter() - start + self._accumulator.compute_s - before
        return loss
