"""Optimizer of a Lightning module: the servers' rule and its rates."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from mpips.errors import UserError
from mpips.torch.optimizer import Optimizer

RATE = "lr"


def only_optimizer(optimizers: Sequence[Any]) -> torch.optim.Optimizer:
    """Return the only optimizer of a module.

    Raises:
        UserError: If there is none, or there are several.
    """
    if len(optimizers) != 1 or not optimizers[0].param_groups:
        names = [type(o).__name__ for o in optimizers if o.param_groups] or ["nothing"]
        got = f"configure_optimizers that returns {' and '.join(names)}"
        remedy = "give what trains apart a parameter group of its own"
        raise UserError(got, "one optimizer: the servers have one update rule", remedy)
    return optimizers[0]


def as_made(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with the rates that it had before a scheduler changed them."""
    copied = copy.copy(optimizer)
    known = {"params", *optimizer.defaults}
    copied.param_groups = [
        {key: value for key, value in group.items() if key in known}
        | {RATE: group.get("initial_lr", group[RATE])}
        for group in optimizer.param_groups
    ]
    return copied


class Rates:
    """Copies the rates of the user's optimizer, which schedulers change, to the one that pushes.

    Args:
        given: The user's optimizer. It makes no step.
        ours: The worker's optimizer, which pushes.
    """

    def __init__(self, given: torch.optim.Optimizer, ours: Optimizer) -> None:
        self.given, self.ours = given, ours
        number = {id(p): k for k, group in enumerate(given.param_groups) for p in group["params"]}
        self._theirs = [{number[id(p)] for p in group["params"]} for group in ours.param_groups]
        self._fixed = self._other_numbers()

    def _other_numbers(self) -> list[dict[str, Any]]:
        """Return the numbers of each group other than its rate."""
        names = self.given.defaults.keys() - {RATE}
        return [{n: group[n] for n in names} for group in self.given.param_groups]

    def set(self) -> None:
        """Copy the current rates, which the next push carries.

        Raises:
            UserError: If the user's optimizer has other groups than at first, another number of a
                group has changed, or rates went different ways.
        """
        if self._other_numbers() != self._fixed:
            got = "a momentum, a weight decay or a parameter group that changes in the run"
            remedy = "give OneCycleLR cycle_momentum=False; name all groups in configure_optimizers"
            raise UserError(got, "rates alone: a push carries a factor of them", remedy)
        for ours, numbers in zip(self.ours.param_groups, self._theirs, strict=True):
            rates = {float(self.given.param_groups[k][RATE]) for k in numbers or {0}}
            if len(rates) > 1:
                got = f"rates {sorted(rates)} of parameter groups that began with one rate"
                remedy = "use a scheduler that multiplies all rates by the same"
                raise UserError(got, "one factor: a push carries one", remedy)
            ours[RATE] = rates.pop()

    def stepped(self) -> None:
        """Note a step: schedulers warn if they step before the optimizer."""
        self.given._opt_called = True
