"""`mpips.jax.run`: one run of a loss function."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpips.config import OPTIONS
from mpips.datasets import Batch
from mpips.errors import UserError
from mpips.jax.optax_rules import rule_of
from mpips.jax.trees import (
    Evaluate,
    Gradient,
    Leaves,
    PyTree,
    arrays,
    evaluation,
    loss_alone,
    value_and_grad,
)
from mpips.library import run as library
from mpips.library.data import Samples
from mpips.library.optimizers import Optimizer
from mpips.library.worker import Worker
from mpips.problems.base import Arrays


@dataclasses.dataclass(frozen=True)
class Result(library.Result):
    """Result of a run, on every rank: as `mpips.Result`, but with parameters as a pytree.

    Attributes:
        params: The final parameters, a pytree like the given one.
    """

    params: PyTree


def run(
    loss: Callable[..., Any],
    params: PyTree,
    data: Any,
    optimizer: Any = None,
    *,
    evaluate: Callable[..., Mapping[str, Any]] | None = None,
    held_out: Any = None,
    **options: Any,
) -> Result:
    """Train the parameters of a loss function.

    Args:
        loss: ``loss(params, x, y)`` returns the mean loss over a batch. It is ``loss(params, x)``
            if the data is one array or a mapping of names to arrays, and ``loss(params, ids)`` if
            it is a number of samples. JAX traces it.
        params: Initial parameters: a pytree of floating-point arrays, of the same shapes on every
            rank.
        data: The samples, the same on every worker: an array, a pair (x, y) of arrays, a mapping of
            names to arrays, or the number of samples. Or a function that returns them; only
            workers call it.
        optimizer: See `mpips.run`; or an optimizer of optax, such as ``optax.adamw(1e-3)``, which
            `rule_of` reads.
        evaluate: Function of the arguments of `loss` that returns means over a batch of held-out
            samples by name, ``loss`` among them; by default only the loss.
        held_out: Samples that are evaluated; see `mpips.run`.
        **options: See `mpips.run`: ``mode="ssp"``, ``batch_size=64``, ``epochs=5``; also `comm`.

    Returns:
        The result, on every rank.

    Raises:
        UserError: As `mpips.run`; if a leaf does not have floating-point numbers.

    Collective: yes, over `comm`. Blocks: until the run has ended.
    """
    if not callable(loss):
        raise UserError(f"loss of type {type(loss).__name__}", "a function of params, x and y")
    gradient, like = value_and_grad(loss, params), Leaves(params)
    if callable(getattr(optimizer, "update", None)) and not isinstance(optimizer, Optimizer):
        optimizer = rule_of(optimizer, params)
    if evaluate is None and held_out is not None:
        evaluate = functools.partial(loss_alone, loss)
    means = None if evaluate is None else evaluation(evaluate, params)

    @functools.wraps(loss)  # gives the run its name
    def train(worker: Worker) -> None:
        samples = data() if callable(data) else data
        size = options.get("batch_size", OPTIONS["batch_size"].default)
        with contextlib.suppress(UserError):  # `batches` raises it again, on all ranks alike
            _compile(arrays(params), Samples(samples), size, gradient, means)
        for batch in worker.batches(samples):
            worker.step(gradient, batch)

    result = library.run(
        train, arrays(params), optimizer, evaluate=means, held_out=held_out, **options
    )
    return Result(**{**vars(result), "params": like.tree(result.params)})


def _compile(
    params: Arrays, samples: Samples, size: int, gradient: Gradient, means: Evaluate | None
) -> None:
    """Compile a gradient for whole batches and an epoch's last one, and the evaluation.

    Compilation takes seconds. In the loop, it would make the first gradient as many updates old.
    """
    whole = min(size, samples.n)
    for count in {whole, samples.n % size} - {0}:
        ids = np.arange(count)
        batch = Batch(*samples.read(ids), ids)
        gradient(params, batch, {name: array.copy() for name, array in params.items()})
        if means is not None and count == whole:  # `batches` tries it on so many samples
            means(params, batch)
