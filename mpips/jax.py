"""JAX: `run` trains the parameters of a loss function; the rest is for loops of one's own.

    import mpips
    import mpips.jax as mj

    def loss(params, x, y):
        return ((x @ params["w"] + params["b"] - y) ** 2).mean()

    params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    result = mj.run(loss, params, (x, y), mpips.Adam(1e-3), mode="async", batch_size=64, epochs=5)
    result.params["w"]

The loss and its gradient are compiled once for each size of batch: a last one that is smaller
compiles a second time. Leaves of any floating type are trained as float32 (float64 where
``jax_enable_x64`` is on), and the loss has them in their own type.

On a CPU, XLA reads the parameters where they lie, without a copy, if they begin on 64 bytes: so
leaves of a multiple of 16 elements are kept first, one behind the other. Parameters change at the
next step, and XLA computes in threads of its own: `value_and_grad` waits until all is computed. The
gradient is copied once, to where it is pushed from.

XLA computes in one thread for each core of this rank's share, if this module is imported before
JAX is used, and the variable ``NPROC`` does not say otherwise.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from mpips.cluster.start import cores, local_ranks
from mpips.config import OPTIONS
from mpips.datasets import Batch
from mpips.errors import UserError
from mpips.library import run as library
from mpips.library.data import Samples
from mpips.library.model import Evaluate
from mpips.library.optimizers import Optimizer
from mpips.library.worker import Gradient, Worker
from mpips.problems.base import Arrays

try:
    import jax
    import jax.numpy as jnp
except ImportError as problem:
    got = f"no JAX ({problem})"
    raise UserError(got, "jax >= 0.4.30", "pip install 'mpips[jax]'") from problem

__all__ = ["Result", "arrays", "evaluation", "run", "tree", "value_and_grad"]

os.environ.setdefault("NPROC", str(max(1, cores() // local_ranks())))  # as XLA counts them

PyTree: TypeAlias = Any
LINE = 64  # bytes: where a vector begins that XLA shares
WHOLE = LINE // 4  # elements of the smallest type that fill it


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
    optimizer: Optimizer | None = None,
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
        optimizer: As in `mpips.run`.
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
    gradient, like = value_and_grad(loss, params), _Leaves(params)
    if evaluate is None and held_out is not None:
        evaluate = functools.partial(_loss_alone, loss)
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
    return Result(like.tree(found.params), found.summary, found.reason, found.code, found.out)


def value_and_grad(loss: Callable[..., Any], params: PyTree) -> Gradient:
    """Return the gradient of a loss for a loop of one's own.

        gradient = mj.value_and_grad(loss, params)

        def train(worker):
            for batch in worker.batches((x, y), batch_size=64, epochs=5):
                value = worker.step(gradient, batch)

        result = mpips.run(train, mj.arrays(params), mpips.Adam(1e-3))

    Args:
        loss: As in `run`.
        params: A pytree like the parameters.

    Returns:
        A function ``gradient(params, batch, out)`` of named arrays and a worker's batch: it writes
        the gradient into `out`, and returns the loss. It has ended when it returns, so that the
        parameters may change then.

    Raises:
        UserError: If a leaf is none of floating-point numbers.
    """
    like = _Leaves(params)

    @jax.jit
    def compute(leaves: list[Any], columns: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        found: tuple[Any, list[Any]] = jax.value_and_grad(
            lambda leaves: loss(like.build(leaves), *columns)
        )(leaves)
        return found

    def gradient(params: Arrays, batch: Batch, out: Arrays) -> float:
        found = compute([params[name] for name in like.names], _columns(batch))
        value, grads = jax.block_until_ready(found)
        for name, grad in zip(like.names, grads, strict=True):
            np.copyto(out[name], np.asarray(grad))  # its memory as it is, where XLA is on a CPU
        return float(value)

    return gradient


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


def evaluation(metrics: Callable[..., Mapping[str, Any]], params: PyTree) -> Evaluate:
    """Return what evaluates held-out samples for `mpips.run` and `mpips.Worker.evaluate`.

    Args:
        metrics: As `evaluate` in `run`.
        params: A pytree like the parameters.

    Returns:
        A function of named arrays and a batch.
    """
    like = _Leaves(params)

    @jax.jit
    def compute(leaves: list[Any], columns: tuple[Any, ...]) -> Any:
        return metrics(like.build(leaves), *columns)

    def evaluate(params: Arrays, batch: Batch) -> dict[str, float]:
        found = compute([params[name] for name in like.names], _columns(batch))
        if not isinstance(found, Mapping):
            got = f"evaluate that returned {type(found).__name__}"
            raise UserError(got, 'a dictionary of numbers, such as {"loss": loss}')
        return {name: float(value) for name, value in found.items()}

    return evaluate


def arrays(params: PyTree) -> dict[str, np.ndarray]:
    """Return a pytree's leaves by their paths, such as ``layers/0/w``: parameters for `mpips.run`.

    Raises:
        UserError: If a leaf is none of floating-point numbers.
    """
    return _Leaves(params).arrays()


def tree(arrays: Arrays, like: PyTree) -> PyTree:
    """Return named arrays, such as those of `mpips.Result`, as a pytree; they are copied.

    Args:
        arrays: By name, as `arrays` names them.
        like: A pytree of that structure.
    """
    return _Leaves(like).tree(arrays)


class _Leaves:
    """The leaves of a pytree by name, and the way back.

    Attributes:
        names: Of all leaves, in JAX's order.
    """

    def __init__(self, params: PyTree) -> None:
        found, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self.names = ["/".join(map(_word, path)) or "params" for path, _ in found]
        self._leaves = [np.asarray(leaf) for _, leaf in found]
        for k, (name, leaf) in enumerate(zip(self.names, self._leaves, strict=True)):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                got = f"params[{name!r}] of dtype {leaf.dtype}"
                raise UserError(got, "floating-point numbers", "keep what is not trained elsewhere")
            if name in self.names[:k]:
                raise UserError(f"two leaves called {name!r}", "names that differ")
        self._dtypes = [jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in self._leaves]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the leaves by name, those first that leave the next one where XLA shares it."""
        kept = {
            name: leaf.astype(np.promote_types(dtype, np.float32), copy=False)
            for name, leaf, dtype in zip(self.names, self._leaves, self._dtypes, strict=True)
        }
        return {
            name: kept[name] for name in sorted(kept, key=lambda name: kept[name].size % WHOLE > 0)
        }

    def build(self, leaves: list[Any]) -> PyTree:
        """Return a pytree of leaves, each in the type that was given."""
        typed = [leaf.astype(dtype) for leaf, dtype in zip(leaves, self._dtypes, strict=True)]
        return jax.tree_util.tree_unflatten(self._structure, typed)

    def tree(self, named: Arrays) -> PyTree:
        """Return a pytree of copies of named arrays."""
        return self.build([jnp.array(named[name]) for name in self.names])


def _word(key: Any) -> str:
    """Return a step of a leaf's path: a key, an index, or an attribute's name."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _columns(batch: Batch) -> tuple[Any, ...]:
    """Return what a loss is given of a batch."""
    if isinstance(batch.x, list):
        expected = "arrays: one, a pair (x, y), or a mapping of names to such"
        raise UserError("data that is a sequence of samples", expected, "stack them, for JAX")
    if batch.x is None:
        return (batch.ids,)
    return (batch.x,) if batch.y is None else (batch.x, batch.y)


def _loss_alone(loss: Callable[..., Any], *args: Any) -> dict[str, Any]:
    return {"loss": loss(*args)}
