"""Update rules that come with mpips, by name.

In the equations, w is a parameter and g its gradient. All rules but AdamW and Lion first add
``weight_decay * w`` to g.
"""

import math
from dataclasses import field
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from mpips.config.names import EMA
from mpips.kernels import update_rules, vectors
from mpips.kernels.rule_loops import Undo, averaging, rates_of, undoable
from mpips.optim.rule import Rule, Slots


class Sgd(Rule):
    """Stochastic gradient descent: ``w -= lr g``.

    References: Robbins and Monro, Ann. Math. Statist. 22 (1951).
    """

    name = "sgd"
    kernel = update_rules.sgd


class Momentum(Rule):
    """Heavy ball: ``v = momentum v + g; w -= lr v``.

    Args:
        momentum: Share of the velocity kept, in [0, 1).

    References: Polyak, USSR Comput. Math. Math. Phys. 4 (1964), with the rate outside the
    velocity as in Sutskever et al., ICML 2013, and PyTorch.
    """

    name = "momentum"
    slots = ("velocity",)
    kernel = update_rules.momentum

    momentum: float = 0.9


class Nesterov(Momentum):
    """Nesterov's momentum: ``v = momentum v + g; w -= lr (g + momentum v)``.

    The gradient is computed at w; so w is the look-ahead point of the paper.

    Args:
        momentum: Share of the velocity kept, in [0, 1).

    References: Sutskever et al., ICML 2013, equations 3 and 4.
    """

    name = "nesterov"
    kernel = update_rules.nesterov


class Adagrad(Rule):
    """Adagrad: ``sum += g^2; w -= lr g / (sqrt(sum) + eps)``; the sum starts at 0.

    Args:
        eps: Keeps the divisor above 0.

    References: Duchi, Hazan and Singer, JMLR 12 (2011), with diagonal matrices.
    """

    name = "adagrad"
    slots = ("sum",)
    kernel = update_rules.adagrad

    eps: float = 1e-8


class RMSProp(Rule):
    """RMSProp: ``square = decay square + (1 - decay) g^2; w -= lr g / (sqrt(square) + eps)``.

    Args:
        decay: Share of the mean square kept, in [0, 1).
        eps: Keeps the divisor above 0.

    References: Tieleman and Hinton, COURSERA Neural Networks for Machine Learning, lecture 6.5
    (2012).
    """

    name = "rmsprop"
    slots: ClassVar[tuple[str, ...]] = ("square",)
    kernel = update_rules.rmsprop

    decay: float = 0.9
    eps: float = 1e-8

    @property
    def rest(self) -> float:
        """Share of the newest square in the mean."""
        return 1 - self.decay


class Adam(Rule):
    """Adam: the running mean of g, divided by the root of the running mean of g^2.

    At step t, ``m = beta1 m + (1 - beta1) g``, ``v = beta2 v + (1 - beta2) g^2``,
    ``w -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)``.

    Args:
        beta1: Share of m kept, in [0, 1).
        beta2: Share of v kept, in [0, 1).
        eps: Keeps the divisor above 0.

    References: Kingma and Ba, ICLR 2015, algorithm 1.
    """

    name = "adam"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    kernel = update_rules.adam
    decoupled: ClassVar[bool] = False  # whether weight decay is decoupled from the gradient

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Rule.scalars`; `rate` and `root` contain the bias corrections of step t."""
        beta1, beta2, step = self.beta1, self.beta2, self.before + step
        rate, root = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
        decays = (0.0, lr * self.weight_decay) if self.decoupled else (self.weight_decay, 0.0)
        return beta1, beta2, 1 - beta1, 1 - beta2, rate, root, self.eps, *decays


class AdamW(Adam):
    """Adam with decoupled weight decay: Adam's step by g, and then ``w -= lr weight_decay w``.

    The decay is computed from the parameters before the step, and does not enter m and v. It
    follows the schedule of the learning rate.

    Args:
        beta1: Share of m kept, in [0, 1).
        beta2: Share of v kept, in [0, 1).
        eps: Keeps the divisor above 0.

    References: Loshchilov and Hutter, ICLR 2019, algorithm 2, with alpha in the schedule
    multiplier as in PyTorch.
    """

    name = "adamw"
    decoupled = True


class AMSGrad(Adam):
    """Adam with the maximum of v over all steps in place of v: ``largest = max(largest, v)``.

    ``w -= lr (m / (1 - beta1^t)) / (sqrt(largest / (1 - beta2^t)) + eps)``.

    References: Reddi, Kale and Kumar, ICLR 2018, algorithm 2, with Adam's bias corrections as in
    PyTorch.
    """

    name = "amsgrad"
    slots = ("m", "v", "largest")
    kernel = update_rules.amsgrad

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Adam.scalars`; there is no decoupled weight decay."""
        return super().scalars(step, lr)[:-1]


class NAdam(Adam):
    """Adam with Nesterov's momentum.

    With ``u_t = beta1 (1 - 0.96^(t / 250) / 2)`` and P_t the product of u_1 to u_t,
    ``w -= lr ((1 - u_t) g / (1 - P_t) + u_(t+1) m / (1 - P_(t+1))) / (root + eps)``, where ``root =
    sqrt(v / (1 - beta2^t))``. m and v are Adam's.

    References: Dozat, ICLR 2016 workshop, algorithm 2, with the schedule of its section 3.
    """

    name = "nadam"
    kernel = update_rules.nadam

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Rule.scalars`; the rates of g and of m contain the corrections of step t."""
        beta1, beta2, step = self.beta1, self.beta2, self.before + step
        share, following = momentum_share(beta1, step), momentum_share(beta1, step + 1)
        of_grad = lr * (1 - share) / (1 - share_product(beta1, step))
        of_mean = lr * following / (1 - share_product(beta1, step + 1))
        root = 1 / math.sqrt(1 - beta2**step)
        rests = 1 - beta1, 1 - beta2
        return beta1, beta2, *rests, of_grad, of_mean, root, self.eps, self.weight_decay


def momentum_share(beta1: float, step: int) -> float:
    """Return ``u_t`` of `NAdam` at step t."""
    return beta1 * (1 - 0.5 * 0.96 ** (step * 4e-3))


def share_product(beta1: float, steps: int) -> float:
    """Return ``P_t`` of `NAdam` for t = `steps`, or 0 if it is too small to change ``1 - P_t``."""
    products = _share_products(beta1)
    return float(products[steps - 1]) if steps <= products.size else 0.0


@lru_cache
def _share_products(beta1: float) -> np.ndarray:
    """Return P_1, P_2, ... of `NAdam`, up to the first that is too small to change ``1 - P_t``."""
    most = 1 if beta1 == 0 else math.ceil(math.log(1e-18) / math.log(beta1))
    return np.cumprod([momentum_share(beta1, step) for step in range(1, most + 1)])


class RAdam(Adam):
    """Rectified Adam: SGD with momentum until v is a mean of enough gradients, and then Adam.

    With ``d = 2 / (1 - beta2) - 1`` and ``r = d - 2 t beta2^t / (1 - beta2^t)``: if r > 5, the step
    is Adam's times ``sqrt((r - 4)(r - 2) d / ((d - 4)(d - 2) r))``. Otherwise it is
    ``w -= lr m / (1 - beta1^t)``. eps is added to ``sqrt(v)``, not to the bias-corrected root.

    References: Liu et al., ICLR 2020, algorithm 2, with the bound and eps as in PyTorch.
    """

    name = "radam"
    kernel = update_rules.radam

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Rule.scalars`; one of the two rates is 0, that of SGD or that of Adam."""
        beta1, beta2, step = self.beta1, self.beta2, self.before + step
        rate, rest = lr / (1 - beta1**step), 1 - beta2**step
        most = 2 / (1 - beta2) - 1
        found = most - 2 * step * beta2**step / rest
        rates = rate, 0.0
        if found > 5:
            share = (found - 4) * (found - 2) * most / ((most - 4) * (most - 2) * found)
            rates = 0.0, rate * math.sqrt(share * rest)
        return beta1, beta2, 1 - beta1, 1 - beta2, *rates, self.eps, self.weight_decay


class Adadelta(RMSProp):
    """Adadelta: g times the root of the ratio of two mean squares, of changes and of gradients.

    ``square = decay square + (1 - decay) g^2``,
    ``d = sqrt(change_square + eps) / sqrt(square + eps) g``,
    ``change_square = decay change_square + (1 - decay) d^2``, ``w -= lr d``.

    Args:
        decay: Share of both mean squares kept, in [0, 1).
        eps: Added to both mean squares; it determines the size of the first steps. The paper uses
            1e-6.

    References: Zeiler, arXiv:1212.5701 (2012), algorithm 1, with a learning rate as in PyTorch.
    """

    name = "adadelta"
    slots = ("square", "change_square")
    kernel = update_rules.adadelta


class Lion(Rule):
    """Lion: ``w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w)``.

    After the step, ``m = beta2 m + (1 - beta2) g``. Weight decay does not enter m.

    Args:
        beta1: Share of m in the step, in [0, 1).
        beta2: Share of m kept, in [0, 1). The paper uses 0.99.

    References: Chen et al., NeurIPS 2023, algorithm 2.
    """

    name = "lion"
    slots = ("m",)
    kernel = update_rules.lion

    beta1: float = 0.9
    beta2: float = 0.999

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Rule.scalars`."""
        return lr, self.beta1, self.beta2, 1 - self.beta1, 1 - self.beta2, self.weight_decay


class Change(Rule):
    """Rule of arrays that are not parameters, such as running means: ``w -= g`` at any rate.

    Attributes:
        averaged: Whether the first slot is the mean of the parameters (`Averaging`). For these
            arrays it gets their newest values.
    """

    name = "change"
    kernel = None

    averaged: bool = False

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """Subtract `grad`; only the slot of a mean changes."""
        params -= grad
        if self.averaged:
            np.copyto(slots[0], params)

    def apply_undoable(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float, undo: Undo
    ) -> None:
        """See `Rule.apply_undoable`; the old values of all slots are saved, too."""
        kernel = averaging(update_rules.sgd) if self.averaged else update_rules.sgd
        rates = np.array((1.0, 0.0, 0.0, 1.0)[: len(rates_of(kernel))])
        undoable(kernel, len(slots) - self.averaged)(params, *slots, grad, rates, *undo)


class Averaging(Rule):
    """Mixin of a rule that keeps an exponential moving average (EMA) of the parameters.

    After each update, ``ema = decay_of_mean ema + (1 - decay_of_mean) w``. The average starts at
    the initial parameters, so it needs no bias correction. That of a frozen array does not change.

    Attributes:
        decay_of_mean: Share of the average kept by an update, in [0, 1).
    """

    decay_of_mean: float = field(default=0.0, kw_only=True)

    @cached_property
    def rates(self) -> tuple[str, ...]:
        """See `Rule.rates`: the rates of the rule without the average."""
        assert self.kernel is not None, "a rule without loops"
        return rates_of(self.kernel)[:-2]

    def init(self, params: np.ndarray, slots: Slots) -> None:
        """See `Rule.init`."""
        super().init(params, slots)
        np.copyto(slots[0], params)

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """See `Rule.apply`."""
        if not self.whole:
            super().apply(params, grad, slots, step, lr)
            return
        super().apply(params, grad, slots[1:], step, lr)
        vectors.add_scaled(slots[0], self.decay_of_mean, params, 1 - self.decay_of_mean)

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Rule.scalars`."""
        return *super().scalars(step, lr), self.decay_of_mean, 1 - self.decay_of_mean


@cache
def averaging_rule(kind: Any) -> Any:
    """Return a subclass of a rule that also keeps the moving average of `Averaging`."""
    kernel = kind.kernel and averaging(kind.kernel)
    members = {"slots": (EMA, *kind.slots), "kernel": kernel}
    return type(kind.__name__, (Averaging, kind), members)


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        *(Sgd, Momentum, Nesterov, Adagrad, RMSProp, Adadelta, Adam, AdamW, AMSGrad, NAdam, RAdam),
        Lion,
    )
}
