"""A program's parameters as the problem of a job."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mpips.config import Config
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.layout.tables import Table
from mpips.optim import RuleState
from mpips.planning.table_rules import checked_tables
from mpips.problems.base import Arrays, Problem

if TYPE_CHECKING:
    from mpips.datasets import Batch, DataInfo


class Model(Problem):
    """Initial parameters by name, in the order of the mapping, whose gradients a program computes.

    The mapping is read when the parameters are used: a run goes on in other memory.

    Args:
        params: Names and arrays of real numbers.
        tables: Tables of rows beside them, by name.

    Attributes:
        dtype: Of a job that is given none.

    Raises:
        UserError: If there is none and no table, one is not an array of real numbers, or a table is
            none.
    """

    def __init__(
        self, params: Mapping[str, Any], tables: Mapping[str, Table] | None = None
    ) -> None:
        if not isinstance(params, Mapping) or not (params or tables):
            got = f"params of type {type(params).__name__}" if params else "no params"
            raise UserError(got, 'a mapping of names to arrays, such as {"w": np.zeros((4, 2))}')
        self._params = params
        arrays = self.arrays()
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub" or not array.size:
                got = f"params[{name!r}] of dtype {array.dtype} and shape {array.shape}"
                raise UserError(got, "an array of real numbers that is not empty")
        shapes = {name: array.shape for name, array in arrays.items()}
        self.layout = Layout.of(shapes, checked_tables(tables or {}))
        doubles = {array.dtype for array in arrays.values()} == {np.dtype(np.float64)}
        self.dtype = "float64" if doubles else "float32"

    def of_job(self, data: "DataInfo", config: Config) -> Self:
        """Return the problem of a job; see `Problem`.

        Raises:
            UserError: If what the update rule is to begin with does not fit it.
        """
        found = copy.copy(self)
        Problem.__init__(found, data, config)
        found.rule_state = found.make_state(config)
        return found

    def make_state(self, config: Config) -> RuleState | None:
        """Return what the update rule of a new run begins with; None for nothing."""
        return None

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the parameters by name."""
        return {str(name): np.asarray(array) for name, array in self._params.items()}

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that were given."""
        return self.arrays()

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """Not called: the program follows the tasks (`mpips.problems.accumulate`)."""
        raise NotImplementedError("the program computes gradients by itself")

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Not called: nothing is held out."""
        raise NotImplementedError("nothing is held out")
