"""Base of problems: parameters, loss, gradient, and evaluation."""

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

    A problem keeps no parameters: it is given them, and writes gradients where it is told.
    It is used by one thread at a time.

    Attributes:
        layout: Names and shapes of the parameters; set by the subclass's ``__init__``.
        statistics: Names of arrays that are no parameters, the last of `layout`, such as running
            means: what stands for their gradient is what a batch lessens them by, times `share`,
            whatever the update rule and its rate.
        share: The part of such a change that counts; a job with statistics sets it.
        rule_state: What the update rule of a new run begins with; None for nothing.
        rate_schedule: Learning rate by the number of the update, from 1; None for the options'.

    Args:
        data: What the dataset looks like.
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
        """Return fresh parameters, one array a name of `layout`, dtype `config.dtype`.

        Everything random comes from `rng`, so that every rank can make the same ones.
        """

    @abstractmethod
    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient.

        Args:
            params: Parameters, with the layout's names and shapes; not written.
            batch: At least one sample; not written.
            out: Arrays shaped as `params`; every element is overwritten with the gradient of
                the mean loss.

        Returns:
            The mean loss; NaN or infinite, without an exception or a warning, where the
            parameters or the inputs are.
        """

    @abstractmethod
    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return means over the batch: ``loss``, and ``accuracy`` in [0, 1] where defined.

        The names are the same for every batch.
        """


def statistics(problem: Problem) -> tuple[str, ...]:
    """Return `Problem.statistics`; a user's class need not be a `Problem`."""
    return getattr(problem, "statistics", ())


def initial_vector(problem: Problem, seed: int, dtype: np.dtype) -> np.ndarray:
    """Return the problem's initial parameters as one flat vector, shape (size,).

    Raises:
        UserError: If the names or shapes are not those of the problem's layout.
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
            got = f"init() of the problem gave NaN or infinity in {name}"
            raise UserError(got, "finite parameters")
    return vector
