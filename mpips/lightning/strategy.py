"""`mpips.lightning.Strategy`: the strategy of a Trainer whose ranks are workers and servers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException

from mpips.errors import Exit, UserError
from mpips.lightning import progress
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Collectives, Ranks, metrics_shared
from mpips.lightning.rates import only_optimizer
from mpips.lightning.run import Fit
from mpips.mpi import abort, signals
from mpips.torch.run import Result

# Options that the Trainer or the module says.
ELSEWHERE = {
    "epochs": "Trainer(max_epochs=)",
    "steps": "Trainer(max_steps=)",
    "accumulate": "Trainer(accumulate_grad_batches=)",
    "clip": "Trainer(gradient_clip_val=)",
    "batch_size": "the DataLoader",
    "shuffle": "the DataLoader",
    "optimizer": "configure_optimizers",
    "learning_rate": "configure_optimizers",
    "weight_decay": "configure_optimizers",
    "groups": "configure_optimizers",
}


class _Served(_TunerExitException):
    """A server has served: Lightning leaves `fit` by its teardown hooks, without an error."""


class Strategy(Collectives, ParallelStrategy):
    """Workers fit by Lightning's loop, and servers serve them in `Trainer.fit`.

    Args:
        mode: How workers learn from each other: ``async``, ``sync``, ``ssp``, ``local_sgd``, ...
        **options: Others of mpips, such as ``servers=1``, ``out="runs/mine"``, ``resume="auto"``.
            Those that the Trainer has, or the module, are given there.

    Attributes:
        result: What the last `fit` has left, on every rank; None before.

    Raises:
        UserError: If an option or the number of servers cannot be, on every rank.

    Collective: yes.
    """

    strategy_name = "mpips"
    handles_gradient_accumulation = True

    def __init__(self, mode: str = "async", **options: Any) -> None:
        for name in options.keys() & ELSEWHERE.keys():
            raise UserError(f"{name}= to the strategy", f"it in {ELSEWHERE[name]}")
        self._options = {"mode": mode, **options}
        self.ranks = Ranks(self._options)
        super().__init__(cluster_environment=self.ranks)
        self.result: Result | None = None
        self._fit = Fit(self.ranks, self._options)
        self._stack = ExitStack()
        self._schedules = progress.Schedules((), False)

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self)

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning is to share samples out: those that all workers evaluate together."""
        trainer = self.lightning_module.trainer
        together = self.ranks.config.in_rounds or trainer.state.fn != TrainerFn.FITTING
        return together and not trainer.training

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part this worker evaluates."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return what Lightning takes batches from."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        return Batches(dataloader, self._fit, trainer.limit_train_batches)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Begin the run, with the optimizer of the module.

        Collective: yes. Blocks: on a server, until the run is over.
        """
        super().setup_optimizers(trainer)
        optimizer = only_optimizer(self.optimizers)
        progress.take_schedulers(trainer)
        trainer.fit_loop.setup_data()
        self._fit.batches = progress.train_batches(trainer)
        resumes = bool(self._options.get("resume"))
        more = progress.options_of(trainer, self.ranks.config)
        state, epochs = progress.saved(trainer, resumes)
        self._fit.begin(self._stack, self.lightning_module, optimizer, more | epochs, state)
        self.begins = False
        if self._fit.worker is None:
            raise _Served

    def on_train_start(self) -> None:
        """Begin the first epoch: the one that a resumed run was stopped in."""
        trainer, self.trains = self.lightning_module.trainer, True
        self._fit.opened = lambda: progress.leave_end_open(trainer)
        signals.install()  # again: Lightning has taken SIGTERM for itself, which saves no run
        progress.take_limits(trainer, self.ranks.config)
        resumes = bool(self._options.get("resume"))
        self._schedules = progress.Schedules(self.lr_scheduler_configs, resumes)
        epoch, worker, rates = self._fit.begin_epoch(), self._fit.worker, self._fit.rates
        assert worker is not None, "it trains"
        rates.given.state.clear()  # what a checkpoint has brought: the servers have it
        rates.stepped()  # other workers may have, or this one before a stop
        if resumes:
            progress.go_on(trainer, epoch or 0, worker.steps)
        self._look_ahead()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the gradient of the mean loss over the batch, which the run accumulates."""
        module = self.lightning_module
        share = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        found: torch.Tensor = super().backward(closure_loss * share, *args, **kwargs)
        return found / share

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Push the gradients, and wait for the next batch.

        Collective and blocking: as `mpips.Worker.push`.
        """
        found = super().optimizer_step(Pushing(self._fit), closure, model, **kwargs)
        self._look_ahead()
        return found

    def _look_ahead(self) -> None:
        """Tell Lightning what this worker knows when the next batch is here."""
        trainer, worker = self.lightning_module.trainer, self._fit.worker
        assert worker is not None, "it trains"
        progress.look_ahead(trainer, worker.passed)
        if worker.ended is not None:
            progress.end(trainer)
        each = 1 if self.ranks.config.in_rounds else self.world_size
        self._schedules.step(worker.updates // each)

    def on_train_end(self) -> None:
        """End the run, if Lightning has left its loop before."""
        self._fit.leave()
        self.trains = False

    def fit(self, function: Callable[[], Any], trainer: Trainer) -> None:
        """Have this rank do its part of `Trainer.fit`.

        Raises:
            UserError: If the Trainer wants what cannot be.
            SystemExit: If the run was saved at a signal, with 85, or has diverged, with 1.

        Collective: yes. Blocks: until the run is over.
        """
        progress.check(trainer)
        self._fit, served, self.begins = Fit(self.ranks, self._options), None, True
        limits = trainer.gradient_clip_val, trainer.fit_loop.epoch_loop.max_steps
        try:
            with ExitStack() as self._stack:
                function()
        except _Served as done:
            served = done
        finally:
            self.begins = self.trains = False
            trainer.gradient_clip_val, trainer.fit_loop.epoch_loop.max_steps = limits
        self.result = self._fit.result()
        self.lightning_module.load_state_dict(self.result.state_dict)
        progress.share_outcome(trainer, self.ranks)
        if self.result.code:
            raise SystemExit(self.result.code)
        if served is not None:
            raise served


class Pushing:
    """What Lightning's precision plugins are given in place of the module's optimizer."""

    def __init__(self, fit: Fit) -> None:
        self._fit, self._given = fit, fit.rates.given

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Push."""
        return self._fit.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


class Launcher(_Launcher):
    """Has each rank do its part of `fit`, `validate`, `test` and `predict`."""

    is_interactive_compatible = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def kill(self, signum: int) -> None:
        """Leave the ranks alone: mpirun has started them."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any
    ) -> Any:
        """Call Lightning's function; a server returns what worker 0 does."""
        with metrics_shared(trainer.lightning_module, self._strategy):
            return self._launch(lambda: function(*args, **kwargs), trainer)

    def _launch(self, function: Callable[[], Any], trainer: Trainer) -> Any:
        if trainer.state.fn == TrainerFn.FITTING:
            return self._strategy.fit(function, trainer)
        ranks, found = self._strategy.ranks, None
        if ranks.works:
            try:
                found = function()
            except BaseException as error:
                if ranks.cluster.world > 1:  # the others wait for this one
                    abort.abort(abort.raised(error), getattr(error, "code", Exit.FAILED))
                raise
        shared = ranks.share(found if trainer.state.fn != TrainerFn.PREDICTING else None)
        return found if ranks.works else shared
