"""Evaluation of parameters on held-out samples, in parts that can be added up."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.datasets.base import iterate
from mpips.delay import linger
from mpips.errors import UserError

if TYPE_CHECKING:
    from mpips.datasets import Batch
    from mpips.job import Job

CHUNK = 1024
Arrays = Mapping[str, np.ndarray]


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
        for name, value in checked_metrics(job.problem.evaluate(params, batch)).items():
            sums[name] = sums.get(name, 0.0) + (float(value) * weight if weight else 0.0)
    return sums


def checked_loss(value: Any) -> float:
    """Return what a problem's ``loss_and_grad`` gave as a number.

    Raises:
        UserError: If it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        got = f"loss_and_grad of the problem returned {type(value).__name__}"
        raise UserError(got, "a number, the mean loss over the batch") from None


def checked_metrics(value: Any) -> Mapping[str, float]:
    """Return what a problem's ``evaluate`` gave.

    Raises:
        UserError: If it is not a mapping of names to numbers, ``loss`` among them.
    """
    expected = 'a dictionary of numbers, such as {"loss": 0.5, "accuracy": 0.9}'
    got = f"evaluate of the problem returned {str(value)[:60]}"
    if not isinstance(value, Mapping):
        raise UserError(got, expected)
    if "loss" not in value:
        raise UserError(f"{got}, without 'loss'", expected, "add the mean loss under that name")
    for name, number in value.items():
        if np.ndim(number) or not isinstance(number, (int, float, np.number)):
            got = f"evaluate of the problem returned {type(number).__name__} for {name!r}"
            raise UserError(got, expected)
    return value


def gradient(
    job: "Job", params: Arrays, batch: "Batch", out: Arrays, flat: np.ndarray, first: bool
) -> float:
    """Compute a worker's gradient into `out`, views of `flat`; returns the mean loss.

    A worker of ``--inject-delay`` takes so many times as long.

    Raises:
        UserError: If the loss is no number, or a worker's first gradient is not wholly written.
    """
    start = time.perf_counter()
    if first:
        loss = first_gradient(job, params, batch, out, flat)
    else:
        loss = checked_loss(job.problem.loss_and_grad(params, batch, out))
    if job.delay > 1:
        linger((job.delay - 1) * (time.perf_counter() - start), job.cluster.progress)
    return loss


def first_gradient(
    job: "Job", params: Arrays, batch: "Batch", out: Arrays, flat: np.ndarray
) -> float:
    """Compute a worker's first gradient, and check that the problem wrote all of it.

    What it is evaluated by is tried on the same batch: else a mistake there would end the run
    after its first epoch.

    Raises:
        UserError: If an element of `out` was not written although the loss is finite; if the
            problem has not the metrics that the run needs.
    """
    if job.info.n_test:
        metrics = checked_metrics(job.problem.evaluate(params, batch))
        if job.config.target_accuracy and "accuracy" not in metrics:
            got = (
                f"target_accuracy {job.config.target_accuracy}: evaluate gives {', '.join(metrics)}"
            )
            raise UserError(got, "'accuracy' as well", "leave out --target-accuracy")
    flat[:] = np.nan
    loss = checked_loss(job.problem.loss_and_grad(params, batch, out))
    views = job.layout.views(flat)
    missing = [name for name, grad in views.items() if np.isnan(grad).any()]
    if missing and math.isfinite(loss):
        raise UserError(
            f"loss_and_grad of the problem left NaN in out[{missing[0]!r}]",
            "the mean gradient in every element",
            f"write in place: out[{missing[0]!r}][...] = gradient",
        )
    return loss


def next_evaluation(epoch: float, every: float) -> float:
    """Return the first multiple of `every` epochs after `epoch`; infinity if `every` is 0.

    A resumed run evaluates where an uninterrupted one would.
    """
    return (math.floor(epoch / every) + 1) * every if every else math.inf


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range ``[begin, end)`` of `samples` that part number `part` evaluates."""
    return part * samples // parts, (part + 1) * samples // parts
