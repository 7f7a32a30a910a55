"""A function of NumPy as the problem of a job: ``python -m mpips.train --problem fit.py:loss``."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem
from mpips.problems.evaluation import checked_loss

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo


class FunctionProblem(Problem):
    """A loss that writes its gradient, and what stands beside it in its file.

    That is ``init(rng, data)``, which returns the initial parameters by name, and if there is one
    ``evaluate(params, batch)``, as `Problem.evaluate`; else evaluation gives the loss alone.

    Args:
        loss: ``loss(params, batch, out)``, as `Problem.loss_and_grad`.
        beside: Names of its file.
        data: What the dataset looks like.
        config: The run's configuration.

    Raises:
        UserError: If ``init`` does not return arrays by name; what it raises, as it is.
    """

    def __init__(
        self,
        loss: Callable[[Arrays, "Batch", Arrays], float],
        beside: Mapping[str, Any],
        data: "DataInfo",
        config: "Config",
    ) -> None:
        super().__init__(data, config)
        self._loss, self._make, self._means = loss, beside["init"], beside.get("evaluate")
        params = self._make(np.random.default_rng(config.seed), data)
        if not isinstance(params, Mapping):
            got = f"init that returned {type(params).__name__}"
            raise UserError(got, 'arrays by name, such as {"w": w, "b": b}')
        self.layout = Layout.of({name: np.shape(array) for name, array in params.items()})
        self._unused: Arrays = {}  # gradients of held-out samples

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that the file's ``init`` makes."""
        found: dict[str, np.ndarray] = self._make(rng, self.data)
        return found

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, and write its gradient; see `Problem`."""
        return self._loss(params, batch, out)

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return what the file's ``evaluate`` does, or the mean loss."""
        if self._means is not None:
            found: dict[str, float] = self._means(params, batch)
            return found
        if not self._unused:
            self._unused = self.layout.views(np.zeros(self.layout.size, self.config.dtype))
        return {"loss": checked_loss(self._loss(params, batch, self._unused))}
