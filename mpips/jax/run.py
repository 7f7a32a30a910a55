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
    evaluation,
    loss_alone,
    value_and_grad,
)
from mpips.library import run as library
from mpips.library.data import Samples
from mpips.library.worker import Worker
from mpips.problems.base import Arrays


@dataclasses.dataclass(frozen=True)
class Result(library.Result):
    """What a run leaves, on every rank: as `mpips.Result`, but with parameters as a pytree.

    Attributes:
        params: The parameters at the end, a pytree like the one that was given.
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
        loss: ``loss(params, x, y)`` returns the mean loss over a batch; ``loss(params, x)`` where
            the data is one array or a mapping of names to arrays, ``loss(params, ids)`` where it
            is a number of samples. It is traced by JAX.
        params: Initial parameters: a pytree of floating-point arrays, of the same shapes on every
            rank.
        data: The samples: an array, a pair (x, y) of arrays, a mapping of names to arrays, or the
            number of samples; the same on every worker. Or a function that returns such: it is
            called on workers alone.
        optimizer: As in `mpips.run`; or one of optax, such as ``optax.adamw(1e-3)``, which
            `rule_of` reads.
        evaluate: Called as `loss`, it returns means over a batch of held-out samples by name,
            ``loss`` among them; by default the loss alone.
        held_out: Samples that are evaluated, as in `mpips.run`.
        **options: As in `mpips.run`: ``mode="ssp"``, ``batch_size=64``, ``epochs=5``; and `comm`.

    Returns:
        The result, on every rank.

    Raises:
        UserError: As `mpips.run`; if a leaf is none of floating-point numbers.

    Collective: yes, over `comm`. Blocks: until the run is over.
    """
    if not callable(loss):
        raise UserError(f"loss of type {type(loss).__name__}", "a function of params, x and y")
    gradient, like = value_and_grad(loss, params), Leaves(params)
    if callable(getattr(optimizer, "update", None)):
        optimizer = rule_of(optimizer, params)
    if evaluate is None and held_out is not None:
        evaluate = functools.partial(loss_alone, loss)
    means = None if evaluate is None else evaluation(evaluate, params)

    @functools.wraps(loss)  # the run is called after it
    def train(worker: Worker) -> None:
        samples = data() if callable(data) else data
        size = options.get("batch_size", OPTIONS["batch_size"].default)
        with contextlib.suppress(UserError):  # `batches` tells it, on all ranks alike
            _compile(like.arrays(), Samples(samples), size, gradient, means)
        for batch in worker.batches(samples):
            worker.step(gradient, batch)

    found = library.run(
        train, like.arrays(), optimizer, evaluate=means, held_out=held_out, **options
    )
    return Result(**{**vars(found), "params": like.tree(found.params)})


def _compile(
    params: Arrays, samples: Samples, size: int, gradient: Gradient, means: Evaluate | None
) -> None:
    """Have a gradient compiled for batches of that size and an epoch's last, and what evaluates.

    It takes seconds: a gradient that waited for it would be as many updates old.
    """
    whole = min(size, samples.n)
    for count in {whole, samples.n % size} - {0}:
        ids = np.arange(count)
        batch = Batch(*samples.read(ids), ids)
        gradient(params, batch, {name: array.copy() for name, array in params.items()})
        if means is not None and count == whole:  # as `batches` tries it
            means(params, batch)
