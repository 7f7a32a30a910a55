"""Evaluation on held-out samples, in parts whose metrics are summed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.datasets.base import iterate
from mpips.errors import UserError, listed
from mpips.layout import Layout
from mpips.problems.base import Arrays
from mpips.problems.rows import RowReads, evaluation

if TYPE_CHECKING:
    from mpips.datasets import Batch
    from mpips.planning.job import Job

CHUNK = 1024
SHOWN = 8  # numbers in a message
ROUNDING = 1e-9  # tolerance in epochs, or in distances of evaluations


def evaluate(
    job: "Job", params: Arrays, begin: int, end: int, rows: RowReads | None = None
) -> dict[str, float]:
    """Evaluate the held-out samples ``[begin, end)``, a worker's part. Collective: no.

    Args:
        job: The run.
        params: The parameters.
        begin: First sample.
        end: One past the last sample.
        rows: Reader of table rows; by default the job's, which asks the servers.

    Returns:
        The sum over the samples of each metric of the problem; empty for an empty range.

    Raises:
        UserError: If the samples cannot be read, or batches differ in their metrics.
    """
    assert job.dataset is not None, "servers read no data"
    assert job.dataset.test is not None, "no sample is held out"
    batches = iterate(job.dataset.test, begin, end, CHUNK, job.dtype)
    return metric_sums(batches, evaluation(job.problem, params, rows or job.rows))


def metric_sums(
    batches: "Iterable[Batch]", evaluate: "Callable[[Batch], Mapping[str, float]]"
) -> dict[str, float]:
    """Return the sum of each metric over the samples of all batches.

    Args:
        batches: The batches.
        evaluate: Returns the means of the metrics over a batch.

    Raises:
        UserError: If batches differ in their metrics, or one is not a number.
    """
    parts: dict[int, dict[str, float]] = {}
    for batch in batches:
        found = checked_metrics(evaluate(batch))
        parts[int(batch.ids[0])] = {k: float(value) * len(batch) for k, value in found.items()}
    return add_up(parts, "held-out sample", "the same metrics for every batch")


def add_up(parts: Mapping[int, Mapping[str, float]], what: str, expected: str) -> dict[str, float]:
    """Return the sum of each metric over all parts; parts without metrics are ignored.

    Args:
        parts: Sums by metric, by the number of the part.
        what: Noun for the number of a part, such as ``"rank"``, for messages.
        expected: Condition that all parts must meet, for messages.

    Raises:
        UserError: If only some of the parts have a metric.
    """
    known = {number: part for number, part in parts.items() if part}
    for name in sorted({name for part in known.values() for name in part}):
        having = [number for number, part in known.items() if name in part]
        if len(having) < len(known):
            without = [number for number in known if number not in having]
            some, others = (
                f"{what}{'s' * (len(numbers) > 1)} {listed(numbers, SHOWN)}"
                for numbers in (having, without)
            )
            got = f"evaluate of the problem gave {name!r} at {some} and not at {others}"
            raise UserError(got, expected, f"return {name!r} always (NaN if undefined), or never")
    names = next(iter(known.values()), {})
    return {name: sum(part[name] for part in known.values()) for name in sorted(names)}


def mean_evaluation(job: "Job", parts: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the mean of each metric over the held-out samples, from the workers' sums.

    Raises:
        UserError: If only some of the workers have a metric.
    """
    by_rank = dict(zip(job.cluster.roles.workers, (part or {} for part in parts), strict=True))
    sums = add_up(by_rank, "rank", "the same metrics on every rank")
    return {name: value / job.info.n_test for name, value in sums.items()}


def checked_loss(value: Any) -> float:
    """Return the result of a problem's ``loss_and_grad`` as a number.

    Raises:
        UserError: If it is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        got = f"loss_and_grad of the problem returned {type(value).__name__}"
        raise UserError(got, "a number, the mean loss over the batch") from None


def checked_metrics(value: Any) -> Mapping[str, float]:
    """Return the metrics of a problem's ``evaluate``, with scalar arrays and tensors as numbers.

    Raises:
        UserError: If it is not a mapping of names to numbers, ``loss`` among them.
    """
    expected = 'a dictionary of numbers, such as {"loss": 0.5, "accuracy": 0.9}'
    got = f"evaluate of the problem returned {str(value)[:60]}"
    if not isinstance(value, Mapping):
        raise UserError(got, expected)
    if "loss" not in value:
        raise UserError(f"{got}, without 'loss'", expected, "add the mean loss under that name")
    metrics = {}
    for name, metric in value.items():
        scalar = np.ndim(metric) == 0 and hasattr(metric, "item")  # of NumPy, JAX or PyTorch
        metrics[name] = metric.item() if scalar else metric
        if not isinstance(metrics[name], (int, float)):
            got = f"evaluate of the problem returned {type(metric).__name__} for {name!r}"
            if np.ndim(metric):
                got += f" of shape {np.shape(metric)}"
            raise UserError(got, expected)
    return metrics


def try_evaluation(job: "Job", params: Arrays) -> None:
    """Evaluate a few held-out samples, to find a mistake before the first epoch ends.

    Raises:
        UserError: If the problem lacks a metric that the run needs; and as `checked_metrics`.
    """
    if not job.info.n_test:
        return
    assert job.dataset is not None, "this is a worker"
    assert job.dataset.test is not None, "samples are held out"
    few = min(job.info.n_test, job.config.batch_size)
    batch = next(iterate(job.dataset.test, 0, few, few, job.dtype))
    metrics = checked_metrics(evaluation(job.problem, params, job.rows)(batch))
    if job.config.target_accuracy and "accuracy" not in metrics:
        got = f"target_accuracy {job.config.target_accuracy}: evaluate gives {', '.join(metrics)}"
        raise UserError(got, "'accuracy' as well", "leave out --target-accuracy")


def check_written(layout: Layout, flat: np.ndarray, loss: float) -> None:
    """Check that the first gradient was written completely.

    Args:
        layout: Layout of the gradient.
        flat: Gradient, shape (n_params,); it was NaN before the problem wrote it.
        loss: Loss of the same batch.

    Raises:
        UserError: If an element is NaN though the loss is finite.
    """
    missing = [name for name, grad in layout.views(flat).items() if np.isnan(grad).any()]
    if missing and math.isfinite(loss):
        got = f"the first gradient has NaN in {missing[0]!r}, at a loss of {loss:.6g}"
        remedy = "write all of it in place, by [...] = gradient; or look for 0/0 in its computation"
        raise UserError(got, "a number in every element", remedy)


def next_evaluation(epoch: float, every: float) -> float:
    """Return the first multiple of `every` epochs after `epoch`; infinity if `every` is 0.

    So a resumed run evaluates at the same epochs as an uninterrupted one. Multiples of a decimal
    number are rounded to it: 3 * 0.1 is more than 0.3.
    """
    return round((math.floor(epoch / every + ROUNDING) + 1) * every, 9) if every else math.inf


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range ``[begin, end)`` of `samples` that part number `part` evaluates."""
    return part * samples // parts, (part + 1) * samples // parts
