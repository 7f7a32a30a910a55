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

from mpips.errors import UserError
from mpips.lightning import progress
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Collectives, Ranks, metrics_shared
from mpips.lightning.rates import only_optimizer
from mpips.lightning.run import Fit
from mpips.mpi import abort, signals
from mpips.torch.run import Result

# Options that an argument of Lightning replaces.
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
    """Raised on a server at the end of a run: Lightning then leaves `fit` without an error."""


class Strategy(Collectives, ParallelStrategy):
    """Strategy of a Trainer: workers run Lightning's loop in `Trainer.fit`, and servers serve.

    Args:
        mode: Strategy of the run: ``async``, ``sync``, ``ssp``, ``local_sgd``, ...
        **options: Other options of mpips, such as ``servers=1``, ``out="runs/mine"``,
            ``resume="auto"``. Options that the Trainer or the module has are refused.

    Attributes:
        result: Result of the last `fit`, on every rank; None before.

    Raises:
        UserError: On every rank, if an option or the number of servers is invalid.

    Collective: yes.
    """

    strategy_name = "mpips"

    def __init__(self, mode: str = "async", **options: Any) -> None:
        for name in options.keys() & ELSEWHERE.keys():
            raise UserError(f"{name}= to the strategy", f"it in {ELSEWHERE[name]}")
        self._options = {"mode": mode, **options}
        self.ranks = Ranks(self._options)
        super().__init__(cluster_environment=self.ranks)
        self.result: Result | None = None
        self._fit = Fit(self.ranks, self._options)
        self._stack = ExitStack()
        self._resumes = bool(options.get("resume"))
        self._schedules: progress.Schedules

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self)

    def model_to_device(self) -> None:
        """Do nothing: the module stays on its device."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether a push may be of a part of a step; behind the last batch its step is complete."""
        return not self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    @property
    def apart(self) -> bool:
        """See `Collectives`."""
        at_batch = progress.in_batch(self.lightning_module.trainer)
        return self._fit.apart if at_batch else self._fit.in_uneven_round

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning divides samples among the workers: if all evaluate together."""
        trainer = self.lightning_module.trainer
        shared = self.ranks.config.in_rounds or trainer.state.fn != TrainerFn.FITTING
        return shared and not trainer.training

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler of this worker's part in an evaluation."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader: with `Batches` in its place, if it has the training samples."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        return Batches(dataloader, self._fit, trainer.limit_train_batches)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Begin the run, with the optimizer of the module.

        Collective: yes. Blocks: on a server, until the run has ended.
        """
        super().setup_optimizers(trainer)
        optimizer = only_optimizer(self.optimizers)
        progress.take_schedulers(trainer)
        trainer.fit_loop.setup_data()
        self._fit.batches = progress.train_batches(trainer)
        loaded = {} if self._resumes else trainer._checkpoint_connector._loaded_checkpoint
        rest = progress.remaining(trainer, self.ranks.config, loaded, self._resumes)
        more, state = progress.options_of(trainer) | rest, progress.optimizer_state(loaded)
        self._fit.begin(self._stack, self.lightning_module, optimizer, more, state)
        self.begins = False
        if self._fit.worker is None:
            raise _Served

    def on_train_start(self) -> None:
        """Begin the first epoch; in a resumed run the one in which it was stopped."""
        trainer, self.trains = self.lightning_module.trainer, True
        self._fit.opened = lambda: progress.open_epoch(trainer, self.gather)
        self._fit.closed = lambda: progress.end(trainer)
        signals.install()  # again, as Lightning handles SIGTERM without a saved end
        progress.take_limits(trainer, self.ranks.config)
        self._schedules = progress.Schedules(trainer, self._resumes)
        epoch, rates = self._fit.begin_epoch(), self._fit.rates
        rates.given.state.clear()  # state of a checkpoint, which the servers have
        rates.stepped()  # other workers may have stepped, or this one before a stop
        if self._resumes:
            progress.go_on(trainer, epoch or 0, self._fit.working().steps)
            progress.align(trainer, self.gather)
        self._look_ahead()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the gradient of the mean loss over the batch; the run itself accumulates."""
        module = self.lightning_module
        share = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        loss: torch.Tensor = super().backward(closure_loss * share, *args, **kwargs)
        return loss / share

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Push the gradients, and wait for the next batch.

        Collective and blocking: as `mpips.Worker.push`.
        """
        before = self._fit.working().steps
        outcome = super().optimizer_step(Pushing(self._fit), closure, model, **kwargs)
        progress.count(self.lightning_module.trainer, self._fit.working().steps - before)
        self._look_ahead()
        return outcome

    def _look_ahead(self) -> None:
        """Update Lightning's progress once the next batch has arrived."""
        trainer, worker = self.lightning_module.trainer, self._fit.look_ahead()
        progress.look_ahead(trainer, worker.passed)
        if worker.ended is not None:
            progress.end(trainer)
        mode, updates = self.ranks.config.mode, worker.updates
        share = updates // self.world_size if mode in ("async", "ssp") else updates
        self._schedules.step(worker.steps if mode in progress.LOCAL else share)

    def on_train_end(self) -> None:
        """Stop the run, if Lightning has ended its loop first."""
        self._fit.leave()
        self.trains = False

    def fit(self, function: Callable[[], Any], trainer: Trainer) -> None:
        """Run this rank's part of `Trainer.fit`.

        Raises:
            UserError: If mpips does not support a setting of the Trainer.
            SystemExit: With 85 if the run was saved at a signal, with 1 if it has diverged.

        Collective: yes. Blocks: until the run has ended.
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
    """Optimizer that Lightning's precision plugins step in place of the module's own."""

    def __init__(self, fit: Fit) -> None:
        self._fit, self._given = fit, fit.rates.given

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Push the gradients; see `Fit.step`."""
        return self._fit.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


class Launcher(_Launcher):
    """Launcher of `fit`, `validate`, `test` and `predict`: each rank runs its part."""

    is_interactive_compatible = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def kill(self, signum: int) -> None:
        """Do nothing: mpirun has started the ranks."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any
    ) -> Any:
        """Call Lightning's function and return its result; on a server, that of worker 0."""
        ranks, outcome = self._strategy.ranks, None
        with metrics_shared(trainer.lightning_module, self._strategy):
            if trainer.state.fn == TrainerFn.FITTING:
                return self._strategy.fit(lambda: function(*args, **kwargs), trainer)
            if ranks.works:
                try:
                    outcome = function(*args, **kwargs)
                except BaseException as error:
                    if ranks.cluster.world > 1:  # the other ranks wait for this one
                        abort.abort(abort.raised(error), abort.code_of(error))
                    raise
        shared = ranks.share(outcome if trainer.state.fn != TrainerFn.PREDICTING else None)
        return outcome if ranks.works else shared
