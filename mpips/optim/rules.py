"""Update rules, learning-rate schedules and clipping.

A rule is a pair: `Rule.init` fills the slots of a fresh run, `Rule.apply` makes one update. Both
work in place on flat vectors of one dtype, and element by element, so that the owner of a slice
may cut it into blocks as it likes: the same step and rate for every block give the same bits.
In the equations g is the gradient, with ``weight_decay * w`` added in all rules but AdamW.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import numpy as np

from mpips import kernels
from mpips.errors import UserError, unknown

Slots = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Rule(ABC):
    """One update rule with its hyperparameters.

    Attributes:
        name: Name on the command line and in checkpoints.
        slots: Names of the rule's state vectors, each of the parameters' shape and dtype.
        kernel: Name of the rule's loop in `mpips.kernels`, which takes parameters, gradient,
            slots, and then `scalars`.
        weight_decay: Factor of w that is added to the gradient.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    kernel: ClassVar[str]

    weight_decay: float = 0.0

    def init(self, params: np.ndarray, slots: Slots) -> None:
        """Fill the slots of a fresh run, in place.

        Args:
            params: Initial parameters, shape (n,), dtype float32 or float64.
            slots: One vector a name in `Rule.slots`, each of shape (n,) and params' dtype.
        """
        for slot in slots:
            slot.fill(0)

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """Make one update, in place; `grad` is only read.

        Args:
            params: Parameters or a block of them, shape (n,), dtype float32 or float64.
            grad: Gradient of the mean loss, shape (n,), params' dtype.
            slots: The same block of every slot, each of shape (n,) and params' dtype.
            step: Number of this update, from 1.
            lr: Learning rate of this update.

        Raises:
            ValueError: If the vectors differ in length.
        """
        self._loop(params, grad, *slots, *self.scalars(step, lr))

    @cached_property
    def _loop(self) -> Callable[..., None]:
        loop: Callable[..., None] = getattr(kernels, self.kernel)
        return loop

    @abstractmethod
    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes after the vectors, computed in float64."""


@dataclass(frozen=True)
class Sgd(Rule):
    """Stochastic gradient descent: ``w -= lr g``.

    References: Robbins and Monro, Ann. Math. Statist. 22 (1951).
    """

    name = "sgd"
    kernel = "sgd"

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return lr, self.weight_decay


@dataclass(frozen=True)
class Momentum(Rule):
    """Heavy ball: ``v = momentum v + g; w -= lr v``.

    Args:
        momentum: Share of the velocity kept, in [0, 1).

    References: Polyak, USSR Comput. Math. Math. Phys. 4 (1964), with the rate outside the
    velocity as in Sutskever et al., ICML 2013, and PyTorch.
    """

    name = "momentum"
    slots = ("velocity",)
    kernel = "momentum"

    momentum: float = 0.9

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return lr, self.momentum, self.weight_decay


@dataclass(frozen=True)
class Nesterov(Momentum):
    """Nesterov's momentum: ``v = momentum v + g; w -= lr (g + momentum v)``.

    w is the point at which the gradient is taken, that is the look-ahead point of the paper.

    Args:
        momentum: Share of the velocity kept, in [0, 1).

    References: Sutskever et al., ICML 2013, equations 3 and 4.
    """

    name = "nesterov"
    kernel = "nesterov"


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad: ``sum += g^2; w -= lr g / (sqrt(sum) + eps)``; the sum starts at 0.

    Args:
        eps: Keeps the divisor above 0.

    References: Duchi, Hazan and Singer, JMLR 12 (2011), with diagonal matrices.
    """

    name = "adagrad"
    slots = ("sum",)
    kernel = "adagrad"

    eps: float = 1e-8

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return lr, self.eps, self.weight_decay


@dataclass(frozen=True)
class RMSProp(Rule):
    """RMSProp: ``square = decay square + (1 - decay) g^2; w -= lr g / (sqrt(square) + eps)``.

    Args:
        decay: Share of the mean square kept, in [0, 1).
        eps: Keeps the divisor above 0.

    References: Tieleman and Hinton, COURSERA Neural Networks for Machine Learning, lecture 6.5
    (2012).
    """

    name = "rmsprop"
    slots = ("square",)
    kernel = "rmsprop"

    decay: float = 0.9
    eps: float = 1e-8

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return lr, self.decay, 1 - self.decay, self.eps, self.weight_decay


@dataclass(frozen=True)
class Adam(Rule):
    """Adam, at step t: a step along the mean gradient over the root of its mean square.

    ``m = beta1 m + (1 - beta1) g``, ``v = beta2 v + (1 - beta2) g^2``,
    ``w -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)``.

    Args:
        beta1: Share of m kept, in [0, 1).
        beta2: Share of v kept, in [0, 1).
        eps: Keeps the divisor above 0.

    References: Kingma and Ba, ICLR 2015, algorithm 1.
    """

    name = "adam"
    slots = ("m", "v")
    kernel = "adam"

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return *self._corrected(step, lr), self.weight_decay, 0.0

    def _corrected(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars before the two weight decays, with step t's bias corrections."""
        beta1, beta2 = self.beta1, self.beta2
        rate = lr / (1 - beta1**step)
        root = 1 / math.sqrt(1 - beta2**step)
        return beta1, beta2, 1 - beta1, 1 - beta2, rate, root, self.eps


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: Adam's step on g, and ``lr weight_decay w`` subtracted.

    The decay takes the parameters before the step and does not enter m and v; it follows the
    schedule of the learning rate.

    Args:
        beta1: Share of m kept, in [0, 1).
        beta2: Share of v kept, in [0, 1).
        eps: Keeps the divisor above 0.

    References: Loshchilov and Hutter, ICLR 2019, algorithm 2, with alpha in the schedule
    multiplier as in PyTorch.
    """

    name = "adamw"

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return *self._corrected(step, lr), 0.0, lr * self.weight_decay


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Sgd, Momentum, Nesterov, Adagrad, RMSProp, Adam, AdamW)
}


def make_rule(
    name: str,
    *,
    momentum: float = 0.9,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: float = 0.9,
) -> Rule:
    """Build the rule called `name`; hyperparameters that it does not have are ignored.

    Raises:
        UserError: If there is no such rule, or a hyperparameter that it has is out of range.
    """
    if name not in RULES:
        raise unknown("optimizer", name, RULES)
    shares = {"momentum": momentum, "beta1": beta1, "beta2": beta2, "decay": decay}
    options = {**shares, "eps": eps, "weight_decay": weight_decay}
    used = {field.name: float(options[field.name]) for field in fields(RULES[name])}
    for key, value in used.items():
        if key in shares and not 0 <= value < 1:
            raise UserError(f"{key}={value}", f"0 <= {key} < 1", f"it is a share kept by {name}")
        if not 0 <= value < math.inf:
            raise UserError(f"{key}={value}", f"a finite {key} >= 0")
    return RULES[name](**used)


def _cosine(step: int, begin: int, end: int) -> float:
    """Return the factor that falls from 1 at step begin + 1 to 0 after step `end`."""
    share = (step - 1 - begin) / max(1, end - begin)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share))))


def schedule(
    name: str,
    lr: float,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    step_every: int = 0,
    step_factor: float = 0.1,
) -> Callable[[int], float]:
    """Return the learning rate as a function of the 1-based number of the update.

    Whatever the schedule, the rate rises linearly from ``lr / warmup_steps`` at step 1 to its full
    value at step `warmup_steps`.

    Args:
        name: ``constant``; ``warmup``, constant after a warm-up; ``cosine``, half a cosine from
            `lr` after the warm-up to 0 after `total_steps`; or ``step``, multiplied by
            `step_factor` after every `step_every` steps, those of the warm-up counted.
        lr: The full rate.
        total_steps: Length of the run; only ``cosine`` depends on it.
        warmup_steps: Length of the warm-up, 0 for none.
        step_every: Steps between two drops of ``step``.
        step_factor: Factor of each drop.

    Raises:
        UserError: If there is no such schedule, or a number that it needs is missing.

    References: Goyal et al., arXiv 1706.02677 (warm-up); Loshchilov and Hutter, ICLR 2017 (cosine).
    """
    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "warmup": lambda step: 1.0,
        "cosine": lambda step: _cosine(step, warmup_steps, total_steps),
        "step": lambda step: step_factor ** ((step - 1) // step_every),
    }
    if name not in shapes:
        raise unknown("schedule", name, shapes)
    _need(name, "warmup_steps", warmup_steps, name == "warmup")
    _need(name, "step_every", step_every, name == "step")
    shape = shapes[name]
    if not warmup_steps:
        return lambda step: lr * shape(step)
    return lambda step: lr * min(1.0, step / warmup_steps) * shape(step)


def _need(name: str, option: str, value: int, needed: bool) -> None:
    """Raise unless `value` is 1 or more, or 0 where the schedule does not need it."""
    if value < needed:
        flag = f"--{option.replace('_', '-')}"
        constraint = f"{option} >= {int(needed)} with schedule {name!r}"
        raise UserError(f"{option}={value}", constraint, f"give {flag} N")


def clip_factor(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor that brings a gradient's norm down to `max_norm`, at most 1.

    Args:
        sum_of_squares: Of the whole gradient, over all shards.
        max_norm: Greatest norm allowed; 0 means that clipping is off.

    Returns:
        1 where the norm is within the bound; NaN for a NaN and 0 for an infinite sum of squares,
        with which an infinite gradient becomes NaN and is not hidden.
    """
    norm = math.sqrt(sum_of_squares)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm


def warm(rule: Rule, dtype: np.typing.DTypeLike) -> None:
    """Compile, or load from the cache on disk, every loop that a run needs.

    Args:
        rule: The rule of the run.
        dtype: dtype of the parameters, float32 or float64.
    """
    words = np.zeros(1, np.int64)
    kernels.publish(words, 0, 1)
    kernels.observe(words, 0)
    ours = kernels.addresses_of([words])
    kernels.find_ahead(ours, np.zeros(1, np.int64), words, words, 0)
    kernels.meet(ours, 1, 0)
    kernels.meet_and_add(ours, 1, 0, ours[:0], np.zeros(1))
    params, grad, *slots = (np.ones(1, dtype) for _ in range(2 + len(rule.slots)))
    addresses = kernels.addresses_of([grad])
    kernels.sum_rows(addresses, np.ones(1), 0, params)
    kernels.sum_rows(addresses[:0], np.ones(0), 0, np.zeros(1))
    kernels.sum_squares(grad)
    kernels.all_finite(grad)
    kernels.copy_finite(grad, params)
    kernels.scale(grad, 1.0)
    kernels.add_scaled(grad, 1.0, params, 1.0)
    rule.init(params, tuple(slots))
    rule.apply(params, grad, tuple(slots), 1, 0.1)
