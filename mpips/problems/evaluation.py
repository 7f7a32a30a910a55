"""Evaluation of parameters on held-out samples, in additive parts."""

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


def evaluate(
    job: "Job", params: Arrays, begin: int, end: int, rows: RowReads | None = None
) -> dict[str, float]:
    """Evaluate the held-out samples ``[begin, end)``; a worker's part, not collective.

    Args:
        job: The run.
        params: The parameters.
        begin: The first sample.
        end: The one behind the last.
        rows: What reads rows of tables, if not the job's own way, which needs servers.

    Returns:
        The sum over the samples of each metric of the problem; nothing for an empty range.

    Raises:
        UserError: If the samples cannot be read, or not all batches have the same metrics.
    """
    assert job.dataset is not None, "servers read no data"
    assert job.dataset.test is not None, "no sample is held out"
    batches = iterate(job.dataset.test, begin, end, CHUNK, job.dtype)
    return metric_sums(batches, evaluation(job.problem, params, rows or job.rows))


def metric_sums(
    batches: "Iterable[Batch]", evaluate: "Callable[[Batch], Mapping[str, float]]"
) -> dict[str, float]:
    """Return the sum over the samples of each metric, of which `evaluate` gives a batch's means.

    Raises:
        UserError: If not all batches have the same metrics, or one is no number.
    """
    parts: dict[int, dict[str, float]] = {}
    for batch in batches:
        found = checked_metrics(evaluate(batch))
        parts[int(batch.ids[0])] = {k: float(value) * len(batch) for k, value in found.items()}
    return add_up(parts, "held-out sample", "the same metrics for every batch")


def add_up(parts: Mapping[int, Mapping[str, float]], what: str, expected: str) -> dict[str, float]:
    """Return the sum of each metric over the parts that have any.

    Args:
        parts: Sums by metric, by the number of what they are of.
        what: That it is the number of: rank, say.
        expected: What is expected of all parts.

    Raises:
        UserError: If a metric is in some of the parts only.
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
            raise UserError(got, expected, f"return {name!r} always, NaN perhaps, or never")
    names = next(iter(known.values()), {})
    return {name: sum(part[name] for part in known.values()) for name in sorted(names)}


def mean_evaluation(job: "Job", parts: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the mean of each metric over the held-out samples, from the workers' sums.

    Raises:
        UserError: If a metric is some workers' only.
    """
    by_rank = dict(zip(job.cluster.roles.workers, (part or {} for part in parts), strict=True))
    sums = add_up(by_rank, "rank", "the same metrics on every rank")
    return {name: value / job.info.n_test for name, value in sums.items()}


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
    """Return what a problem's ``evaluate`` gave, of arrays and tensors without a dimension numbers.

    Raises:
        UserError: If it is not a mapping of names to numbers, ``loss`` among them.
    """
    expected = 'a dictionary of numbers, such as {"loss": 0.5, "accuracy": 0.9}'
    got = f"evaluate of the problem returned {str(value)[:60]}"
    if not isinstance(value, Mapping):
        raise UserError(got, expected)
    if "loss" not in value:
        raise UserError(f"{got}, without 'loss'", expected, "add the mean loss under that name")
    found = {}
    for name, given in value.items():
        apart = np.ndim(given) == 0 and hasattr(given, "item")  # of NumPy, JAX or PyTorch
        found[name] = given.item() if apart else given
        if not isinstance(found[name], (int, float)):
            got = f"evaluate of the problem returned {type(given).__name__} for {name!r}"
            if np.ndim(given):
                got += f" of shape {np.shape(given)}"
            raise UserError(got, expected)
    return found


def try_evaluation(job: "Job", params: Arrays) -> None:
    """Evaluate a few held-out samples: else a mistake there would end the run after its epoch.

    Raises:
        UserError: If the problem has not the metrics that the run needs.
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
    """Check that a first gradient, in a vector of NaN, was written whole.

    Raises:
        UserError: If an element was not although the loss is finite.
    """
    missing = [name for name, grad in layout.views(flat).items() if np.isnan(grad).any()]
    if missing and math.isfinite(loss):
        where = f"out[{missing[0]!r}]"
        got, remedy = (
            f"loss_and_grad of the problem left NaN in {where}",
            f"write in place: {where}",
        )
        raise UserError(got, "the mean gradient in every element", f"{remedy}[...] = gradient")


def next_evaluation(epoch: float, every: float) -> float:
    """Return the first multiple of `every` epochs after `epoch`; infinity if `every` is 0.

    A resumed run evaluates where an uninterrupted one would.
    """
    return (math.floor(epoch / every) + 1) * every if every else math.inf


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range ``[begin, end)`` of `samples` that part number `part` evaluates."""
    return part * samples // parts, (part + 1) * samples // parts
