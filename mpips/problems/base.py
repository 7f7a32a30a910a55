"""Base class of problems: parameters, loss, gradient, and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from mpips.config import Config
from mpips.datasets.base import Batch, DataInfo
from mpips.errors import UserError
from mpips.kernels.vectors import all_finite
from mpips.layout import Layout
from mpips.optim.rule import RuleState

Arrays = Mapping[str, np.ndarray]


class Problem(ABC):
    """A model and its loss, over batches of one dataset.

    A problem stores no parameters: its methods take them as arguments, and write gradients into
    arrays of the caller. Only one thread at a time uses a problem.

    Attributes:
        layout: Names and shapes of the parameters; set by the subclass's ``__init__``.
        statistics: Names of the arrays that are not parameters, such as running means; the last
            arrays of `layout`. In place of their gradient, the problem writes the decrease that a
            batch causes, times `share`. It is subtracted at any update rule and learning rate.
        share: Factor of the change that one batch makes to the statistics; a job with statistics
            sets it.
        rule_state: State that the update rule of a new run begins with; None for none.
        rate_schedule: Learning rate as a function of the update's number, from 1; None for the
            schedule of the options.

    Args:
        data: Description of the dataset.
        config: The run's configuration.

    Raises:
        UserError: If the data does not fit the problem (in subclasses).
    """

    layout: Layout
    statistics: tuple[str, ...] = ()
    share: float = 1.0
    rule_state: RuleState | None = None
    rate_schedule: Callable[[int], float] | None = None

    def __init__(self, data: DataInfo, config: Config) -> None:
        self.data = data
        self.config = config

    @abstractmethod
    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return initial parameters: one array for each name of `layout`, dtype `config.dtype`.

        All random numbers come from `rng`, so every rank can make the same parameters.
        """

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient.

        A problem whose gradients a program computes, or whose tables have rows, has none.

        Args:
            params: Parameters, with the layout's names and shapes; not written.
            batch: At least one sample; not written.
            out: Arrays shaped as `params`; every element is overwritten with the gradient of
                the mean loss.

        Returns:
            The mean loss. If parameters or inputs are NaN or infinite, so is the loss, without an
            exception or a warning.
        """
        raise NotImplementedError("its gradients are computed elsewhere")

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return means over the batch: ``loss``, and ``accuracy`` in [0, 1] if it is defined.

        The names must be the same for every batch. A problem that is not evaluated so has none.
        """
        raise NotImplementedError("it is evaluated elsewhere, or not at all")


def statistics(problem: Problem) -> tuple[str, ...]:
    """Return `Problem.statistics`, or none for a user's class without that attribute."""
    return getattr(problem, "statistics", ())


def initial_vector(problem: Problem, seed: int, dtype: np.dtype) -> np.ndarray:
    """Return the problem's initial parameters as one flat vector, shape (size,), of `dtype`.

    Raises:
        UserError: If names or shapes differ from the problem's layout, or an element is not finite.
    """
    vector = np.empty(problem.layout.size, dtype)
    views = problem.layout.views(vector)
    arrays = problem.init(np.random.default_rng(seed))
    expected = {name: view.shape for name, view in views.items()}
    found: object = type(arrays).__name__
    if isinstance(arrays, Mapping):
        found = {name: np.shape(array) for name, array in arrays.items()}
    if found != expected:
        raise UserError(f"init() of the problem gave {found}", f"{expected}, as in its layout")
    for name, view in views.items():
        view[...] = arrays[name]
        if not all_finite(view.reshape(-1)):
            got = f"initial parameters with NaN or infinity in {name!r}, as {vector.dtype}"
            raise UserError(got, "finite numbers")
    return vector
