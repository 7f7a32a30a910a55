"""Update rules for programs, with the learning rate first.

A number that is not given is the default of its option: ``mpips guide options`` lists the defaults.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, dataclass_transform

from mpips.config.names import RULES
from mpips.config.user_file import DEFINED
from mpips.errors import UserError

Schedule: TypeAlias = Callable[[int], float]  # learning rate of an update, by its number, from 1
ELSEWHERE = {  # numbers of PyTorch's rules, with the remedy
    "betas": "give beta1 and beta2",
    "momentum": "mpips.Momentum has it",
    "nesterov": "that rule is mpips.Nesterov",
}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Optimizer:
    """An update rule and its numbers; None stands for the default of the option of that name.

    Attributes:
        name: Value of the option ``--optimizer``.
        lr: Learning rate.
    """

    name: ClassVar[str]

    lr: float | None = None

    def __init_subclass__(cls) -> None:
        """Make the class a dataclass; a class of this module is named as the option's value."""
        dataclass(frozen=True)(cls)
        if cls.__module__ == __name__ and "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    def __new__(cls, *_: float | None, **numbers: float | None) -> Self:
        """Check the names of numbers before the dataclass gets them.

        Raises:
            UserError: If the rule has no such number.
        """
        known = [field.name for field in fields(cls)]
        for name in set(numbers) - set(known):
            from mpips.config.option import meant

            remedy = ELSEWHERE.get(name) or meant(name, known)
            own = "" if issubclass(cls, UpdateRule) else "mpips."
            raise UserError(f"{name} of {own}{cls.__name__}", f"one of {', '.join(known)}", remedy)
        return super().__new__(cls)

    @property
    def rate_schedule(self) -> Schedule | None:
        """Schedule of the learning rate, if it is a function and not the option `schedule`."""
        return None

    def options(self) -> dict[str, Any]:
        """Return the options of a job for this rule."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"optimizer": self.name, **chosen}


class UpdateRule(Optimizer):
    """Base of update rules of your own: a class with numbers, and one function.

        class Lion(mpips.UpdateRule):
            lr: float = 3e-4
            beta: float = 0.9

            def step(w, g, m, /, lr, beta):
                m = beta * m + (1 - beta) * g
                return w - lr * (1 if m > 0 else -1 if m < 0 else m), m

    ``step`` is the update of one parameter, without `self`, and is compiled. Its arguments are the
    parameter, its gradient and its state, which starts at 0, then ``/``, then `lr` and numbers of
    the class. It returns a tuple of the new parameter and the new state. It may call functions of
    `math`, and functions of its file that keep to the same limits.

    A number is a field with a default. Computed numbers are properties, or entries of the mapping
    that a method ``rates(self, t, lr)`` returns for update ``t``, from 1. Weight decay is a field
    ``weight_decay``: groups can set it.

    A rule that needs whole arrays has a method ``update`` in place of ``step``, as Muon in
    ``jobs/muon.py``.

    ``mpips.run(optimizer=Lion(1e-4))`` and ``--optimizer file.py:Lion`` use the rule. Tables accept
    a rule without ``rates``.
    """

    def __init_subclass__(cls) -> None:
        """Make the class a dataclass, and name it by its file.

        Raises:
            UserError: If a field has no default.
        """
        for name, kind in vars(cls).get("__annotations__", {}).items():
            if name not in vars(cls) and "ClassVar" not in str(kind):
                got = f"{cls.__name__}.{name} without a default"
                raise UserError(got, "one", f"such as {name}: float = 0.9")
        super().__init_subclass__()
        file = getattr(sys.modules[cls.__module__], "__file__", None) or "program.py"
        cls.name = f"{Path(file).resolve()}:{cls.__name__}"

    def options(self) -> dict[str, Any]:
        """Return the options of a job for this rule.

        Raises:
            UserError: If `lr` is not given, or a number is not finite.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        lr = given.pop("lr")
        if lr is None:
            raise UserError(f"{type(self).__name__} without lr", "one", "give lr, or a default")
        defaults, changed = {field.name: field.default for field in fields(self)}, list[str]()
        for name, x in given.items():
            finite = isinstance(x, Real) and math.isfinite(x)
            if x is not defaults[name] and not finite:
                raise UserError(f"{name} {x!r} of {type(self).__name__}", "a finite number")
            if x != defaults[name]:
                changed.append(f"{name}={float(x)!r}")
        DEFINED[self.name], numbers = type(self), ", ".join(changed)
        return {"optimizer": f"{self.name}: {numbers}" if numbers else self.name, "lr": lr}


def example(kind: type) -> str:
    """Return the call that makes the rule of the same name as a class; Adam for other classes."""
    named = globals().get(kind.__name__)
    ours = isinstance(named, type) and issubclass(named, Optimizer) and named is not Optimizer
    name = kind.__name__ if ours else Adam.__name__
    decay = ", weight_decay=0.01" if name == AdamW.__name__ else ""  # torch's default
    return f"mpips.{name}(1e-3{decay})"


class SGD(Optimizer):
    """Plain SGD: ``w <- w - lr g``.

    Args:
        lr: Learning rate.
        weight_decay: L2 term of the gradient.
    """

    weight_decay: float | None = None


class Momentum(Optimizer):
    """SGD with momentum (Polyak, 1964).

    Args:
        lr: Learning rate.
        momentum: Share of the last step that is kept, in [0, 1).
        weight_decay: L2 term of the gradient.
    """

    momentum: float | None = None
    weight_decay: float | None = None


class Nesterov(Momentum):
    """SGD with Nesterov's momentum (Sutskever et al., ICML 2013).

    Args:
        lr: Learning rate.
        momentum: Share of the last step that is kept, in [0, 1).
        weight_decay: L2 term of the gradient.
    """


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., JMLR 2011).

    Args:
        lr: Learning rate.
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """

    eps: float | None = None
    weight_decay: float | None = None


class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012).

    Args:
        lr: Learning rate.
        decay: Decay of the mean of the squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """

    decay: float | None = None
    eps: float | None = None
    weight_decay: float | None = None


class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015).

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of the gradients, in [0, 1).
        beta2: Decay of the mean of their squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """

    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019), by default 0.

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of the gradients, in [0, 1).
        beta2: Decay of the mean of their squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: Decoupled from the gradient, at least 0.
    """


class AMSGrad(Adam):
    """Adam with the largest mean square so far (Reddi et al., ICLR 2018).

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of the gradients, in [0, 1).
        beta2: Decay of the mean of their squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """


class NAdam(Adam):
    """Adam with Nesterov's momentum (Dozat, ICLR 2016 workshop).

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of the gradients, in [0, 1).
        beta2: Decay of the mean of their squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """


class RAdam(Adam):
    """Rectified Adam (Liu et al., ICLR 2020).

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of the gradients, in [0, 1).
        beta2: Decay of the mean of their squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """


class Adadelta(RMSprop):
    """Adadelta (Zeiler, arXiv:1212.5701, 2012). The paper has eps 1e-6.

    Args:
        lr: Learning rate.
        decay: Decay of the mean of the squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """


class Lion(Optimizer):
    """Lion (Chen et al., NeurIPS 2023), with decoupled weight decay. The paper has beta2 0.99.

    Args:
        lr: Learning rate.
        beta1: Share of the mean in a step, in [0, 1).
        beta2: Decay of the mean, in [0, 1).
        weight_decay: Decoupled from the gradient, at least 0.
    """

    beta1: float | None = None
    beta2: float | None = None
    weight_decay: float | None = None


class RowAdagrad(Optimizer):
    """Adagrad with one sum a row (Mudigere et al., ISCA 2022), for tables only.

    Args:
        lr: Learning rate.
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """

    name = "row_adagrad"
    eps: float | None = None
    weight_decay: float | None = None


class FTRL(Optimizer):
    """FTRL-proximal (McMahan et al., KDD 2013), for tables only; `lr` is the paper's alpha.

    The paper sums the gradients of samples. Here they are means over batches: divide the paper's
    `beta`, `l1` and `l2` by the size of a batch, and leave `lr` as it is.

    Args:
        lr: Alpha of the paper.
        beta: Added to the divisor of the rate, above 0.
        l1: L1 term, at least 0.
        l2: L2 term, at least 0.
    """

    beta: float | None = None
    l1: float | None = None
    l2: float | None = None


def rule_called(name: str, numbers: Mapping[str, float]) -> Optimizer:
    """Return the rule of a value of ``--optimizer``, with its numbers."""
    return globals()[RULES[name]](**numbers)
