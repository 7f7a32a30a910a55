"""Progress of a Trainer: limits, steps, schedulers and outcome.

Lightning counts a loader's batches before an epoch begins. But servers assign batches on demand, so
a worker knows only after its push whether the batch was its last one.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig

from mpips.config import Config
from mpips.errors import UserError
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Ranks

AVERAGES = (StochasticWeightAveraging, WeightAveraging)
SETTERS = (*AVERAGES, BatchSizeFinder, LearningRateFinder, ModelPruning)
BY_UPDATES = "any"  # interval of a scheduler that Lightning does not step
LOCAL = ("local_sgd", "easgd")  # modes whose workers make steps of their own


def check(trainer: Trainer) -> None:
    """Check that mpips supports the settings of a Trainer.

    Raises:
        UserError: If it does not support one.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        got, remedy = "precision='16-mixed', whose GradScaler leaves out steps", "use 'bf16-mixed'"
        raise UserError(got, "a push of each batch", remedy)
    if not isinstance(trainer.accelerator, CPUAccelerator):
        got = f"accelerator {type(trainer.accelerator).__name__}"
        raise UserError(got, "Trainer(accelerator='cpu'): no other was tried with this strategy")
    by_value = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() != "norm"
    if trainer.gradient_clip_val and by_value:
        raise UserError("gradient_clip_algorithm='value'", "'norm', which servers and rounds know")
    if any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks):
        got, remedy = "a GradientAccumulationScheduler", "Trainer(accumulate_grad_batches=)"
        raise UserError(got, "as many batches a step in the whole run", remedy)
    for one in trainer.callbacks:
        if isinstance(one, SETTERS):
            got, averages = f"a {type(one).__name__}", isinstance(one, AVERAGES)
            remedy = "give Strategy(ema=)" if averages else "use it in a program of one process"
            raise UserError(f"{got}, which sets parameters", "none: the run does it", remedy)
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise UserError("sync_batchnorm=True", "False: only running means are shared")
    if trainer.reload_dataloaders_every_n_epochs:
        got = f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}"
        raise UserError(got, "one dataset in the whole run", "leave it out")


def options_of(trainer: Trainer) -> dict[str, Any]:
    """Return the options of a run for a Trainer's arguments."""
    options: dict[str, Any] = {"accumulate": trainer.accumulate_grad_batches}
    if trainer.gradient_clip_val and not _clips(trainer):
        options["clip"] = float(trainer.gradient_clip_val)
    return options


def _counts_steps(trainer: Trainer, config: Config) -> bool:
    """Return whether the run counts `max_steps`; Lightning does in rounds of several steps."""
    return trainer.max_steps != -1 and config.mode not in LOCAL


def _steps(trainer: Trainer) -> bool:
    """Return whether Lightning steps optimizers and schedulers; otherwise the module does."""
    return bool(trainer.lightning_module.automatic_optimization)


def _clips(trainer: Trainer) -> bool:
    """Return whether the module itself clips a worker's gradient."""
    return bool(is_overridden("configure_gradient_clipping", trainer.lightning_module))


def optimizer_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state of the optimizer in a checkpoint of Lightning; None if it has none."""
    states = checkpoint.get("optimizer_states") or [{}]
    return states[0] if states[0].get("state") else None


def remaining(
    trainer: Trainer, config: Config, checkpoint: Mapping[str, Any], resumes: bool
) -> dict[str, int]:
    """Return the run's option ``epochs`` or ``steps``: those that the Trainer has still to make.

    It has made those of the checkpoint that it begins with, or else of an earlier fit. A run of
    mpips that `resumes` counts its own.

    Raises:
        UserError: If none is left: Lightning would not begin a loop, and servers would wait.
    """
    by_steps, loop = trainer.max_steps != -1, trainer.fit_loop
    what, limit = ("steps", trainer.max_steps) if by_steps else ("epochs", loop.max_epochs)
    if resumes:
        made = 0
    elif checkpoint:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        made = checkpoint["global_step"] if by_steps else epochs
    else:
        made = trainer.global_step if by_steps else loop.epoch_progress.current.processed
    if limit == -1:
        return {}
    if limit <= made:
        got = f"fit() of max_{what}={limit}, behind {made} {what}"
        raise UserError(got, f"{what} that are left", "give the Trainer more of them")
    return {what: limit - made} if not by_steps or _counts_steps(trainer, config) else {}


def train_batches(trainer: Trainer) -> Batches:
    """Return the training batches of a Trainer.

    Raises:
        UserError: If it has several loaders, or no batch.
    """
    if trainer.limit_train_batches == 0:
        raise UserError("fit() with limit_train_batches=0", "batches to train on")
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) != 1:
        got, remedy = f"{len(loaders)} train_dataloaders", "make one dataset of them"
        raise UserError(got, "one: each batch is of one", remedy)
    return loaders[0]


def take_limits(trainer: Trainer, config: Config) -> None:
    """Remove the limits and the clipping of a Trainer that the run has in its own options."""
    if _counts_steps(trainer, config):
        trainer.fit_loop.epoch_loop.max_steps = -1
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
        trainer.val_check_batch = math.inf  # at the end of each epoch, after any number of batches
    if not _clips(trainer):
        trainer.gradient_clip_val = None


def open_epoch(trainer: Trainer, gather: Callable[[Any], list[Any]]) -> None:
    """Let the run end the pass that begins, rather than a number of batches; see also `align`."""
    align(trainer, gather)
    loop = trainer.fit_loop
    loop.max_batches, loop._data_fetcher.length = train_batches(trainer).share, None
    loop._combined_loader.limits = None


def align(trainer: Trainer, gather: Callable[[Any], list[Any]]) -> None:
    """Set the steps and batches made to the most of any worker, and what was saved to worker 0's.

    In the last round of an epoch some workers have no batch, and others validate and save alone.
    All must come alike to what they do every so many steps or batches.

    Args:
        trainer: The Trainer, at the beginning of an epoch, or behind the run.
        gather: Returns the values of the workers that wait for each other, by global rank.
    """
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    counted = steps, loop.manual_optimization.optim_step_progress, loop.batch_progress
    made = loop._batches_that_stepped, *(each.total.ready for each in counted)
    saved = [each for each in trainer.callbacks if isinstance(each, (Checkpoint, EarlyStopping))]
    found = gather((made, [each.state_dict() for each in saved]))
    loop._batches_that_stepped, *most = map(max, zip(*(one[0] for one in found), strict=True))
    for progress, number in zip(counted, most, strict=True):
        progress.total.increment_by(number - progress.total.ready)
    if len(found) > 1:
        for callback, state in zip(saved, found[0][1], strict=True):
            callback.load_state_dict(state)


def look_ahead(trainer: Trainer, passed: bool) -> None:
    """Set whether the batch that was pushed was the last one of its epoch."""
    loop = trainer.fit_loop
    if passed:
        loop.epoch_loop.batch_progress.is_last_batch = True
    elif loop.epoch_loop.batch_progress.current.ready >= loop.max_batches:
        loop.max_batches = loop.epoch_loop.batch_progress.current.ready + 2


def count(trainer: Trainer, steps: int) -> None:
    """Count the steps of a push: also one that ends an epoch, and has fewer batches than others."""
    loop = trainer.fit_loop.epoch_loop
    counted = int(loop._accumulated_batches_reached())  # by Lightning
    loop.automatic_optimization.optim_progress.optimizer.step.increment_by(steps - counted)


def in_batch(trainer: Trainer) -> bool:
    """Return whether a Trainer is at a batch, or at a validation behind some batches of an epoch.

    Otherwise it is at the end of an epoch, to which all workers come.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    validates = trainer.validating and trainer.val_check_batch != math.inf
    return bool(batches.completed < batches.ready or validates)


def go_on(trainer: Trainer, epoch: int, steps: int) -> None:
    """Set a Trainer to an epoch of a resumed run, after a number of steps."""
    loop = trainer.fit_loop
    progress, step = loop.epoch_progress.current, loop.epoch_loop.automatic_optimization
    progress.ready = progress.started = progress.processed = progress.completed = epoch
    total = step.optim_progress.optimizer.step.total
    total.ready = total.completed = loop.epoch_loop._batches_that_stepped = steps
    loop.restarting = loop.epoch_loop.restarting = False
    loop.reset_restart_stage()
    loop.epoch_loop.reset_restart_stage()
    for config in trainer.lr_scheduler_configs if _steps(trainer) else ():
        if config.interval == "epoch" and not config.reduce_on_plateau:  # which needs metrics
            for _ in range(_count(config), epoch // config.frequency):
                trainer.lightning_module.lr_scheduler_step(config.scheduler, None)


def end(trainer: Trainer) -> None:
    """Make a Trainer stop, as the run has ended."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


def take_schedulers(trainer: Trainer) -> None:
    """Keep Lightning from stepping the schedulers that count steps; `Schedules` steps them."""
    for config in trainer.lr_scheduler_configs if _steps(trainer) else ():
        if config.interval == "step" and not config.reduce_on_plateau:
            config.interval = BY_UPDATES


class Schedules:
    """Schedulers that count steps.

    Args:
        trainer: The Trainer, at the beginning of the run.
        resumes: Whether a resumed run has made steps with them already.
    """

    def __init__(self, trainer: Trainer, resumes: bool) -> None:
        self._module = trainer.lightning_module
        counted = [one for one in trainer.lr_scheduler_configs if one.interval == BY_UPDATES]
        self._counted = [(one, _count(one) if resumes else 0) for one in counted]

    def step(self, steps: int) -> None:
        """Step them up to a number of steps of the run."""
        for k, (config, made) in enumerate(self._counted):
            due = max(made, steps // config.frequency)
            for _ in range(made, due):
                self._module.lr_scheduler_step(config.scheduler, None)
            self._counted[k] = config, due


def _count(config: LRSchedulerConfig) -> int:
    """Return how often a scheduler has stepped; a chain of schedulers does not know it itself."""
    scheduler = config.scheduler
    while not hasattr(scheduler, "last_epoch") and hasattr(scheduler, "_schedulers"):
        scheduler = scheduler._schedulers[0]
    return int(getattr(scheduler, "last_epoch", 0))


def share_outcome(trainer: Trainer, ranks: Ranks) -> None:
    """Copy worker 0's checkpoints, metrics and steps to every rank, and the most epochs of any.

    In rounds the steps are the most of any, too. A late worker may get no batch of the last epochs.

    Collective: yes.
    """
    loop = trainer.fit_loop
    if ranks.config.in_rounds:
        align(trainer, partial(ranks.gather, everywhere=True))
    progress = (
        loop.epoch_loop.automatic_optimization.optim_progress,
        loop.epoch_loop.manual_optimization.optim_step_progress,
    )
    every = ranks.gather(loop.epoch_progress.state_dict(), everywhere=True)
    loop.epoch_progress.load_state_dict(max(every, key=lambda one: one["current"]["processed"]))
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    mine = states, dict(trainer.callback_metrics), [each.state_dict() for each in progress]
    states, metrics, steps = ranks.share(mine)
    if ranks.global_rank() == 0:
        return
    trainer.callback_metrics.update(metrics)
    for callback in trainer.callbacks:
        if states.get(callback.state_key):
            callback.load_state_dict(states[callback.state_key])
    for each, state in zip(progress, steps, strict=True):
        each.load_state_dict(state)
