"""What a program gives a run, checked: its function, its parameters, its held-out samples."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.library.callbacks import Callback, Callbacks
from mpips.library.data import Samples
from mpips.library.model import Model
from mpips.library.worker import Worker
from mpips.problems.base import Arrays

if TYPE_CHECKING:
    from mpips.datasets import Batch
    from mpips.library.loop import Loop
    from mpips.library.start import Start

Evaluate: TypeAlias = Callable[[Any, Any], dict[str, float]]


class Program(Model):
    """What a program gives a run, and how its workers take it; the problem of its job.

    Args:
        train: Called with a worker on each worker.
        params: See `mpips.run`; the others likewise.

    Attributes:
        train: As given.
        name: What the run is called after: ``program.py:function``.
        callbacks: Those that were given, as one.
        sets_rate: Whether workers may set a factor of the learning rate.
        optimizer_state: What the update rule begins with, as given; None for nothing.
        metrics: Evaluates a batch of held-out samples, as given.

    Raises:
        UserError: If something that is given cannot be.
    """

    sets_rate = False
    optimizer_state: Any = None

    def __init__(
        self,
        train: Callable[[Any], object],
        params: Mapping[str, Any],
        evaluate: Evaluate | None = None,
        held_out: Any = None,
        callbacks: Sequence[Callback] = (),
        tables: Mapping[str, Table] | None = None,
    ) -> None:
        if (held_out is None) != (evaluate is None):
            given, lacks = (
                ("evaluate", "held_out") if held_out is None else ("held_out", "evaluate")
            )
            raise UserError(f"{given} without {lacks}", "both or neither")
        self.callbacks = Callbacks(callbacks)
        super().__init__(params, tables)
        self.train, self.name = train, _name(train)
        self.metrics, self._held_out = evaluate, held_out

    def make_worker(self, start: "Start") -> "Loop":
        """Return what `train` is called with on a worker."""
        return Worker(start)

    def begin(self, start: "Start") -> None:
        """Called on every rank that has its share of the cores. Collective: no."""

    def finish(self, start: "Start") -> None:
        """Called on every rank at the end, while its communicators are there. Collective: yes."""

    def held_out(self) -> Samples | None:
        """Return the held-out samples, on workers and evaluators; None without any."""
        if self._held_out is None:
            return None
        return self.samples(self._held_out() if callable(self._held_out) else self._held_out)

    def samples(self, data: Any) -> Samples:
        """Return data of the program as samples."""
        return Samples(data)

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """Return what the program's `evaluate` does."""
        assert self.metrics is not None, "nothing is held out"
        return self.metrics(params, batch)


def _name(train: Callable[[Any], object]) -> str:
    """Return what a run is called after: ``program.py:function``."""
    if not callable(train):
        got = f"train of type {type(train).__name__}"
        raise UserError(got, "a function that takes an mpips.Worker")
    function = inspect.unwrap(train)
    with contextlib.suppress(ValueError):  # of what is built in there may be no signature
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
