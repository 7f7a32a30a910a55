"""Optimizer of a training loop: pushes gradients, and carries the rate."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mpips.config import Config
from mpips.config.groups import members, parse_groups
from mpips.errors import UserError
from mpips.library.optimizers import example


class Losses:
    """Losses of a step, which is not told them: what ``backward`` was called of.

    Hooks of what is trained notice each pass (`notice`); PyTorch has none that is told the loss. So
    the arguments of `torch.autograd.backward` are read from the stack below the first of them.

    A call counts with what it differentiates: the sum of its tensors, each times its gradient.
    Tensors of several elements, such as the output of a part of the model, count only where a step
    has no scalar.
    """

    def __init__(self) -> None:
        self._scalars: list[list[torch.Tensor]] = []  # of each call
        self._others: list[list[torch.Tensor]] = []
        self._noticed = False  # the pass that goes on

    def notice(self) -> None:
        """Note the call of ``backward`` that goes on, once; called by hooks of the pass."""
        if self._noticed:
            return
        self._noticed = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)  # as DDP does
        tensors, grads = _called_with()
        several = tensors if isinstance(tensors, Sequence) else (tensors,)
        each = grads if isinstance(grads, Sequence) else (grads,) * len(several)
        self._note(several, each)

    def _end_pass(self) -> None:
        self._noticed = False

    def _note(self, tensors: Sequence[Any], grads: Sequence[torch.Tensor | None]) -> None:
        pairs = zip(tensors, grads, strict=False)
        given = [(t.detach(), g) for t, g in pairs if isinstance(t, torch.Tensor)]
        scalars = [(t, g) for t, g in given if t.numel() == 1]
        if given and (scalars or not self._scalars):
            found = [(t if g is None else t * g.detach()).sum() for t, g in scalars or given]
            (self._scalars if scalars else self._others).append(found)

    def mean(self) -> float | None:
        """Return the mean over the calls of the step; None without any."""
        calls = self._scalars or self._others
        return sum(float(loss) for call in calls for loss in call) / len(calls) if calls else None

    def clear(self) -> None:
        """Forget them: a step begins."""
        self._scalars.clear()
        self._others.clear()
        self._noticed = False  # where a pass has raised


def _called_with() -> tuple[Any, Any]:
    """Return `tensors` and `grad_tensors` of the call of `torch.autograd.backward` that goes on.

    Hooks run in the thread of the call; on a device, in one of PyTorch's. Of calls within another,
    as by `torch.utils.checkpoint`, the outer one is taken.
    """
    return _arguments(sys._getframe()) or next(
        filter(None, map(_arguments, sys._current_frames().values())), ((), None)
    )


def _arguments(frame: FrameType | None) -> tuple[Any, Any] | None:
    found = None
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            found = frame
        frame = frame.f_back
    return None if found is None else (found.f_locals["tensors"], found.f_locals["grad_tensors"])


class Optimizer(torch.optim.Optimizer):
    """Pushes gradients; the servers, or in rounds the owners, have the update rule.

    A scheduler of `torch.optim.lr_scheduler` works on it: what it makes of the rates goes with the
    next push as a factor, by which the run's rate is multiplied there, beside its `schedule`. Its
    `state_dict` has rates alone: what the rule keeps is with its owners, and
    `mpips.torch.optimizer_state` reads it from a checkpoint, and ``run(optimizer_state=)`` begins
    with such a state. Each worker has one; nobody else makes any.

    Args:
        groups: Parameters and rate of each group: ``{"params": [...], "lr": 1e-3}``.
        push: Pushes the gradients, given the factor.
        drop: Drops them.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        push: Callable[[float], None],
        drop: Callable[[], None],
    ) -> None:
        super().__init__(groups, {})
        self._rates = [float(group["lr"]) for group in groups]
        self._decays = [group.get("weight_decay") for group in groups]
        self._push, self._drop = push, drop
        self._refusal: RemovableHandle | None = None  # of steps of others
        self._opt_called = False  # which schedulers look at

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that are there, and their losses; a step begins without any.

        Args:
            set_to_none: Without effect, as in torch's signature.

        Collective: no. Blocks: no.
        """
        self._drop()

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Push the gradients; the parameters are new when the next batch is taken.

        Args:
            closure: Computes the gradients, and returns the loss, as with torch's optimizers.

        Returns:
            What `closure` does.

        Raises:
            UserError: If there is no gradient, or it is of no batch; if rates cannot be.

        Collective and blocking: as `mpips.Worker.push`.
        """
        return self._observed_step(closure) if self._is_observed() else self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch has each step observed: 0.2 ms

    def _step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = closure() if closure is not None else None
        self._push(self.factor())
        return loss

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _is_observed(self) -> bool:
        """Return whether a profiler runs, or hooks are to be called."""
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        others = len(_global_optimizer_pre_hooks) > (self._refusal is not None)
        of_all = others or _global_optimizer_post_hooks
        return bool(torch.autograd._profiler_enabled() or own or of_all)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a `GradScaler` that is enabled asks first, in a step that it may leave out.

        Raises:
            UserError: Always.
        """
        got = "a step by a GradScaler, which leaves out those of gradients that are not finite"
        remedy = "train in bfloat16, which needs no scaler: torch.autocast(..., torch.bfloat16)"
        raise UserError(got, "opt.step() for each batch, with the gradient of its loss", remedy)

    def note(self, updates: int) -> None:
        """Note how often the model was updated: schedulers warn of a step before the first."""
        self._opt_called |= updates > 0  # by another worker, or before the run was resumed

    def begin(self) -> None:
        """Let no optimizer of torch change the run's parameters from here on until `end`."""
        self._refusal = register_optimizer_step_pre_hook(self._refuse_others)

    def end(self) -> None:
        """Let optimizers of torch change these parameters again."""
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None

    def _refuse_others(self, other: torch.optim.Optimizer, *_: Any) -> None:
        if other is self:
            return
        mine, theirs = (
            {id(p) for group in opt.param_groups for p in group["params"]} for opt in (self, other)
        )
        if mine & theirs:
            kind = type(other)
            got = f"a step of {kind.__module__}.{kind.__qualname__} over parameters of the run"
            remedy = f"name the rule in mpips.torch.run(optimizer={example(kind)})"
            raise UserError(got, "worker.optimizer.step(), which pushes to the servers", remedy)

    def factor(self) -> float:
        """Return what the rates are multiplied by, compared with those of the run.

        Raises:
            UserError: If it is not the same for all groups, or not a finite number >= 0; if a
                weight decay has changed.
        """
        decays = [group.get("weight_decay") for group in self.param_groups]
        if decays != self._decays:
            got = f"weight decays {decays} of the parameter groups, which a push does not carry"
            remedy = "give them to the run: groups=[mpips.Group(..., weight_decay=...)]"
            raise UserError(got, f"{self._decays}, as in the run", remedy)
        rates = [float(group["lr"]) for group in self.param_groups]
        if rates == self._rates:
            return 1.0
        factors = [new / rate for new, rate in zip(rates, self._rates, strict=True) if rate]
        least, most = min(factors, default=1.0), max(factors, default=1.0)
        if not 0 <= least <= most < math.inf:
            got = f"rates {rates} of the parameter groups"
            raise UserError(got, "finite numbers >= 0")
        if most - least > 1e-9 * most:
            got = f"rates of the parameter groups that went different ways, by {factors}"
            remedy = "use a scheduler that multiplies all rates by the same"
            raise UserError(got, "one factor: a push carries one", remedy)
        return most

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while this is made; later there is an error."""
        if hasattr(self, "_push"):
            got, remedy = "a parameter group that is added in a run", "name them in run(groups=)"
            raise UserError(got, "the groups that it began with", remedy)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the rates, and warn that this is all."""
        what = "state_dict() of a run's optimizer has its rates alone"
        where = "mpips.torch.optimizer_state(run) has the update rule's state, from a checkpoint"
        warnings.warn(f"{what}: {where}", stacklevel=2)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rates of such a state.

        Raises:
            UserError: If there is more in it: the servers have that, and a resumed run restores it.
            ValueError: If it is of other groups.
        """
        if state_dict["state"]:
            got, expected = "load_state_dict() of more than rates", "that a run begins with it"
            remedy = "give it to mpips.torch.run(..., optimizer_state=state)"
            raise UserError(got, expected, f'{remedy}; resume="auto" has its own')
        super().load_state_dict(state_dict)


def param_groups(parameters: Mapping[str, Any], config: Config) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with the rate and weight decay of each.

    First comes what is of no group of the run, if anything is; then each of these.

    Args:
        parameters: The trained ones, by name.
        config: Of the run.
    """
    groups, found = parse_groups(config.groups), list[dict[str, Any]]()
    for group, names in zip((None, *groups), members(list(parameters), groups), strict=True):
        lr, decay = config.learning_rate, config.weight_decay
        if group is not None:
            lr = lr if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
        if names or not parameters:  # where all are tables, there is a rate
            params = [parameters[name] for name in names]
            found.append({"params": params, "lr": lr, "weight_decay": decay})
    return found
