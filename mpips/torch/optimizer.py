"""Optimizer of a training loop: it pushes gradients and the learning rate."""

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
    """Losses of a step, found from the calls of ``backward``, as `step` does not get them.

    Hooks of trained parameters report each backward pass (`notice`). PyTorch has no hook that gets
    the loss, so the first hook of a pass reads the arguments of `torch.autograd.backward` from the
    stack.

    A call counts with the value that it differentiates: the sum of its tensors, each times its
    gradient. Tensors of several elements, such as the output of a part of the model, count only in
    a step without scalars.
    """

    def __init__(self) -> None:
        self._scalars: list[list[torch.Tensor]] = []  # a list of each call
        self._others: list[list[torch.Tensor]] = []
        self._noticed = False  # whether the current pass is noted

    def notice(self) -> None:
        """Note the current call of ``backward``, once. Called by hooks of the pass."""
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
            terms = [(t if g is None else t * g.detach()).sum() for t, g in scalars or given]
            (self._scalars if scalars else self._others).append(terms)

    def mean(self) -> float | None:
        """Return the mean over the calls of the step; None if there was none."""
        calls = self._scalars or self._others
        return sum(float(loss) for call in calls for loss in call) / len(calls) if calls else None

    def clear(self) -> None:
        """Remove all losses, at the beginning of a step."""
        self._scalars.clear()
        self._others.clear()
        self._noticed = False  # an exception in a pass leaves it set


def _called_with() -> tuple[Any, Any]:
    """Return `tensors` and `grad_tensors` of the current call of `torch.autograd.backward`.

    On the host, hooks run in the thread of the call. For a device they run in a thread of PyTorch,
    so all threads are searched. Of nested calls, as by `torch.utils.checkpoint`, the outermost
    counts.
    """
    return _arguments(sys._getframe()) or next(
        filter(None, map(_arguments, sys._current_frames().values())), ((), None)
    )


def _arguments(frame: FrameType | None) -> tuple[Any, Any] | None:
    outermost = None
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            outermost = frame.f_locals
        frame = frame.f_back
    return None if outermost is None else (outermost["tensors"], outermost["grad_tensors"])


class Optimizer(torch.optim.Optimizer):
    """Optimizer that pushes gradients; the servers, or in rounds the owners, apply the update rule.

    A scheduler of `torch.optim.lr_scheduler` works on it. The next push carries the change of the
    rates as a factor, which multiplies the run's rate, along with the run's `schedule`. The
    `state_dict` has only rates, since the owners hold the state of the rule.
    `mpips.torch.optimizer_state` reads that state from a checkpoint, and
    ``run(optimizer_state=...)`` starts with it. Only a `Worker` makes an instance.

    Args:
        groups: Parameters and rate of each group: ``{"params": [...], "lr": 1e-3}``.
        push: Pushes the gradients, with the factor of the rate.
        drop: Drops the gradients.
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
        self._refusal: RemovableHandle | None = None  # hook that refuses other optimizers' steps
        self._opt_called = False  # torch's schedulers read it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the current gradients and their losses.

        Args:
            set_to_none: No effect; part of torch's signature.

        Collective: no. Blocks: no.
        """
        self._drop()

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Push the gradients. The parameters change when the next batch is taken.

        Args:
            closure: Computes the gradients, and returns the loss, as with torch's optimizers.

        Returns:
            The result of `closure`.

        Raises:
            UserError: If there is no gradient, or no current batch; if rates are invalid.

        Collective and blocking: as `mpips.Worker.push`.
        """
        return self._observed_step(closure) if self._is_observed() else self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps each step, at 0.2 ms

    def _step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = closure() if closure is not None else None
        self._push(self.factor())
        return loss

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _is_observed(self) -> bool:
        """Return whether a profiler runs, or hooks of steps are registered."""
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        others = len(_global_optimizer_pre_hooks) > (self._refusal is not None)
        global_hooks = others or _global_optimizer_post_hooks
        return bool(torch.autograd._profiler_enabled() or own or global_hooks)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Property that an enabled `GradScaler` reads first in a step; refuses such a step.

        Raises:
            UserError: Always.
        """
        got = "a step by a GradScaler, which leaves out those of gradients that are not finite"
        remedy = "train in bfloat16, which needs no scaler: torch.autocast(..., torch.bfloat16)"
        raise UserError(got, "opt.step() for each batch, with the gradient of its loss", remedy)

    def note(self, updates: int) -> None:
        """Note the number of updates, since schedulers warn if they step before the optimizer."""
        self._opt_called |= updates > 0  # also by other workers, or before a resume

    def begin(self) -> None:
        """Refuse steps of torch's own optimizers over the run's parameters until `end`."""
        self._refusal = register_optimizer_step_pre_hook(self._refuse_others)

    def end(self) -> None:
        """Allow steps of torch's own optimizers again."""
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
        """Return the factor of the rates, relative to those of the run.

        Raises:
            UserError: If it differs between groups, or is not a finite number >= 0; if a weight
                decay has changed.
        """
        decays = [group.get("weight_decay") for group in self.param_groups]
        if decays != self._decays:
            got = f"weight decays {decays} of the parameter groups, which a push does not carry"
            remedy = "give them to the run: groups=[mpips.Group(..., weight_decay=...)]"
            raise UserError(got, f"{self._decays}, as in the run", remedy)
        rates = [float(group["lr"]) for group in self.param_groups]
        if rates == self._rates:
            return 1.0
        both = [*zip(rates, self._rates, strict=True)]
        if any(new and not rate for new, rate in both):
            got = f"rates {rates} of the parameter groups, which began with {self._rates}"
            remedy = "give the group its rate in run(), and freeze it by requires_grad_(False)"
            raise UserError(got, "a rate of 0 that stays 0: a push carries a factor", remedy)
        factors = [new / rate for new, rate in both if rate]
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
        """Add a group during construction; refuse it in a run.

        Raises:
            UserError: In a run.
        """
        if hasattr(self, "_push"):
            got, remedy = "a parameter group that is added in a run", "name them in run(groups=)"
            raise UserError(got, "the groups that it began with", remedy)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the rates, and warn that there is no other state."""
        what = "state_dict() of a run's optimizer has its rates alone"
        where = "mpips.torch.optimizer_state(run) has the update rule's state, from a checkpoint"
        warnings.warn(f"{what}: {where}", stacklevel=2)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the rates of a state dict.

        Raises:
            UserError: If it has more than rates: the servers hold the rest, and a resumed run
                restores it.
            ValueError: If it has other groups.
        """
        if state_dict["state"]:
            got, expected = "load_state_dict() of more than rates", "that a run begins with it"
            remedy = "give it to mpips.torch.run(..., optimizer_state=state)"
            raise UserError(got, expected, f'{remedy}; resume="auto" has its own')
        super().load_state_dict(state_dict)


def param_groups(parameters: Mapping[str, Any], config: Config) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, with the rate and weight decay of each.

    The first group has the parameters of no group of the run, if there are any. The run's groups
    follow.

    Args:
        parameters: The trained parameters, by name.
        config: Configuration of the run.
    """
    groups, in_torch = parse_groups(config.groups), list[dict[str, Any]]()
    for group, names in zip((None, *groups), members(list(parameters), groups), strict=True):
        lr, decay = config.learning_rate, config.weight_decay or 0.0
        if group is not None:
            lr = lr if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
        if names or not parameters:  # a model of tables alone needs a group for its rate
            params = [parameters[name] for name in names]
            in_torch.append({"params": params, "lr": lr, "weight_decay": decay})
    return in_torch
