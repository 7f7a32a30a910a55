"""Problems: the models of the command line, and users' own.

A problem is a class with `layout`, `init`, `loss_and_grad` and `evaluate`: see
`mpips.problems.base.Problem`. ``--problem`` names one of `PROBLEMS`, or ``path/to/file.py:Class``
of the user's. mpips adapts two other kinds of objects in a user's file:

- a subclass of a class in `ADAPTERS`, such as a PyTorch module;
- a loss function, in a file with a function ``init``. With a parameter ``out`` for the gradient it
  is one of NumPy (`FunctionProblem`), otherwise one for JAX.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.config.user_file import classes_of, raised, run_file
from mpips.datasets.base import Batch, DataInfo
from mpips.errors import UserError, nearest
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem
from mpips.problems.evaluation import checked_loss
from mpips.problems.rows import TableProblem, uses_rows

__all__ = ["PROBLEMS", "Problem", "load_problem"]

# Module and class of each problem; imported only if a job uses it.
_DENSE, _SPARSE = "mpips.problems.mlp", "mpips.problems.sparse"
PROBLEMS = {
    "linear": (_DENSE, "Linear"),
    "mlp": (_DENSE, "MLP"),
    "softmax": (_DENSE, "Softmax"),
    "logistic_sparse": (_SPARSE, "LogisticSparse"),
    "factorization_machine": (_SPARSE, "FactorizationMachine"),
    "wide_deep": (_SPARSE, "WideDeep"),
}

# Name of a class that is not a problem, and the adapter that makes a problem from a subclass, data
# and configuration. Names avoid an import of PyTorch.
ADAPTERS = {"torch.nn.modules.module.Module": ("mpips.torch.problem", "ModuleProblem")}
OF_LOSSES = ("mpips.jax.trees", "LossProblem")  # adapter of a loss for JAX; takes its names, too

_METHODS = ("init", "loss_and_grad", "evaluate")
_ROW_METHODS = ("init", "loss_and_grad_rows", "evaluate_rows")  # of problems with tables


def load_problem(name: str, data: DataInfo, config: Config) -> Problem:
    """Make the problem called `name`.

    Args:
        name: A key of `PROBLEMS`, or ``path/to/file.py:Class``, or ``path/to/file.py:function``.
            The file runs as a module, and its directory is added at the end of `sys.path`. The
            class need not subclass `Problem`. The function is a loss that writes its gradient into
            its parameter ``out``, or a loss for JAX.
        data: Description of the dataset.
        config: The run's configuration.

    Raises:
        UserError: If there is no such file or class; if the file or the class raises; if the
            class lacks a method; or if the data does not fit. If the user's code raised, its
            exception is the ``__cause__``.
    """
    if name in PROBLEMS:
        made = _load(*PROBLEMS[name])
        if data.sparse and not uses_rows(made):
            raise _needs_dense(name, data)
        return made(data, config)
    path, _, class_name = name.rpartition(":")
    return _user_problem(Path(os.path.expanduser(path)).resolve(), class_name, data, config)


def _user_problem(path: Path, class_name: str, data: DataInfo, config: Config) -> Problem:
    module = run_file(path, "problem")
    where = f"{path}:{class_name}"
    make, sparse, expected = _maker(_find(module, class_name, path), vars(module), data, where)
    if data.sparse and not sparse:
        raise _needs_dense(where, data, ", or a loop of your own with mpips.torch.EmbeddingBag")
    try:
        problem = make(data, config)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise raised(f"problem {where}", error, path, expected) from error
    layout = getattr(problem, "layout", None)
    if not isinstance(layout, Layout) or layout.size == 0:
        got = f"no parameters in {layout}" if isinstance(layout, Layout) else f"layout={layout!r}"
        remedy = 'set self.layout = Layout.of({"w": (inputs, outputs)}) in __init__'
        raise UserError(f"problem {where} with {got}", "a non-empty mpips.layout.Layout", remedy)
    return problem


def _maker(
    found: Any, beside: dict[str, Any], data: DataInfo, where: str
) -> tuple[Callable[..., Problem], bool, str]:
    """Return the constructor of a problem for a user's class or function.

    Args:
        found: The class or the function.
        beside: Global names of its file, and their values.
        data: Description of the dataset.
        where: File and name of the class, for messages.

    Returns:
        The constructor, which takes data and configuration; whether it takes sparse samples; and
        what it expects of the class or function, for messages.

    Raises:
        UserError: If the class lacks methods.
    """
    shape = ", ".join(map(str, ("n", *data.x_shape)))
    if not isinstance(found, type):
        if "out" in inspect.signature(found).parameters:
            expected = "init(rng, data) that returns arrays by name"
            return functools.partial(FunctionProblem, found, beside), True, expected
        expected = (
            f"init(rng, data), and a loss(params, x, y) that JAX traces for x of ({shape}), or a "
            "loss(params, batch, out) that writes its gradient"
        )
        return functools.partial(_load(*OF_LOSSES), found, beside), False, expected
    missing = _missing(found)
    bases = (f"{base.__module__}.{base.__qualname__}" for base in found.__mro__)
    if missing and (known := next((ADAPTERS[name] for name in bases if name in ADAPTERS), None)):
        expected = f"a class made by CLASS() or CLASS(data), and a forward of inputs ({shape})"
        return functools.partial(_load(*known), found), False, expected
    if missing:
        methods, base = (_ROW_METHODS, "rows") if uses_rows(found) else (_METHODS, "base")
        expected = f"the methods {', '.join(methods)}"
        remedy = f"see mpips/problems/{base}.py"
        raise UserError(f"problem {where} without {', '.join(missing)}", expected, remedy)
    return found, True, "a class made by CLASS(data, config)"


def _needs_dense(problem: str, data: DataInfo, more: str = "") -> UserError:
    got = f"problem {problem!r} with the sparse samples of dataset {data.name!r}"
    remedy = f"leave out ::sparse, or use --problem logistic_sparse{more}"
    return UserError(got, "dense ones", remedy)


def _find(module: ModuleType, class_name: str, path: Path) -> Any:
    """Return the class of that name in a user's module, or the loss, in a module with ``init``."""
    found = getattr(module, class_name, None)
    if callable(found) and not isinstance(found, type):
        if not callable(getattr(module, "init", None)):
            got = f"function {class_name!r} in {path} without init(rng, data) beside it"
            raise UserError(got, "a class, or a loss and a function that makes its params")
    elif not isinstance(found, type):
        classes = classes_of(module)
        legal = f"one of {', '.join(classes)}" if classes else "a class"
        raise UserError(f"no class {class_name!r} in {path}", legal, nearest(class_name, classes))
    return found


def _load(module: str, name: str) -> Callable[..., Problem]:
    return getattr(importlib.import_module(module), name)


def _missing(cls: type[Any]) -> list[str]:
    methods = _ROW_METHODS if uses_rows(cls) else _METHODS
    found = {method: getattr(cls, method, None) for method in methods}
    of_base = [f for base in (Problem, TableProblem) for f in vars(base).values()]
    return [name for name, f in found.items() if not callable(f) or f in of_base]


class FunctionProblem(Problem):
    """Problem of a user's loss function that writes its own gradient.

    The file of the loss has ``init(rng, data)``, which returns the initial parameters by name. It
    may have ``evaluate(params, batch)``, which does as `Problem.evaluate`. Without it, evaluation
    returns the loss alone.

    Args:
        loss: ``loss(params, batch, out)``, which does as `Problem.loss_and_grad`.
        beside: Global names of its file, and their values.
        data: Description of the dataset.
        config: The run's configuration.

    Raises:
        UserError: If ``init`` does not return arrays by name. Errors of ``init`` itself pass
            through.
    """

    def __init__(
        self,
        loss: Callable[..., float],
        beside: Mapping[str, Any],
        data: DataInfo,
        config: Config,
    ) -> None:
        super().__init__(data, config)
        self._loss, self._make, self._means = loss, beside["init"], beside.get("evaluate")
        params = self._make(np.random.default_rng(config.seed), data)
        if not isinstance(params, Mapping):
            got = f"init that returned {type(params).__name__}"
            raise UserError(got, 'arrays by name, such as {"w": w, "b": b}')
        self.layout = Layout.of({name: np.shape(array) for name, array in params.items()})
        self._unused: Arrays = {}  # gets gradients in evaluations

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that the file's ``init`` makes."""
        return self._make(rng, self.data)

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient; see `Problem`."""
        return self._loss(params, batch, out)

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return the metrics of the file's ``evaluate``, or the mean loss."""
        if self._means is not None:
            return self._means(params, batch)
        if not self._unused:
            self._unused = self.layout.views(np.zeros(self.layout.size, self.config.dtype))
        return {"loss": checked_loss(self._loss(params, batch, self._unused))}
