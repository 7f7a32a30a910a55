"""Gradients of steps that are larger than a batch: read, computed and added batch by batch."""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.ledger import Range, pieces
from mpips.kernels.vectors import add_scaled
from mpips.problems.evaluation import Arrays, gradient

if TYPE_CHECKING:
    from mpips.datasets import Batch
    from mpips.datasets.loader import Loader
    from mpips.planning.job import Job


class Accumulator:
    """Computes the gradient of a step, the mean over the samples of all its batches.

    Equation: ``g = sum_i (n_i / n) g_i``, which is the gradient of one batch of all n samples.
    Takes one more vector of the model's size from the first step on that has several batches: in
    any mode this may be a step that is left from a run in rounds, which is resumed in another mode.

    Attributes:
        compute_s: Seconds in the problem and in adding, without those of reading.
    """

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._other, self._views = np.zeros(0, job.dtype), dict[str, np.ndarray]()
        self._checked = False
        self.compute_s = 0.0

    def gradient(
        self, params: Arrays, batches: "Iterable[Batch]", samples: int, out: Arrays,
        flat: np.ndarray,
    ) -> float:  # fmt: skip
        """Compute the gradient of a step into `out`, views of `flat`.

        Args:
            params: The parameters that it is computed from.
            batches: The step's batches; one is held at a time.
            samples: Samples in all of them.
            out: Where the gradient goes.
            flat: The vector behind `out`, shape (n_params,).

        Returns:
            The mean loss over the samples; not finite if that of any batch is not.

        Raises:
            UserError: If a batch cannot be read, a loss is no number, or the first gradient is
                not wholly written.
        """
        mean, keep = 0.0, 0.0
        for batch in batches:
            start = time.perf_counter()
            weight = len(batch) / samples
            if not keep:
                loss = gradient(self._job, params, batch, out, flat, not self._checked)
                self._checked, keep = True, weight  # applied with the second, which saves a pass
            else:
                self._make_room()
                loss = gradient(self._job, params, batch, self._views, self._other, False)
                add_scaled(flat, keep, self._other, weight)
                keep = 1.0
            mean += weight * loss
            self.compute_s += time.perf_counter() - start
            self._job.begun = True
        return mean

    def _make_room(self) -> None:
        layout = self._job.layout
        if self._other.size < layout.size:
            self._other = np.zeros(layout.size, self._job.dtype)
            self._views = layout.views(self._other)


def submit(job: "Job", loader: "Loader", step: Range) -> None:
    """Ask for the batches of a step. Blocks: no."""
    for piece in pieces(step, job.config.batch_size):
        loader.submit(*piece)


def taken(job: "Job", loader: "Loader", step: Range) -> "Iterator[Batch]":
    """Yield the batches of a step that was submitted; waits for each when it is asked for."""
    for _ in pieces(step, job.config.batch_size):
        yield loader.take()
