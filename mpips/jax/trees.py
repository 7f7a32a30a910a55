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
LINE = 64  # alignment in bytes with which XLA shares a vector
WHOLE = LINE // 4  # number of elements of the smallest type in so many bytes
TRIED = 2  # samples of the trial batch


def value_and_grad(loss: Callable[..., Any], params: PyTree) -> Gradient:
    """Return the gradient of a loss, for a loop of your own.

        gradient = mj.value_and_grad(loss, params)

        def train(worker):
            for batch in worker.batches((x, y), batch_size=64, epochs=5):
                value = worker.step(gradient, batch)

        result = mpips.run(train, mj.arrays(params), mpips.Adam(1e-3))

    Args:
        loss: See `run`.
        params: A pytree like the parameters.

    Returns:
        A function ``gradient(params, batch, out)`` of named arrays and a worker's batch. It writes
        the gradient into `out` and returns the loss. XLA has finished when it returns, so that the
        parameters may change then.

    Raises:
        UserError: If a leaf does not have floating-point numbers. The gradient raises it if the
            loss does not return a number.
    """
    like = Leaves(params)

    @jax.jit
    def compute(leaves: list[Any], columns: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        return jax.value_and_grad(lambda leaves: checked_loss(loss(like.build(leaves), *columns)))(
            leaves
        )

    def gradient(params: Arrays, batch: Batch, out: Arrays) -> float:
        result = compute([params[name] for name in like.names], _columns(batch))
        value, grads = jax.block_until_ready(result)
        for name, grad in zip(like.names, grads, strict=True):
            np.copyto(out[name], np.asarray(grad))  # on a CPU a view of XLA's memory
        return float(value)

    return gradient


def checked_loss(value: Any) -> Any:
    """Return the traced value of a loss, after a check of its type.

    Raises:
        UserError: If it is not a number.
    """
    dtype = getattr(value, "dtype", np.dtype(type(value) if np.isscalar(value) else object))
    if np.shape(value) or not jnp.issubdtype(dtype, jnp.floating):
        what = f"{dtype}{list(np.shape(value))}" if hasattr(value, "dtype") else repr(value)
        raise UserError(f"loss that returned {what}", "a number, the mean loss over the batch")
    return value


def evaluation(metrics: Callable[..., Mapping[str, Any]], params: PyTree) -> Evaluate:
    """Return a function that evaluates samples, for `mpips.run` and `mpips.Worker.evaluate`.

    Args:
        metrics: See `evaluate` in `run`.
        params: A pytree like the parameters.

    Returns:
        A function of named arrays and a batch, which returns means by name.

    Raises:
        UserError: If a leaf does not have floating-point numbers. The returned function raises it
            if `metrics` does not return a mapping.
    """
    like = Leaves(params)

    @jax.jit
    def compute(leaves: list[Any], columns: tuple[Any, ...]) -> Any:
        return metrics(like.build(leaves), *columns)

    def evaluate(params: Arrays, batch: Batch) -> dict[str, float]:
        means = compute([params[name] for name in like.names], _columns(batch))
        if not isinstance(means, Mapping):
            got = f"evaluate that returned {type(means).__name__}"
            raise UserError(got, 'a dictionary of numbers, such as {"loss": loss}')
        return {n: mean if np.ndim(mean) else float(mean) for n, mean in means.items()}

    return evaluate


def arrays(params: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a pytree by path, such as ``layers/0/w``: parameters of `mpips.run`.

    Args:
        params: A pytree of floating-point arrays.

    Returns:
        NumPy arrays of the leaves' shapes, of float32 or float64.

    Raises:
        UserError: If a leaf does not have floating-point numbers.
    """
    like = Leaves(params)
    each = zip(like.names, jax.tree.leaves(params), like.dtypes, strict=True)
    by_name = {
        name: np.asarray(leaf).astype(np.promote_types(dtype, np.float32), copy=False)
        for name, leaf, dtype in each
    }
    # Leaves of whole cache lines come first, so that XLA shares them.
    return dict(sorted(by_name.items(), key=lambda item: item[1].size % WHOLE > 0))


def tree(arrays: Arrays, like: PyTree) -> PyTree:
    """Return named arrays, such as those of `mpips.Result`, as a pytree of copies.

    Args:
        arrays: Arrays by name, as the function `arrays` names them.
        like: A pytree of the same structure.

    Returns:
        JAX arrays in this structure, of its dtypes.
    """
    return Leaves(like).tree(arrays)


class Leaves:
    """Names and dtypes of the leaves of a pytree, and the conversion of arrays to such a pytree.

    Attributes:
        names: Names of all leaves, in JAX's order.
        dtypes: Their dtypes.
    """

    def __init__(self, params: PyTree) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self.names = ["/".join(map(_word, path)) or "params" for path, _ in leaves]
        given = [np.asarray(leaf).dtype for _, leaf in leaves]
        for k, (name, dtype) in enumerate(zip(self.names, given, strict=True)):
            if not jnp.issubdtype(dtype, jnp.floating):
                got = f"params[{name!r}] of dtype {dtype}"
                raise UserError(got, "floating-point numbers", "keep what is not trained elsewhere")
            if name in self.names[:k]:
                raise UserError(f"two leaves called {name!r}", "names that differ")
        self.dtypes = [jax.dtypes.canonicalize_dtype(dtype) for dtype in given]

    def build(self, leaves: list[Any]) -> PyTree:
        """Return a pytree of leaves, each in the dtype of the given one."""
        typed = [leaf.astype(dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True)]
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
    """Return the arguments of a loss from a batch.

    Raises:
        UserError: If the batch is a list of samples.
    """
    if isinstance(batch.x, list):
        expected = "arrays: one, a pair (x, y), or a mapping of names to such"
        raise UserError("data that is a sequence of samples", expected, "stack them, for JAX")
    if batch.x is None:
        return (batch.ids,)
    return (batch.x,) if batch.y is None else (batch.x, batch.y)


def loss_alone(loss: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return the loss of a batch as a mapping, as `evaluate` in `run` returns it."""
    return {"loss": loss(*args)}


class LossProblem(Problem):
    """A loss as the problem of a job, ``--problem net.py:loss``, with other functions of its file.

    The file has ``init(rng, data)``, which returns the initial parameters. It may have
    ``evaluate(params, x, y)``, which returns means over a batch by name, ``loss`` among them.

    Args:
        loss: ``loss(params, x, y)`` returns the mean loss over a batch. `x` is of shape
            (n, *x_shape). `y` has class numbers, shape (n,), or targets, shape (n, *y_shape).
        beside: Global names of the loss's file.
        data: Description of the dataset.
        config: The run's configuration. In a job of float64 JAX computes in 64 bits.

    Raises:
        UserError: If a leaf does not have floating-point numbers, or the loss does not return a
            number. Exceptions of the user's code propagate.
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
        self._gradient = value_and_grad(loss, params)
        means = beside.get("evaluate") or functools.partial(loss_alone, loss)
        self._evaluate = evaluation(means, params)
        self._rest = data.n_train % config.batch_size  # samples of an epoch's last batch
        self._try(loss, params)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that the file's ``init`` makes."""
        return arrays(self._make(rng, self.data))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient; see `Problem`.

        The first call also compiles it for an epoch's last batch: later, compilation would make a
        gradient as many updates old.
        """
        if 0 < self._rest < len(batch):
            n, self._rest = self._rest, 0
            self._gradient(params, Batch(batch.x[:n], batch.y[:n], batch.ids[:n]), out)
        return self._gradient(params, batch, out)

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return the means by the file's ``evaluate``, or the mean loss."""
        return self._evaluate(params, batch)

    def _try(self, loss: Callable[..., Any], params: PyTree) -> None:
        """Trace the loss, without computing it, so that every rank reports an error.

        Raises:
            UserError: If the loss does not return a number.
        """
        data, dtype = self.data, np.dtype(self.config.dtype)
        x = np.zeros((TRIED, *data.x_shape), dtype)
        y = np.zeros((TRIED, *data.y_shape), dtype if data.classes is None else np.int64)
        checked_loss(jax.eval_shape(loss, params, x, y))
