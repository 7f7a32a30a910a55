"""Pytrees as named arrays, and losses of pytrees as problems."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

PyTree: TypeAlias = Any
Gradient: TypeAlias = Callable[[Arrays, Batch, Arrays], float]
Evaluate: TypeAlias = Callable[[Arrays, Batch], dict[str, float]]
LINE = 64  # bytes: where a vector begins that XLA shares
WHOLE = LINE // 4  # elements of the smallest type that fill it
TRIED = 2  # samples that a loss is tried on


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
        UserError: If a leaf is none of floating-point numbers; when it is called, if the loss
            returns no number.
    """
    like = Leaves(params)

    @jax.jit
    def compute(leaves: list[Any], columns: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        return jax.value_and_grad(lambda leaves: checked_loss(loss(like.build(leaves), *columns)))(
            leaves
        )

    def gradient(params: Arrays, batch: Batch, out: Arrays) -> float:
        found = compute([params[name] for name in like.names], _columns(batch))
        value, grads = jax.block_until_ready(found)
        for name, grad in zip(like.names, grads, strict=True):
            np.copyto(out[name], np.asarray(grad))  # its memory as it is, where XLA is on a CPU
        return float(value)

    return gradient


def checked_loss(found: Any) -> Any:
    """Return what a loss has returned, while it is traced.

    Raises:
        UserError: If it is no number.
    """
    dtype = getattr(found, "dtype", np.dtype(type(found) if np.isscalar(found) else object))
    if np.shape(found) or not jnp.issubdtype(dtype, jnp.floating):
        what = f"{dtype}{list(np.shape(found))}" if hasattr(found, "dtype") else repr(found)
        raise UserError(f"loss that returned {what}", "a number, the mean loss over the batch")
    return found


def evaluation(metrics: Callable[..., Mapping[str, Any]], params: PyTree) -> Evaluate:
    """Return what evaluates held-out samples for `mpips.run` and `mpips.Worker.evaluate`.

    Args:
        metrics: As `evaluate` in `run`.
        params: A pytree like the parameters.

    Returns:
        A function of named arrays and a batch, which returns means by name.

    Raises:
        UserError: If a leaf is none of floating-point numbers; when it is called, if `metrics`
            returns no mapping.
    """
    like = Leaves(params)

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

    Args:
        params: A pytree of floating-point arrays.

    Returns:
        NumPy arrays of the leaves' shapes, of at least float32.

    Raises:
        UserError: If a leaf is none of floating-point numbers.
    """
    return Leaves(params).arrays()


def tree(arrays: Arrays, like: PyTree) -> PyTree:
    """Return named arrays, such as those of `mpips.Result`, as a pytree; they are copied.

    Args:
        arrays: By name, as `arrays` names them.
        like: A pytree of that structure.

    Returns:
        JAX arrays in that structure, of its dtypes.
    """
    return Leaves(like).tree(arrays)


class Leaves:
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


def loss_alone(loss: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return what a loss is of a batch, as what evaluates it does."""
    return {"loss": loss(*args)}


class LossProblem(Problem):
    """A loss as the problem of a job, ``--problem net.py:loss``, with what its file has beside it.

    That is ``init(rng, data)``, which returns the initial parameters, and if there is one
    ``evaluate(params, x, y)``, which returns means over a batch by name, ``loss`` among them.

    Args:
        loss: ``loss(params, x, y)`` returns the mean loss over a batch. `x` is of shape
            (n, *x_shape); `y` is class numbers, shape (n,), or targets, shape (n, *y_shape).
        beside: Names of its file.
        data: What the dataset looks like.
        config: The run's configuration. In a job of float64 JAX computes in 64 bits.

    Raises:
        UserError: If a leaf is none of floating-point numbers, or the loss no number; what the
            user's code raises, as it is.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        beside: Mapping[str, Any],
        data: DataInfo,
        config: Config,
    ) -> None:
        super().__init__(data, config)
        if config.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        self._make = beside["init"]
        params = self._make(np.random.default_rng(config.seed), data)
        self.layout = Layout.of({name: array.shape for name, array in arrays(params).items()})
        like = jax.tree.map(_without_memory, params)
        self._gradient = value_and_grad(loss, like)
        means = beside.get("evaluate") or functools.partial(loss_alone, loss)
        self._evaluate = evaluation(means, like)
        self._rest = data.n_train % config.batch_size  # samples of an epoch's last batch
        self._try(loss, params)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that the file's ``init`` makes."""
        return arrays(self._make(rng, self.data))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient; see `Problem`.

        The first time it is compiled for an epoch's last batch too: a gradient that waited for that
        later would be as many updates old.
        """
        if 0 < self._rest < len(batch):
            n, self._rest = self._rest, 0
            self._gradient(params, Batch(batch.x[:n], batch.y[:n], batch.ids[:n]), out)
        return self._gradient(params, batch, out)

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return what the file's ``evaluate`` does, or the mean loss."""
        return self._evaluate(params, batch)

    def _try(self, loss: Callable[..., Any], params: PyTree) -> None:
        """Trace the loss, so that what is wrong is said on every rank; nothing is computed."""
        data, dtype = self.data, np.dtype(self.config.dtype)
        x = np.zeros((TRIED, *data.x_shape), dtype)
        y = np.zeros((TRIED, *data.y_shape), dtype if data.classes is None else np.int64)
        checked_loss(jax.eval_shape(loss, params, x, y))


def _without_memory(leaf: Any) -> np.ndarray:
    """Return an array of that shape and type: the parameters lie elsewhere."""
    return np.broadcast_to(np.zeros((), np.asarray(leaf).dtype), np.shape(leaf))
