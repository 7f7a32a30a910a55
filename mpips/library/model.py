"""A program's parameters as the problem of a job: named arrays, and what evaluates them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

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

Evaluate: TypeAlias = Callable[[Arrays, Any], dict[str, float]]
MakeState: TypeAlias = Callable[[Config, Layout], RuleState]


class Parameters:
    """Initial parameters by name, in the order of the mapping, which is read when they are used.

    Args:
        given: Names and arrays of real numbers.
        statistics: Those that are no parameters, the last ones; see `Problem`.
        make_state: Makes what the update rule begins with; None for nothing.
        tables: Tables of rows beside them, by name.

    Raises:
        UserError: If there is none and no table, one is not an array of real numbers, or a table is
            none.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        statistics: Sequence[str] = (),
        make_state: MakeState | None = None,
        tables: Mapping[str, Table] | None = None,
    ) -> None:
        if not isinstance(given, Mapping) or not (given or tables):
            got = f"params of type {type(given).__name__}" if given else "no params"
            raise UserError(got, 'a mapping of names to arrays, such as {"w": np.zeros((4, 2))}')
        self._given = given
        arrays = self.arrays
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub" or not array.size:
                got = f"params[{name!r}] of dtype {array.dtype} and shape {array.shape}"
                raise UserError(got, "an array of real numbers that is not empty")
        self.statistics, self.make_state = tuple(statistics), make_state
        shapes = {name: array.shape for name, array in arrays.items()}
        self.layout = Layout.of(shapes, checked_tables(tables or {}))
        # Of a job that is given none.
        doubles = {array.dtype for array in arrays.values()} == {np.dtype(np.float64)}
        self.dtype = "float64" if doubles else "float32"

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The parameters; not kept here, since a run goes on in other memory."""
        return {str(name): np.asarray(array) for name, array in self._given.items()}


class Model(Problem):
    """The problem of a job whose gradients a program computes by itself.

    Args:
        data: What the dataset is.
        config: The job's configuration.
        params: Its initial parameters.
        evaluate: ``evaluate(params, batch)`` returns means over a batch of held-out samples,
            ``loss`` among them; None where nothing is held out.

    Raises:
        UserError: If what the update rule is to begin with does not fit it.
    """

    def __init__(
        self, data: "DataInfo", config: Config, params: Parameters, evaluate: Evaluate | None
    ) -> None:
        super().__init__(data, config)
        self.layout, self._params, self._evaluate = params.layout, params, evaluate
        self.statistics = params.statistics
        if params.make_state is not None:
            self.rule_state = params.make_state(config, params.layout)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters that were given."""
        return self._params.arrays

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """Not called: the program follows the tasks (`mpips.problems.accumulate`)."""
        raise NotImplementedError("the program computes gradients by itself")

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return what the program's `evaluate` does."""
        assert self._evaluate is not None, "nothing is held out"
        return self._evaluate(params, batch)
