"""Update rules as a program names them, with the learning rate first.

A number that is not given is as in a job without it: ``mpips guide options`` lists the defaults.
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

Schedule: TypeAlias = Callable[[int], float]  # of the number of the update, from 1
ELSEWHERE = {  # numbers of PyTorch's rules, by what has them here
    "betas": "give beta1 and beta2",
    "momentum": "mpips.Momentum has it",
    "nesterov": "that rule is mpips.Nesterov",
}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Optimizer:
    """An update rule and its numbers; None stands for the default of the option of that name.

    Attributes:
        name: What ``--optimizer`` calls it.
        lr: Learning rate.
    """

    name: ClassVar[str]

    lr: float | None = None

    def __init_subclass__(cls) -> None:
        """Make a class one of fields; those of this module have the options' names."""
        dataclass(frozen=True)(cls)
        if cls.__module__ == __name__ and "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    def __new__(cls, *_: float | None, **numbers: float | None) -> Self:
        """Check the names of numbers, before the class takes them.

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
        """Learning rate, where it is a function and no option `schedule`."""
        return None

    def options(self) -> dict[str, Any]:
        """Return the options of a job that it stands for."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        set_ones = {name: value for name, value in given.items() if value is not None}
        return {"optimizer": self.name, **set_ones}


class UpdateRule(Optimizer):
    """Base of update rules of your own: a class with numbers, and one function.

        class Lion(mpips.UpdateRule):
            lr: float = 3e-4
            beta: float = 0.9

            def step(w, g, m, /, lr, beta):
                m = beta * m + (1 - beta) * g
                return w - lr * (1 if m > 0 else -1 if m < 0 else m), m

    ``step`` is the update of one parameter, without `self`, and is compiled. It takes the
    parameter, its gradient and its state, which begins at 0, then ``/``, then `lr` and numbers of
    the class. It returns the new parameter and the new state, as a tuple. It may call functions of
    `math`, and functions of the file that are made alike.

    A number is a field with a default. Numbers that are computed are properties, or what a method
    ``rates(self, t, lr)`` returns by name for update ``t``, from 1. Weight decay is a field
    ``weight_decay``: groups can set it.

    A rule that needs whole arrays has a method ``update`` in place of ``step``, as Muon has in
    ``jobs/muon.py``.

    ``mpips.run(optimizer=Lion(1e-4))`` uses it, and ``--optimizer file.py:Lion`` does. Tables take
    a rule without ``rates``.
    """

    def __init_subclass__(cls) -> None:
        """Make a class one of fields, and name it by its file.

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
        """Return the options of a job that it stands for."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        lr = given.pop("lr")
        if lr is None:
            raise UserError(f"{type(self).__name__} without lr", "one", "give lr, or a default")
        defaults, others = {field.name: field.default for field in fields(self)}, list[str]()
        for name, x in given.items():
            finite = isinstance(x, Real) and math.isfinite(x)
            if x is not defaults[name] and not finite:
                raise UserError(f"{name} {x!r} of {type(self).__name__}", "a finite number")
            if x != defaults[name]:
                others.append(f"{name}={float(x)!r}")
        DEFINED[self.name], numbers = type(self), ", ".join(others)
        return {"optimizer": f"{self.name}: {numbers}" if numbers else self.name, "lr": lr}


def example(kind: type) -> str:
    """Return how a program makes the rule that is called as a class is; else Adam."""
    named = globals().get(kind.__name__)
    ours = isinstance(named, type) and issubclass(named, Optimizer) and named is not Optimizer
    name = kind.__name__ if ours else Adam.__name__
    decay = ", weight_decay=0.01" if name == AdamW.__name__ else ""  # as torch has by default
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
    """Adadelta (Zeiler, arXiv:1212.5701, 2012), whose eps was 1e-6.

    Args:
        lr: Learning rate.
        decay: Decay of the mean of the squares, in [0, 1).
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """


class Lion(Optimizer):
    """Lion (Chen et al., NeurIPS 2023), with decoupled weight decay; its beta2 was 0.99.

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
    """Adagrad with one sum a row (Mudigere et al., ISCA 2022): for tables alone.

    Args:
        lr: Learning rate.
        eps: Added to the divisor, above 0.
        weight_decay: L2 term of the gradient.
    """

    name = "row_adagrad"
    eps: float | None = None
    weight_decay: float | None = None


class FTRL(Optimizer):
    """FTRL-proximal (McMahan et al., KDD 2013), whose lr is alpha: for tables alone.

    The paper adds up the gradients of samples. Here they are means over batches: give `beta`, `l1`
    and `l2` divided by the size of a batch, and `lr` as it is.

    Args:
        lr: Alpha of the paper.
        beta: Added to the divisor of the rate, at least 0.
        l1: L1 term, at least 0.
        l2: L2 term, at least 0.
    """

    beta: float | None = None
    l1: float | None = None
    l2: float | None = None


def rule_called(name: str, numbers: Mapping[str, float]) -> Optimizer:
    """Return the rule that ``--optimizer`` calls so, with its numbers."""
    return globals()[RULES[name]](**numbers)
