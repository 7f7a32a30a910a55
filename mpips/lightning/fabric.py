"""`mpips.lightning.FabricStrategy`: the strategy of a Fabric, whose loop is the program's own."""

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
    """A server has served, and leaves the function that workers run."""


class FabricStrategy(Collectives, ParallelStrategy):
    """Workers run the function of `Fabric.launch`; servers serve in it, from `Fabric.setup` on.

    The first loader that is set up is trained on, each pass one epoch. Others are left as they are.

    Args:
        mode: How workers learn from each other: ``async``, ``sync``, ``ssp``, ``local_sgd``, ...
        **options: Others of mpips, such as ``servers=1``, ``epochs=5``, ``accumulate=4``.

    Attributes:
        result: What the last run has left, on every rank; None before.

    Raises:
        UserError: If an option or the number of servers cannot be, on every rank.

    Collective: yes.
    """

    distributed_sampler_kwargs = None  # Fabric leaves the samplers as they are

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
        """Leave the module where it is."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `Collectives.reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Take the first loader as the one that is trained on."""
        if self._stack is None or self._fit.batches is not None:
            return dataloader
        self._fit.batches = found = Batches(dataloader, self._fit)
        self._begin()
        return found

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Take the model and its optimizer for the run.

        Raises:
            UserError: If there are several optimizers, or it is no function that was launched.

        Collective: yes. Blocks: on a server, until the run is over.
        """
        if self._stack is None:
            raise UserError("fabric.setup outside of a function", "it in one", REMEDY)
        self._given = module, only_optimizer(optimizers)
        self._begin()
        return module, optimizers, scheduler

    def _begin(self) -> None:
        """Begin the run when the model and the loader are known; a server serves in it."""
        if self._given is None or self._fit.batches is None:
            return
        assert self._stack is not None, "a function is launched"
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
        """Call a function that has the loop; returns what it does, on servers None.

        Raises:
            SystemExit: If the run was saved at a signal, with 85, or has diverged, with 1.

        Collective: yes. Blocks: until the run is over.
        """
        self._fit, self._given, self.begins = Fit(self.ranks, self._options), None, True
        found = None
        try:
            with suppress(_Served), ExitStack() as self._stack:
                found = function()
                self._fit.leave()
        finally:
            self.begins = self.trains = False
            self._stack = None
        if self._given is not None and self._fit.batches is not None:
            self.result = self._fit.result()
            self._given[0].load_state_dict(self.result.state_dict)
            if self.result.code:
                raise SystemExit(self.result.code)
        return found


class Launcher(_Launcher):
    """Calls the function of `Fabric.launch` on every rank."""

    is_interactive_compatible = False

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._strategy.launch(lambda: function(*args, **kwargs))
