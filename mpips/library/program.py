"""Program of a run: function, parameters and held-out samples as a problem."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from mpips.checkpoint.exchange import left_out
from mpips.config import Config
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.layout.tables import Table
from mpips.library.callbacks import Callback, Callbacks
from mpips.library.data import Samples
from mpips.library.initial import Change, check_sum, taken
from mpips.library.optimizers import Optimizer
from mpips.library.worker import Worker
from mpips.planning.table_rules import checked_tables
from mpips.problems.base import Arrays, Problem

if TYPE_CHECKING:
    from mpips.datasets import Batch, DataInfo
    from mpips.library.loop import Loop
    from mpips.library.start import Start

Evaluate: TypeAlias = Callable[[Any, Any], dict[str, float]]


class Model(Problem):
    """Problem whose gradients a program computes, with initial parameters in a mapping's order.

    The mapping is read when the parameters are used: a run trains copies of its arrays.

    Args:
        params: Names and arrays of real numbers.
        tables: Tables of rows beside the parameters, by name.

    Attributes:
        dtype: Dtype of the parameters, unless the job gives one.

    Raises:
        UserError: If there are neither parameters nor tables; if a parameter is not an array of
            real numbers, or a table is not a `Table`.
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
        """Return a copy of this problem for a job; see `Problem`."""
        problem = copy.copy(self)
        Problem.__init__(problem, data, config)
        return problem

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the parameters by name."""
        return {str(name): np.asarray(array) for name, array in self._params.items()}

    def take(self, name: str, array: np.ndarray) -> None:
        """Replace the initial values of an array by values of the same shape.

        They are copied into the program's own array if possible, so that the program may change
        them further.
        """
        own = self._params.get(name)
        if isinstance(own, np.ndarray) and own.flags.writeable and own.dtype == array.dtype:
            np.copyto(own, array)
        else:
            self._params = {**self.arrays(), name: array}

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the parameters as given."""
        return self.arrays()


class Program(Model):
    """Problem of a program's job, with the program's arguments and the hooks of its workers.

    Args:
        train: Function that each worker calls with its `Worker`.
        params: See `mpips.run`, as for the other arguments.

    Attributes:
        train: As given, like `optimizer` and `options`.
        name: Name of the run: ``program.py:function``.
        callbacks: The given callbacks.
        sets_rate: Whether workers may set a factor of the learning rate.
        optimizer_state: Initial state of the update rule, as given; None for none.
        same: Descriptions, by name, of what every rank must have alike.
        metrics: Function that evaluates a batch of held-out samples, as given.
        notes: Notes of a new run about its parameters.

    Raises:
        UserError: If an argument is invalid.
    """

    sets_rate = False
    optimizer_state: Any = None

    def __init__(
        self,
        train: Callable[[Any], object],
        params: Mapping[str, Any],
        optimizer: Optimizer | None = None,
        options: Mapping[str, Any] | None = None,
        evaluate: Evaluate | None = None,
        held_out: Any = None,
        callbacks: Sequence[Callback] = (),
        tables: Mapping[str, Table] | None = None,
    ) -> None:
        if (held_out is None) != (evaluate is None):
            got = "evaluate without held_out" if evaluate else "held_out without evaluate"
            raise UserError(got, "both or neither")
        self.optimizer, self.options = optimizer, options or {}
        self.callbacks = Callbacks(callbacks)
        super().__init__(params, tables)
        self.train, self.name = train, _name(train)
        self.metrics, self._held_out = evaluate, held_out
        self.notes, self._marks = list[str](), dict[str, int]()
        self.same = dict[str, Any]()
        self.rate_schedule = optimizer.rate_schedule if isinstance(optimizer, Optimizer) else None
        if isinstance(start := self.options.get("init_from"), Mapping):
            self.options = {name: o for name, o in self.options.items() if name != "init_from"}
            self.begin_with(start)

    def begin_with(self, start: Mapping[str, Any]) -> None:
        """Start with given parameters; arrays that the model does not have are noted.

        Raises:
            UserError: If one is missing, of another shape or not an array of real numbers.
        """
        keys = taken(start, {name: a.shape for name, a in self.arrays().items()}, self.arrays())
        for name, key in keys.items():
            array = np.asarray(start[key])
            if array.dtype.kind not in "fiub":
                got = f"init_from with {key!r} of dtype {array.dtype}"
                raise UserError(got, "an array of real numbers")
            self.take(name, array)
        self.notes = left_out([key for key in start if key not in keys.values()], "init_from")

    def mark(self) -> None:
        """Note checksums of a worker's arrays, before the training function can change them."""
        self._marks = {name: check_sum(array) for name, array in self.arrays().items()}

    def changes(self) -> dict[str, Change]:
        """Return the changes that the training function has made in place since `mark`, by name.

        Raises:
            UserError: If a change cannot be sent to the other ranks.
        """
        return {
            name: Change(array.shape, array.dtype.str, mark)
            for name, array in self.arrays().items()
            if (mark := check_sum(array)) != self._marks[name]
        }

    def array(self, name: str) -> np.ndarray:
        """Return the current values of an array, by its name."""
        return self.arrays()[name]

    def make_worker(self, start: "Start") -> "Loop":
        """Return the argument of the training function on a worker."""
        return Worker(start)

    def begin(self, start: "Start") -> None:
        """Prepare this rank, once it has its share of the cores. Collective: no."""

    def finish(self, start: "Start") -> None:
        """Finish on this rank, before its communicators are freed. Collective: yes."""

    def close(self) -> None:
        """Clean up on this rank, also after an error."""

    def held_out(self) -> Samples | None:
        """Return the held-out samples, on workers and evaluators; None if there are none."""
        if self._held_out is None:
            return None
        return self.samples(self._held_out() if callable(self._held_out) else self._held_out)

    def samples(self, data: Any) -> Samples:
        """Return data of the program as samples."""
        return Samples(data)

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return the means of a batch by the program's own `evaluate`."""
        assert self.metrics is not None, "there are no held-out samples"
        return self.metrics(params, batch)


def _name(train: Callable[[Any], object]) -> str:
    """Return the name of a run: ``program.py:function``.

    Raises:
        UserError: If `train` is not a function that takes a worker alone.
    """
    if not callable(train):
        got = f"train of type {type(train).__name__}"
        raise UserError(got, "a function that takes an mpips.Worker")
    function = inspect.unwrap(train)
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        try:
            inspect.signature(train, follow_wrapped=False).bind(None)
        except TypeError as problem:
            got, expected = f"train that takes other arguments ({problem})", "a worker alone"
            raise UserError(got, expected, "write def train(worker):") from None
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    file = Path(code.co_filename).name if code is not None else ""
    file = file if file.endswith(".py") else "program.py"
    return f"{file}:{name if name.isidentifier() else 'train'}"
