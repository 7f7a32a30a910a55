"""Run of mpips within Lightning's loop: start, passes and end.

Environment:
    PL_GLOBAL_SEED: Seed of the run, which ``lightning.seed_everything`` sets.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpips.errors import UserError
from mpips.library.run import Running, running
from mpips.library.start import limit_of
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Ranks
from mpips.lightning.rates import Rates, as_made
from mpips.torch.run import Result, TorchProgram
from mpips.torch.worker import Worker

EPOCHS = 10**6  # epochs of a run that another condition ends


class LightningProgram(TorchProgram):
    """Program of a Lightning module. Lightning's loop drives the run, in place of a function.

    Args:
        module: The module before training, the same on every rank.
        optimizer: Optimizer of the module.
        options: Options of the run.
        optimizer_state: Initial state of the rule; None for none.
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
        names = {id(p): name for name, p in module.named_parameters()}
        self.state_order = [[names[id(p)] for p in g["params"]] for g in first.param_groups]
        kind = type(module)  # of no file, if it was typed into an interpreter
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "program.py"
        self.name = f"{Path(file).with_suffix('.py').name}:{kind.__name__}"


def _loop(worker: Worker) -> None:
    raise AssertionError("Lightning's loop drives the run")


class Fit:
    """A run, from its options to its passes.

    Args:
        ranks: The ranks.
        options: Options as the strategy got them.

    Attributes:
        ranks: The ranks.
        worker: The worker; None before the run begins, and on servers.
        rates: Rates of the user's optimizer, on workers once the run has begun.
        batches: The training batches; None before the loader is known.
        opened: Called when a pass begins.
        closed: Called behind a pass, if the run has ended.
        apart: Whether the round of this worker's batch, that of its next one, or one between them
            has more batches for some workers than for others.
    """

    def __init__(self, ranks: Ranks, options: Mapping[str, Any]) -> None:
        self.ranks, self._options = ranks, dict(options)
        self.worker: Worker | None = None
        self.batches: Batches | None = None
        self.opened: Callable[[], object] = lambda: None
        self.closed: Callable[[], object] = lambda: None
        self.apart = False
        self._waiting: int | None = None  # an epoch that has begun, but whose pass has not
        self._round = 0, False  # of the batch: updates before it, and whether it is uneven
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
        """Begin the run. Collective: yes. Blocks: on a server, until the run has ended.

        Args:
            stack: Stack whose exit ends the run.
            module: The model.
            optimizer: Optimizer of the model.
            more: Options of the run, beside those of the strategy.
            optimizer_state: Initial state of the optimizer; None for none.

        Raises:
            UserError: As `mpips.torch.run`.
        """
        assert self.batches is not None, "the loader is known"
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
        run = self._run = stack.enter_context(running(make, None, limit_of(options)))
        if run.worker is None:
            stack.close()  # serves until the run has ended
            return
        assert isinstance(run.worker, Worker), "LightningProgram makes no other"
        self.worker = run.worker
        self.rates = Rates(optimizer, self.worker.optimizer)
        self._loader = self.worker.loader(**given)
        self._passes = self.worker.epochs()

    @property
    def in_uneven_round(self) -> bool:
        """Whether the current round has more batches for some workers than for others."""
        if self.worker is None or self.worker.ended is not None:
            return False
        job = getattr(self._run.start, "job", None)  # before the first pass there is none
        return job is not None and job.few

    def begin_epoch(self) -> int | None:
        """Begin the next epoch. Returns its number, or None after the end of the run.

        Collective: over the workers, in its first call. Blocks: until a batch arrives.
        """
        self._waiting = next(self._passes, None)
        return self._waiting

    def next_pass(self) -> Iterator[Any]:
        """Yield this worker's batches of the next epoch; none after the end of the run."""
        worker = self.working()
        if self._waiting is not None or self.begin_epoch() is not None:
            self._waiting = None
            self.opened()
            for batch in self._loader:
                self.apart = self.in_uneven_round
                yield batch
        if worker.ended is not None:
            self.closed()

    def look_ahead(self) -> Worker:
        """Wait for this worker's next batch, after a push; returns the worker."""
        worker = self.working()
        worker.passed  # noqa: B018  # waits
        (before, uneven), self._round = self._round, (worker.updates, self.in_uneven_round)
        self.apart = uneven or self._round[1] or worker.updates > before + 1
        return worker

    def working(self) -> Worker:
        """Return the worker.

        Raises:
            UserError: If the run has not begun.
        """
        if self.worker is None:
            got, expected = "a loop of Fabric without a run", "fabric.setup(model, optimizer) and"
            raise UserError(got, f"{expected} fabric.setup_dataloaders(loader) before it")
        return self.worker

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, after a call of `closure`; returns the result of `closure`."""
        self.working()
        self.rates.set()
        outcome = self.rates.ours.step(closure)
        self.rates.stepped()
        return outcome

    def leave(self) -> None:
        """Stop the run, unless it has ended."""
        if self.worker is not None and self.worker.ended is None:
            self.worker.stop()

    def result(self) -> Result:
        """Return the result of a run that has ended."""
        result = self._run.result
        return Result(**vars(result), state_dict=self._run.program.state_dict(result.params))
