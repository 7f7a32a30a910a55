"""Evaluation of parameters on held-out samples, in parts that can be added up."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.base import iterate

if TYPE_CHECKING:
    from mpips.job import Job

CHUNK = 1024


def evaluate(
    job: "Job", params: Mapping[str, np.ndarray], begin: int, end: int
) -> dict[str, float]:
    """Evaluate the held-out samples ``[begin, end)``; a worker's part, not collective.

    Returns:
        The sum over the samples of each metric of the problem; zeroes for an empty range, so
        that every worker knows the names.

    Raises:
        UserError: If the samples cannot be read.
    """
    assert job.dataset is not None, "servers read no data"
    assert job.dataset.test is not None, "no sample is held out"
    sums: dict[str, float] = {}
    first, last = (begin, end) if end > begin else (0, 1)
    for batch in iterate(job.dataset.test, first, last, CHUNK, job.dtype):
        weight = len(batch) if end > begin else 0
        for name, value in job.problem.evaluate(params, batch).items():
            sums[name] = sums.get(name, 0.0) + (float(value) * weight if weight else 0.0)
    return sums


def next_evaluation(epoch: float, every: float) -> float:
    """Return the first multiple of `every` epochs after `epoch`; infinity if `every` is 0.

    A resumed run evaluates where an uninterrupted one would.
    """
    return (math.floor(epoch / every) + 1) * every if every else math.inf


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range ``[begin, end)`` of `samples` that part number `part` evaluates."""
    return part * samples // parts, (part + 1) * samples // parts
