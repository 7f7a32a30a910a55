"""Progress of a Trainer: limits, steps, schedulers and outcome.

Lightning counts a loader's batches before an epoch begins. But servers assign batches on demand, so
a worker knows only after its push whether the batch was its last one.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig

from mpips.config import Config
from mpips.errors import UserError
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Ranks

BY_UPDATES = "any"  # interval of a scheduler that Lightning does not step


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
        if isinstance(one, (StochasticWeightAveraging, WeightAveraging)):
            got, remedy = f"a {type(one).__name__}, which sets parameters", "give Strategy(ema=)"
            raise UserError(got, "none: the run alone sets them", remedy)
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
    return trainer.max_steps != -1 and config.mode not in ("local_sgd", "easgd")


def _steps(trainer: Trainer) -> bool:
    """Return whether Lightning steps optimizers and schedulers; otherwise the module does."""
    return bool(trainer.lightning_module.automatic_optimization)


def _clips(trainer: Trainer) -> bool:
    """Return whether the module itself clips a worker's gradient."""
    return bool(is_overridden("configure_gradient_clipping", trainer.lightning_module))


def saved(
    trainer: Trainer, config: Config, resumes: bool
) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """Return the initial optimizer state, and an option with the remaining epochs or steps.

    They are from the checkpoint of `Trainer.fit(ckpt_path=)`, unless a run of mpips `resumes`,
    which has its own.

    Raises:
        UserError: If none is left: Lightning would not begin a loop, and servers would wait.
    """
    steps, state = trainer.max_steps != -1, None
    total = trainer.max_steps if steps else trainer.fit_loop.max_epochs
    progress = trainer.fit_loop.epoch_progress.current  # of an earlier fit
    done = 0 if resumes or steps else progress.processed
    checkpoint = trainer._checkpoint_connector._loaded_checkpoint
    if checkpoint and not resumes:
        states = checkpoint.get("optimizer_states") or [{}]
        state = states[0] if states[0].get("state") else None
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        done = checkpoint["global_step"] if steps else progress["processed"]
    what = "steps" if steps else "epochs"
    if -1 < total <= done:
        got = f"fit() of max_{what}={total}, behind {done} {what}"
        raise UserError(got, f"{what} that are left", "give the Trainer more of them")
    counted = total != -1 and (not steps or _counts_steps(trainer, config))
    return state, {what: total - done} if counted else {}


def train_batches(trainer: Trainer) -> Batches:
    """Return the training batches of a Trainer.

    Raises:
        UserError: If it has several loaders.
    """
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


def leave_end_open(trainer: Trainer) -> None:
    """Let the run end the pass that begins, rather than a number of batches."""
    loop = trainer.fit_loop
    loop.max_batches, loop._data_fetcher.length = train_batches(trainer).share, None
    loop._combined_loader.limits = None


def look_ahead(trainer: Trainer, passed: bool) -> None:
    """Set whether the batch that was pushed was the last one of its epoch."""
    loop = trainer.fit_loop
    if passed:
        loop.epoch_loop.batch_progress.is_last_batch = True
    elif loop.epoch_loop.batch_progress.current.ready >= loop.max_batches:
        loop.max_batches = loop.epoch_loop.batch_progress.current.ready + 2


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
            while _count(config) < epoch // config.frequency:
                config.scheduler.step()


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
        configs: All schedulers, at the beginning of the run.
        resumes: Whether a resumed run has counted their steps already.
    """

    def __init__(self, configs: Iterable[LRSchedulerConfig], resumes: bool) -> None:
        counted = [config for config in configs if config.interval == BY_UPDATES]
        self._counted = [(config, 0 if resumes else _count(config)) for config in counted]

    def step(self, steps: int) -> None:
        """Step them up to a number of steps of the run, a worker's share of the updates."""
        for config, before in self._counted:
            while _count(config) - before < steps // config.frequency:
                config.scheduler.step()


def _count(config: LRSchedulerConfig) -> int:
    return int(config.scheduler.last_epoch)


def share_outcome(trainer: Trainer, ranks: Ranks) -> None:
    """Copy worker 0's checkpoints, metrics and steps to every rank, and the most epochs of any.

    A late worker may get no batch of the last epochs.

    Collective: yes.
    """
    loop = trainer.fit_loop
    step = loop.epoch_loop.automatic_optimization.optim_progress
    every = ranks.gather(loop.epoch_progress.state_dict(), everywhere=True)
    loop.epoch_progress.load_state_dict(max(every, key=lambda one: one["current"]["processed"]))
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    mine = states, dict(trainer.callback_metrics), step.state_dict()
    states, metrics, steps = ranks.share(mine)
    if ranks.global_rank() == 0:
        return
    trainer.callback_metrics.update(metrics)
    for callback in trainer.callbacks:
        if states.get(callback.state_key):
            callback.load_state_dict(states[callback.state_key])
    if not ranks.works:
        step.load_state_dict(steps)
