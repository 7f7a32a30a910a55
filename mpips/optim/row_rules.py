"""Update rules of a table's rows.

An update changes only the rows whose ids a push contains, each row by itself. All other rows stay
unchanged, momentum and weight decay included. A rule keeps the slots of a row directly after the
row: both together are a **line**. In the equations, w is an element of a row, and g is the sum of
the row's gradients in one push. All rules but FTRL first add ``weight_decay * w`` to g.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, dataclass_transform

import numpy as np

from mpips.config.groups import RowOptimizer
from mpips.config.user_file import names_class
from mpips.errors import UserError, unknown
from mpips.kernels import update_rules
from mpips.kernels.compiled import Kernel
from mpips.kernels.rule_loops import by_rows, rates_of

SHARES = ("beta1", "beta2", "decay")  # hyperparameters below 1
POSITIVE = ("lr", "beta", "eps")  # hyperparameters above 0: they are divisors


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class RowRule:
    """One update rule of rows with its hyperparameters.

    Attributes:
        name: Name of the rule in checkpoints.
        kernel: The rule's step in `mpips.kernels.update_rules`.
        row_rates: Function in `mpips.kernels.update_rules` that computes the step's rates for one
            row from `numbers`; None if `numbers` are the rates.
        states: Names of the row's slots of ``dim`` numbers each, in their order in a line.
        singles: Names of its slots of one number each, which follow them.
        default_lr: Learning rate if `lr` is None.
        lr: Learning rate, or None.
    """

    name: ClassVar[str]
    kernel: ClassVar[Kernel]
    row_rates: ClassVar[Kernel | None] = None
    states: ClassVar[tuple[str, ...]] = ()
    singles: ClassVar[tuple[str, ...]] = ()
    default_lr: ClassVar[float]

    lr: float | None = None

    def __init_subclass__(cls) -> None:
        """Make each subclass a frozen dataclass."""
        dataclass(frozen=True)(cls)

    @property
    def rate(self) -> float:
        """The learning rate, before any schedule."""
        return self.default_lr if self.lr is None else self.lr

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        """Return name and width of each slot, in their order after a row of `dim` numbers."""
        return *((name, dim) for name in self.states), *((name, 1) for name in self.singles)

    def numbers(self, rate: float) -> tuple[float, ...]:
        """Return the numbers that the loop takes: the learning rate, and attributes by name."""
        names = rates_of(self.row_rates or self.kernel)
        return rate, *(getattr(self, name) for name in names[1:])

    @property
    def kept(self) -> dict[str, float]:
        """Hyperparameters on which the slots depend; a resumed run must have the same."""
        return {}

    def width(self, dim: int) -> int:
        """Return the length of a line: the numbers of a row and of its slots."""
        return dim + sum(width for _, width in self.slots(dim))

    def check(self, dtype: np.typing.DTypeLike) -> None:
        """See `mpips.optim.Rule.check`."""

    @cached_property
    def loop(self) -> Callable[..., None]:
        """The compiled loop; see `mpips.kernels.rule_loops.by_rows`."""
        return by_rows(self.kernel, self.row_rates, extra=self.width(0))


class Sgd(RowRule):
    """Stochastic gradient descent: ``w -= lr g``."""

    name = "sgd"
    kernel = update_rules.sgd
    default_lr = 0.1
    weight_decay: float = 0.0


class Adagrad(RowRule):
    """Adagrad: ``sum += g^2; w -= lr g / (sqrt(sum) + eps)``; the sum starts at 0.

    References: Duchi, Hazan and Singer, JMLR 12 (2011), with diagonal matrices.
    """

    name = "adagrad"
    kernel = update_rules.adagrad
    states: ClassVar[tuple[str, ...]] = ("sum",)
    default_lr = 0.02
    eps: float = 1e-8
    weight_decay: float = 0.0


class RowAdagrad(Adagrad):
    """Adagrad with one sum for a row: ``sum += mean(g^2); w -= lr g / (sqrt(sum) + eps)``.

    References: Mudigere et al., ISCA 2022, section 4.1.4 (row-wise AdaGrad).
    """

    name = "row_adagrad"
    kernel, row_rates = update_rules.sgd, update_rules.row_adagrad
    states, singles = (), ("sum",)


class RMSProp(RowRule):
    """RMSProp, whose mean square decays only when the row is updated.

    ``square = decay square + (1 - decay) g^2; w -= lr g / (sqrt(square) + eps)``.

    References: Tieleman and Hinton, COURSERA Neural Networks for Machine Learning, lecture 6.5
    (2012).
    """

    name = "rmsprop"
    kernel = update_rules.rmsprop
    states = ("square",)
    default_lr = 0.001
    decay: float = 0.9
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def rest(self) -> float:
        """Share of the newest square in the mean."""
        return 1 - self.decay


class LazyAdam(RowRule):
    """Lazy Adam: t counts the updates of the row, and only these let its moments decay.

    ``m = beta1 m + (1 - beta1) g``, ``v = beta2 v + (1 - beta2) g^2``,
    ``w -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)``.

    References: Kingma and Ba, ICLR 2015, algorithm 1.
    """

    name = "adam"
    kernel, row_rates = update_rules.adam, update_rules.row_adam
    states, singles = ("m", "v"), ("step",)
    default_lr = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


class Ftrl(RowRule):
    """FTRL-proximal: parameters whose sum of gradients is small are exactly 0.

    ``s = (sqrt(n + g^2) - sqrt(n)) / lr; z += g - s w; n += g^2``, and then ``w = 0`` if ``|z| <=
    l1``, else ``w = -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2)``. n starts at 0. z starts at
    the value for which the equation gives the row's initial parameters; it is 0 if they are 0.

    lr is the paper's alpha. It ignores the schedule, since z is a sum that depends on one lr. The
    paper sums gradients over a batch. With means over batches, divide beta, l1 and l2 by the batch
    size to get the same rows.

    Args:
        beta: Keeps the first steps small; above 0.
        l1: Weight of the sum of absolute values, at least 0.
        l2: Weight of half the sum of squares, at least 0.

    References: McMahan et al., KDD 2013, algorithm 1.
    """

    name = "ftrl"
    kernel, row_rates = update_rules.ftrl, update_rules.row_ftrl
    states = ("z", "n")
    default_lr = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    @property
    def kept(self) -> dict[str, float]:
        """See `RowRule.kept`: with other hyperparameters, z would stand for other parameters."""
        return {"lr": self.rate, "beta": self.beta, "l1": self.l1, "l2": self.l2}

    def numbers(self, rate: float) -> tuple[float, ...]:
        """See `RowRule.numbers`; the learning rate is `lr` itself, without a schedule."""
        return tuple(self.kept.values())


ROW_RULES: dict[str, type[RowRule]] = {
    rule.name: rule for rule in (Sgd, Adagrad, RowAdagrad, RMSProp, LazyAdam, Ftrl)
}


def make_row_rule(optimizer: Any) -> RowRule:
    """Build the rule of an optimizer of a table, such as ``mpips.Adagrad(0.1)``.

    Args:
        optimizer: Object of `mpips.library.optimizers`. Its method ``options()`` returns the name
            of the rule under ``"optimizer"``, and its hyperparameters.

    Raises:
        UserError: If tables have no such rule, or a hyperparameter is out of range.
    """
    if not callable(getattr(optimizer, "options", None)):
        raise UserError(f"optimizer={optimizer!r} of a table", "one such as mpips.Adagrad(0.1)")
    given = dict(optimizer.options())
    name = str(given.pop("optimizer"))
    if names_class(name):
        from mpips.optim import own_rules

        return own_rules.make_own_row_rule(RowOptimizer(name, given))
    if name not in ROW_RULES:
        raise unknown("optimizer of a table", name, ROW_RULES)
    make: Callable[..., RowRule] = ROW_RULES[name]
    legal = {found.name for found in fields(ROW_RULES[name])}
    for key, value in given.items():
        if key not in legal:
            raise unknown(f"number of {name} for tables", key, legal)
        least = "> 0" if key in POSITIVE else ">= 0"
        number = isinstance(value, Real) and 0 <= float(value) < math.inf
        if not number or (key in POSITIVE and not value):
            raise UserError(f"{key}={value!r} of a table's {name}", f"a finite {key} {least}")
        if key in SHARES and value >= 1:
            raise UserError(f"{key}={value} of a table's {name}", f"0 <= {key} < 1")
    return make(**given)
