"""`mpips.lightning.FabricStrategy`: the strategy of a Fabric, for programs with their own loop."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.launchers.launcher import _Launcher

from mpips.errors import UserError
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Collectives, Ranks
from mpips.lightning.rates import only_optimizer
from mpips.lightning.run import Fit
from mpips.torch.run import Result

REMEDY = "write def main(fabric): ..., and fabric.launch(main): servers serve there"


class _Served(BaseException):
    """Raised on a server at the end of its run, to leave the launched function."""


class FabricStrategy(Collectives, ParallelStrategy):
    """Strategy of a Fabric: workers run the launched function, and servers serve in it.

    Servers serve from `Fabric.setup` on. The first loader that is set up has the training samples;
    each pass over it is an epoch. Other loaders are unchanged.

    Args:
        mode: Strategy of the run: ``async``, ``sync``, ``ssp``, ``local_sgd``, ...
        **options: Other options of mpips, such as ``servers=1``, ``epochs=5``, ``accumulate=4``.

    Attributes:
        result: Result of the last run, on every rank; None before.

    Raises:
        UserError: On every rank, if an option or the number of servers is invalid.

    Collective: yes.
    """

    distributed_sampler_kwargs = None  # makes Fabric leave samplers unchanged

    def __init__(self, mode: str = "async", **options: Any) -> None:
        self._options = {"mode": mode, **options}
        self.ranks = Ranks(self._options)
        super().__init__(cluster_environment=self.ranks)
        self.result: Result | None = None
        self._fit = Fit(self.ranks, self._options)
        self._given: tuple[Any, Any] | None = None  # the model and its optimizer
        self._stack: ExitStack | None = None  # while a function is launched

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self)

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Do nothing: the module stays on its device."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `Collectives.reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make the first loader the one of the training samples."""
        if self._stack is None or self._fit.batches is not None:
            return dataloader
        self._fit.batches = batches = Batches(dataloader, self._fit)
        self._begin()
        return batches

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Store the model and its optimizer, and begin the run if the loader is known.

        Raises:
            UserError: If there are several optimizers, or no function was launched.

        Collective: yes. Blocks: on a server, until the run has ended.
        """
        if self._stack is None:
            raise UserError("fabric.setup outside of a function", "it in one", REMEDY)
        self._given = module, only_optimizer(optimizers)
        self._begin()
        return module, optimizers, scheduler

    def _begin(self) -> None:
        """Begin the run once the model and the loader are known; a server serves in it."""
        if self._given is None or self._fit.batches is None:
            return
        assert self._stack is not None, "a function was launched"
        self._fit.begin(self._stack, *self._given, {})
        self.begins, self.trains = False, True
        if self._fit.worker is None:
            raise _Served

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Push the gradients.

        Collective and blocking: as `mpips.Worker.push`.
        """
        return self._fit.step(kwargs.get("closure"))

    def launch(self, function: Callable[[], Any]) -> Any:
        """Call a function with the training loop. Returns its result; None on servers.

        Raises:
            SystemExit: With 85 if the run was saved at a signal, with 1 if it has diverged.

        Collective: yes. Blocks: until the run has ended.
        """
        self._fit, self._given, self.begins = Fit(self.ranks, self._options), None, True
        outcome = None
        try:
            with suppress(_Served), ExitStack() as self._stack:
                outcome = function()
                self._fit.leave()
        finally:
            self.begins = self.trains = False
            self._stack = None
        if self._given is not None and self._fit.batches is not None:
            self.result = self._fit.result()
            self._given[0].load_state_dict(self.result.state_dict)
            if self.result.code:
                raise SystemExit(self.result.code)
        return outcome


class Launcher(_Launcher):
    """Launcher of `Fabric.launch`: every rank calls the function."""

    is_interactive_compatible = False

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function by `FabricStrategy.launch`."""
        return self._strategy.launch(lambda: function(*args, **kwargs))
