"""Progress of a Trainer: limits, steps, schedulers and outcome.

Lightning counts a loader's batches before an epoch begins. Servers assign batches as workers ask
for them, so that a worker knows its last one when it has pushed it.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig

from mpips.config import Config
from mpips.errors import UserError
from mpips.lightning.loader import Batches
from mpips.lightning.ranks import Ranks

BY_UPDATES = "any"  # interval of a scheduler that Lightning leaves alone


def check(trainer: Trainer) -> None:
    """Check what a Trainer wants of a run.

    Raises:
        UserError: If that cannot be.
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
    if trainer.reload_dataloaders_every_n_epochs:
        got = f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}"
        raise UserError(got, "one dataset in the whole run", "leave it out")


def options_of(trainer: Trainer, config: Config) -> dict[str, Any]:
    """Return the options of a run that a Trainer says."""
    found: dict[str, Any] = {"accumulate": trainer.accumulate_grad_batches}
    if _counts_steps(trainer, config):
        found["steps"] = trainer.max_steps
    if trainer.gradient_clip_val and not _clips(trainer):
        found["clip"] = float(trainer.gradient_clip_val)
    return found


def _counts_steps(trainer: Trainer, config: Config) -> bool:
    """Return whether the run ends by `max_steps`; Lightning cuts rounds of several steps."""
    return trainer.max_steps != -1 and config.mode not in ("local_sgd", "easgd")


def _steps(trainer: Trainer) -> bool:
    """Return whether Lightning steps optimizers and schedulers, not the module."""
    return bool(trainer.lightning_module.automatic_optimization)


def _clips(trainer: Trainer) -> bool:
    """Return whether the module clips by itself, a worker's gradient."""
    return bool(is_overridden("configure_gradient_clipping", trainer.lightning_module))


def saved(trainer: Trainer, resumes: bool) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """Return what the optimizer begins with, and how many epochs are left.

    They are those of `Trainer.fit(ckpt_path=)`. Where a run of mpips `resumes`, it has its own.

    Raises:
        UserError: If none is left: Lightning would begin no loop, which the servers wait for.
    """
    total, state = trainer.fit_loop.max_epochs, None
    done = 0 if resumes else trainer.fit_loop.epoch_progress.current.processed  # of a fit before
    found = trainer._checkpoint_connector._loaded_checkpoint
    if found and not resumes:
        states = found.get("optimizer_states") or [{}]
        state = states[0] if states[0].get("state") else None
        done = found["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    without_end = total == -1 or trainer.max_steps != -1
    if not without_end and total <= done:
        got = f"fit() of max_epochs={total}, behind {done} epochs"
        raise UserError(got, "epochs that are left", "give the Trainer more of them")
    return state, {} if without_end else {"epochs": total - done}


def train_batches(trainer: Trainer) -> Batches:
    """Return what a Trainer trains on.

    Raises:
        UserError: If it has several loaders.
    """
    found = trainer.fit_loop._combined_loader.flattened
    if len(found) != 1:
        got, remedy = f"{len(found)} train_dataloaders", "make one dataset of them"
        raise UserError(got, "one: each batch is of one", remedy)
    return found[0]


def take_limits(trainer: Trainer, config: Config) -> None:
    """Have the run say when all is over, and clip gradients."""
    if _counts_steps(trainer, config):
        trainer.fit_loop.epoch_loop.max_steps = -1
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
        trainer.val_check_batch = math.inf  # at the end of an epoch, wherever that is
    if not _clips(trainer):
        trainer.gradient_clip_val = None


def leave_end_open(trainer: Trainer) -> None:
    """Have the run say when the pass that begins is over, not the number of batches."""
    loop = trainer.fit_loop
    loop.max_batches, loop._data_fetcher.length = train_batches(trainer).share, None
    loop._combined_loader.limits = None


def look_ahead(trainer: Trainer, passed: bool) -> None:
    """Tell Lightning whether the batch that was pushed was the last one of its epoch."""
    loop = trainer.fit_loop
    if passed:
        loop.epoch_loop.batch_progress.is_last_batch = True
    elif loop.epoch_loop.batch_progress.current.ready >= loop.max_batches:
        loop.max_batches = loop.epoch_loop.batch_progress.current.ready + 2


def go_on(trainer: Trainer, epoch: int, steps: int) -> None:
    """Have a Trainer go on in an epoch of a run that was resumed, behind so many steps."""
    loop = trainer.fit_loop
    progress, step = loop.epoch_progress.current, loop.epoch_loop.automatic_optimization
    progress.ready = progress.started = progress.processed = progress.completed = epoch
    total = step.optim_progress.optimizer.step.total
    total.ready = total.completed = loop.epoch_loop._batches_that_stepped = steps
    loop.restarting = loop.epoch_loop.restarting = False
    loop.reset_restart_stage()
    loop.epoch_loop.reset_restart_stage()
    for config in trainer.lr_scheduler_configs if _steps(trainer) else ():
        while config.interval == "epoch" and _count(config) < epoch // config.frequency:
            config.scheduler.step()


def end(trainer: Trainer) -> None:
    """Have a Trainer end: the run is over."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


def take_schedulers(trainer: Trainer) -> None:
    """Have Lightning leave the schedulers alone that count steps, if it has them at all."""
    for config in trainer.lr_scheduler_configs if _steps(trainer) else ():
        if config.interval == "step" and not config.reduce_on_plateau:
            config.interval = BY_UPDATES


class Schedules:
    """The schedulers that count steps, as the run begins.

    Args:
        configs: All schedulers.
        resumes: Whether a run that goes on has counted its steps before.
    """

    def __init__(self, configs: Iterable[LRSchedulerConfig], resumes: bool) -> None:
        counted = [config for config in configs if config.interval == BY_UPDATES]
        self._begun = [(config, 0 if resumes else _count(config)) for config in counted]

    def step(self, steps: int) -> None:
        """Step them up to so many steps of the run: updates of the model, a worker's share."""
        for config, before in self._begun:
            while _count(config) - before < steps // config.frequency:
                config.scheduler.step()


def _count(config: LRSchedulerConfig) -> int:
    return int(config.scheduler.last_epoch)


def share_outcome(trainer: Trainer, ranks: Ranks) -> None:
    """Have every rank know what worker 0 does: checkpoints, metrics and progress.

    Collective: yes.
    """
    loop = trainer.fit_loop
    step = loop.epoch_loop.automatic_optimization.optim_progress
    states = {one.state_key: one.state_dict() for one in trainer.callbacks}
    mine = states, dict(trainer.callback_metrics), loop.epoch_progress.state_dict()
    states, metrics, epochs, steps = ranks.share((*mine, step.state_dict()))
    if ranks.global_rank() == 0:
        return
    trainer.callback_metrics.update(metrics)
    for one in trainer.callbacks:
        if states.get(one.state_key):
            one.load_state_dict(states[one.state_key])
    if not ranks.works:
        loop.epoch_progress.load_state_dict(epochs)
        step.load_state_dict(steps)
