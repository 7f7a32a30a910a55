"""Steps of the update rules: each rule's equation for one element.

A step takes a parameter, its gradient, the element of each state vector, and the rates, which are
the same for all elements. A ``/`` stands before the rates. It returns the new parameter and the new
state elements as a tuple. Every rate is a parameter of its own, up to nine of them, since loops
take no objects.
`mpips.kernels.rule_loops` makes the loops. They convert the rates to the vectors' dtype, so no
operand turns float32 into float64.

The equations are in `mpips.optim.rules` and `mpips.optim.row_rules`. Rates have the names of the
rules' attributes there. The last three functions compute the rates of a step for one row of a
table.
"""

import math

from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.rule_loops import step

Rates = tuple[float, ...]


@step
def decayed(g: float, w: float, decay: float) -> float:
    """Add weight decay to a gradient.

    Without decay, the gradient must not become NaN for an infinite parameter. LLVM compiles the
    test to a mask.
    """
    return g + decay * w if decay != 0 else g


@step
def sgd(w: float, g: float, /, lr: float, weight_decay: float) -> tuple[float]:
    """Apply `mpips.optim.rules.Sgd`."""
    return (w - lr * decayed(g, w, weight_decay),)


@step
def momentum(
    w: float, g: float, v: float, /, lr: float, momentum: float, weight_decay: float
) -> tuple[float, float]:
    """Apply `mpips.optim.rules.Momentum`."""
    v = momentum * v + decayed(g, w, weight_decay)
    return w - lr * v, v


@step
def nesterov(
    w: float, g: float, v: float, /, lr: float, momentum: float, weight_decay: float
) -> tuple[float, float]:
    """Apply `mpips.optim.rules.Nesterov`."""
    g = decayed(g, w, weight_decay)
    v = momentum * v + g
    return w - lr * (g + momentum * v), v


@step
def adagrad(
    w: float, g: float, total: float, /, lr: float, eps: float, weight_decay: float
) -> tuple[float, float]:
    """Apply `mpips.optim.rules.Adagrad`."""
    g = decayed(g, w, weight_decay)
    total = total + g * g
    return w - lr * g / (math.sqrt(total) + eps), total


@step
def rmsprop(
    w: float, g: float, square: float, /, lr: float, decay: float, rest: float, eps: float,
    weight_decay: float,
) -> tuple[float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.RMSProp`; `rest` is ``1 - decay``, computed in float64."""
    g = decayed(g, w, weight_decay)
    square = decay * square + rest * g * g
    return w - lr * g / (math.sqrt(square) + eps), square


@step
def adam(
    w: float, g: float, m: float, v: float, /, beta1: float, beta2: float, rest1: float,
    rest2: float, rate: float, root: float, eps: float, coupled: float, decoupled: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.Adam` or `mpips.optim.rules.AdamW`.

    Args:
        w: Parameter.
        g: Gradient.
        m: First moment.
        v: Second moment.
        beta1: Decay rate of m.
        beta2: Decay rate of v.
        rest1: ``1 - beta1``, computed in float64.
        rest2: ``1 - beta2``, computed in float64.
        rate: ``lr / (1 - beta1**t)``.
        root: ``1 / sqrt(1 - beta2**t)``.
        eps: Added to the root of the corrected second moment.
        coupled: Weight decay added to the gradient (Adam).
        decoupled: ``lr * weight_decay``, subtracted from the parameter (AdamW).
    """
    g = decayed(g, w, coupled)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    change = rate * m / (math.sqrt(v) * root + eps)
    # One subtraction from w: rounding (1 - lr * weight_decay) to float32 first could change the
    # decay by one per cent.
    return w - decayed(change, w, decoupled), m, v


@step
def amsgrad(
    w: float, g: float, m: float, v: float, largest: float, /, beta1: float, beta2: float,
    rest1: float, rest2: float, rate: float, root: float, eps: float, coupled: float,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.AMSGrad`; the rates are those of `adam`."""
    g = decayed(g, w, coupled)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    largest = v if v > largest or math.isnan(v) else largest
    return w - rate * m / (math.sqrt(largest) * root + eps), m, v, largest


@step
def nadam(
    w: float, g: float, m: float, v: float, /, beta1: float, beta2: float, rest1: float,
    rest2: float, of_grad: float, of_mean: float, root: float, eps: float, coupled: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.NAdam`; `of_grad` and `of_mean` have the rate in them."""
    g = decayed(g, w, coupled)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return w - (of_grad * g + of_mean * m) / (math.sqrt(v) * root + eps), m, v


@step
def radam(
    w: float, g: float, m: float, v: float, /, beta1: float, beta2: float, rest1: float,
    rest2: float, plain: float, adaptive: float, eps: float, coupled: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.RAdam`; one of the rates `plain` and `adaptive` is 0."""
    g = decayed(g, w, coupled)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return w - m * (adaptive / (math.sqrt(v) + eps) if adaptive != 0 else plain), m, v


@step
def adadelta(
    w: float, g: float, square: float, change_square: float, /, lr: float, decay: float,
    rest: float, eps: float, weight_decay: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.Adadelta`; `rest` is ``1 - decay``, computed in float64."""
    g = decayed(g, w, weight_decay)
    square = decay * square + rest * g * g
    change = math.sqrt(change_square + eps) / math.sqrt(square + eps) * g
    change_square = decay * change_square + rest * change * change
    return w - lr * change, square, change_square


@step
def lion(
    w: float, g: float, m: float, /, lr: float, beta1: float, beta2: float, rest1: float,
    rest2: float, weight_decay: float,
) -> tuple[float, float]:  # fmt: skip
    """Apply `mpips.optim.rules.Lion`."""
    mean, one = beta1 * m + rest1 * g, type(w)(1)
    sign = one if mean > 0 else -one if mean < 0 else mean  # NaN stays
    return w - lr * decayed(sign, w, weight_decay), beta2 * m + rest2 * g


@step
def ftrl(
    w: float, g: float, z: float, n: float, /, lr: float, beta: float, l1: float, l2: float
) -> tuple[float, float, float]:
    """Apply `mpips.optim.row_rules.Ftrl`."""
    new = n + g * g
    z = z + g - (math.sqrt(new) - math.sqrt(n)) / lr * w
    found = (math.copysign(l1, z) - z) / ((beta + math.sqrt(new)) / lr + l2)
    return type(w)(0) if abs(z) <= l1 else found, z, new


@step
def slow_momentum(
    w: float, mean: float, v: float, /, of_params: float, of_mean: float, beta: float,
    of_change: float, of_velocity: float,
) -> tuple[float, float]:  # fmt: skip
    """Apply `mpips.rounds.averaging.SlowMomentum`."""
    d = of_params * w - of_mean * mean
    v = beta * v + d
    return w - (of_change * d + of_velocity * v), v


@step
def elastic(x: float, centre: float, change: float, /, rate: float) -> tuple[float, float]:
    """Set ``change = rate * (x - centre)`` and subtract it from `x`."""
    change = rate * (x - centre)
    return x - change, change


# Rates of one row ------------------------------------------------------------------------------


@kernel("reassoc", "contract", inlined=True)
def sum_of_squares(x: Vector, y: Vector, decay: float) -> float:
    """Return the sum of the squares of ``x + decay y``."""
    total = x.dtype.type(0)
    for j in range(x.size):
        g = x[j] + x.dtype.type(decay) * y[j] if decay != 0 else x[j]
        total += g * g
    return total


@kernel(quick=True)
def power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` for 0 <= base <= 1."""
    result = 1.0
    while exponent > 0 and result > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@step
def row_adagrad(
    line: Vector, grad: Vector, fresh: bool, /, lr: float, eps: float, weight_decay: float
) -> Rates:
    """Update the sum of a row of `mpips.optim.row_rules.RowAdagrad`; returns the rates of `sgd`."""
    real, dim = line.dtype.type, grad.size
    total = real(line[dim] + sum_of_squares(grad, line[:dim], weight_decay) / real(dim))
    line[dim] = total
    return real(real(lr) / (math.sqrt(total) + real(eps))), real(weight_decay)


@step
def row_adam(
    line: Vector, grad: Vector, fresh: bool, /, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> Rates:  # fmt: skip
    """Count an update of a row of `mpips.optim.row_rules.LazyAdam`; returns the rates of `adam`."""
    real, dim = line.dtype.type, grad.size
    line[3 * dim] += real(1)
    t = int(line[3 * dim])
    return (
        real(beta1), real(beta2), real(1 - beta1), real(1 - beta2),
        real(lr / (1 - power(beta1, t))), real(1 / math.sqrt(1 - power(beta2, t))),
        real(eps), real(weight_decay), real(0),
    )  # fmt: skip


@step
def row_ftrl(
    line: Vector, grad: Vector, fresh: bool, /, lr: float, beta: float, l1: float, l2: float
) -> Rates:
    """Initialise z of a fresh row of `mpips.optim.row_rules.Ftrl`; returns the rates of `ftrl`."""
    real, dim = line.dtype.type, grad.size
    lr, beta, l1, l2 = real(lr), real(beta), real(l1), real(l2)
    if fresh:
        for j in range(dim):
            size = abs(line[j]) * (beta / lr + l2) + l1
            line[dim + j] = real(0) if line[j] == 0 else -math.copysign(size, line[j])
    return lr, beta, l1, l2
