"""Run of mpips under Lightning's loop: start, passes and end.

Environment:
    PL_GLOBAL_SEED: Seed of the run, which ``lightning.seed_everything`` sets.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpips.library.run import Running, running
from mpips.library.start import limit_of
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Ranks
from mpips.lightning.rates import Rates, as_made
from mpips.torch.run import Result, TorchProgram
from mpips.torch.worker import Worker

EPOCHS = 10**6  # of a run that is to end by itself


class LightningProgram(TorchProgram):
    """What a module gives a run. Its loop is not called: it drives the run.

    Args:
        module: As it begins, the same on every rank.
        optimizer: Of it.
        options: Of the run.
        optimizer_state: What the rule begins with; None for nothing.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        first = as_made(optimizer)
        with torch.random.fork_rng(devices=[]):
            super().__init__(_loop, lambda: module, lambda params: first, options, optimizer_state)
        self.name = f"{_file_of(type(module))}:{type(module).__name__}"


def _loop(worker: Worker) -> None:
    raise AssertionError("Lightning's loop drives the run")


def _file_of(kind: type) -> str:
    try:
        name = Path(inspect.getfile(kind)).name
    except (OSError, TypeError):  # one that was typed
        return "program.py"
    return name if name.endswith(".py") else "program.py"


class Fit:
    """A run, from its options to its passes.

    Args:
        ranks: The ranks.
        options: As the strategy was given them.

    Attributes:
        ranks: As given.
        worker: What drives it; None before it begins, and on servers.
        rates: Those of the user's optimizer, on workers from its begin on.
        batches: What it trains on; None before that is known.
        opened: Called when a pass begins.
    """

    def __init__(self, ranks: Ranks, options: Mapping[str, Any]) -> None:
        self.ranks, self._options = ranks, dict(options)
        self.worker: Worker | None = None
        self.batches: Batches | None = None
        self.opened: Callable[[], object] = lambda: None
        self._waiting: int | None = None  # an epoch that has begun and has no pass yet
        self._run: Running[LightningProgram]
        self.rates: Rates
        self._passes: Iterator[int]

    def begin(
        self,
        stack: ExitStack,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        more: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin the run. Collective: yes. Blocks: on a server, until it is over.

        Args:
            stack: What the run is left with.
            module: The model.
            optimizer: Of it.
            more: Options of the run beside those of the strategy.
            optimizer_state: What the optimizer begins with; None for nothing.

        Raises:
            UserError: As `mpips.torch.run`.
        """
        assert self.batches is not None, "its loader is known"
        self.ranks.share_state(module)
        seed = {"seed": int(s)} if (s := os.environ.get("PL_GLOBAL_SEED")) else {}
        given = self.batches.arguments()
        options = {
            "quiet": True, **seed, "shuffle": self.batches.shuffle,
            "batch_size": given["batch_size"], **self._options, **more,
        }  # fmt: skip
        if not {"epochs", "steps"} & options.keys():
            options["epochs"] = EPOCHS
        make = partial(LightningProgram, module, optimizer, options, optimizer_state)
        found = self._run = stack.enter_context(running(make, None, limit_of(options)))
        if found.worker is None:
            stack.close()  # serves
            return
        assert isinstance(found.worker, Worker), "of such a program"
        self.worker = found.worker
        self.rates = Rates(optimizer, self.worker.optimizer)
        self._loader = self.worker.loader(**given)
        self._passes = self.worker.epochs()

    def begin_epoch(self) -> int | None:
        """Begin the next epoch; returns its number, or None when the run is over.

        Collective: over the workers, the first one. Blocks: until a batch is here.
        """
        self._waiting = next(self._passes, None)
        return self._waiting

    def next_pass(self) -> Iterator[Any]:
        """Yield this worker's batches of the next epoch."""
        if self._waiting is None and self.begin_epoch() is None:
            return
        self._waiting = None
        self.opened()
        yield from self._loader

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push what backward has left; returns what `closure` does, which is called first."""
        self.rates.set()
        found = self.rates.ours.step(closure)
        self.rates.stepped()
        return found

    def leave(self) -> None:
        """Ask for the end of a run that goes on."""
        if self.worker is not None and self.worker.ended is None:
            self.worker.stop()

    def result(self) -> Result:
        """Return what a run that is over has left."""
        found = self._run.result
        return Result(**vars(found), state_dict=self._run.program.state_dict(found.params))
