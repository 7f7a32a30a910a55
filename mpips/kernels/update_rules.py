"""Update rules, each one fused loop; the equations stand in `mpips.optim.rules`.

A loop takes the vectors, and then every scalar by itself: loops take no tuple and no object, and a
scalar that is computed once in float64 is not computed for each element.

Scalars come as float64 and are rounded to the vectors' dtype here, since one float64 operand
would turn the whole loop into float64. Weight decay is tested for zero so that an infinite
parameter without decay does not become NaN; LLVM makes a mask of the test.
"""

import math

from mpips.kernels.compiled import Vector, kernel


@kernel()
def sgd(params: Vector, grad: Vector, lr: float, weight_decay: float) -> None:
    """Apply `mpips.optim.rules.Sgd` in place."""
    if params.size != grad.size:
        raise ValueError("sgd: vectors of one length are expected")
    real = params.dtype.type
    lr, decay = real(lr), real(weight_decay)
    for i in range(params.size):
        w = params[i]
        g = grad[i] + decay * w if decay != 0 else grad[i]
        params[i] = w - lr * g


@kernel()
def momentum(
    params: Vector, grad: Vector, velocity: Vector, lr: float, mu: float, weight_decay: float
) -> None:
    """Apply `mpips.optim.rules.Momentum` in place."""
    if params.size != grad.size or params.size != velocity.size:
        raise ValueError("momentum: vectors of one length are expected")
    real = params.dtype.type
    lr, mu, decay = real(lr), real(mu), real(weight_decay)
    for i in range(params.size):
        w = params[i]
        g = grad[i] + decay * w if decay != 0 else grad[i]
        v = mu * velocity[i] + g
        velocity[i] = v
        params[i] = w - lr * v


@kernel()
def nesterov(
    params: Vector, grad: Vector, velocity: Vector, lr: float, mu: float, weight_decay: float
) -> None:
    """Apply `mpips.optim.rules.Nesterov` in place."""
    if params.size != grad.size or params.size != velocity.size:
        raise ValueError("nesterov: vectors of one length are expected")
    real = params.dtype.type
    lr, mu, decay = real(lr), real(mu), real(weight_decay)
    for i in range(params.size):
        w = params[i]
        g = grad[i] + decay * w if decay != 0 else grad[i]
        v = mu * velocity[i] + g
        velocity[i] = v
        params[i] = w - lr * (g + mu * v)


@kernel()
def adagrad(
    params: Vector, grad: Vector, total: Vector, lr: float, eps: float, weight_decay: float
) -> None:
    """Apply `mpips.optim.rules.Adagrad` in place."""
    if params.size != grad.size or params.size != total.size:
        raise ValueError("adagrad: vectors of one length are expected")
    real = params.dtype.type
    lr, eps, decay = real(lr), real(eps), real(weight_decay)
    for i in range(params.size):
        w = params[i]
        g = grad[i] + decay * w if decay != 0 else grad[i]
        s = total[i] + g * g
        total[i] = s
        params[i] = w - lr * g / (math.sqrt(s) + eps)


@kernel()
def rmsprop(
    params: Vector,
    grad: Vector,
    square: Vector,
    lr: float,
    rho: float,
    one_minus_rho: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Apply `mpips.optim.rules.RMSProp` in place."""
    if params.size != grad.size or params.size != square.size:
        raise ValueError("rmsprop: vectors of one length are expected")
    real = params.dtype.type
    lr, rho, rest = real(lr), real(rho), real(one_minus_rho)
    eps, decay = real(eps), real(weight_decay)
    for i in range(params.size):
        w = params[i]
        g = grad[i] + decay * w if decay != 0 else grad[i]
        s = rho * square[i] + rest * g * g
        square[i] = s
        params[i] = w - lr * g / (math.sqrt(s) + eps)


@kernel()
def adam(
    params: Vector,
    grad: Vector,
    m: Vector,
    v: Vector,
    beta1: float,
    beta2: float,
    rest1: float,
    rest2: float,
    rate: float,
    root: float,
    eps: float,
    coupled: float,
    decoupled: float,
) -> None:
    """Apply `mpips.optim.rules.Adam` or `mpips.optim.rules.AdamW` in place.

    It takes 13 arguments since a loop takes neither tuple nor object: every scalar stands alone.

    Args:
        params: Parameters w.
        grad: Gradient g.
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
    if params.size != grad.size or params.size != m.size or params.size != v.size:
        raise ValueError("adam: vectors of one length are expected")
    real = params.dtype.type
    beta1, beta2, rest1, rest2 = real(beta1), real(beta2), real(rest1), real(rest2)
    rate, root, eps = real(rate), real(root), real(eps)
    coupled, decoupled = real(coupled), real(decoupled)
    for i in range(params.size):
        w = params[i]
        g = grad[i] + coupled * w if coupled != 0 else grad[i]
        first = beta1 * m[i] + rest1 * g
        second = beta2 * v[i] + rest2 * g * g
        m[i] = first
        v[i] = second
        change = rate * first / (math.sqrt(second) * root + eps)
        # One subtraction from w: rounding (1 - lr * weight_decay) to float32 first would change
        # the decay by a per cent.
        params[i] = w - (change + decoupled * w if decoupled != 0 else change)


@kernel()
def slow_momentum(
    params: Vector,
    mean: Vector,
    velocity: Vector,
    of_params: float,
    of_mean: float,
    beta: float,
    of_change: float,
    of_velocity: float,
) -> None:
    """Apply `mpips.rounds.averaging.SlowMomentum` in place."""
    if params.size != mean.size or params.size != velocity.size:
        raise ValueError("slow_momentum: vectors of one length are expected")
    of_params, of_mean = params.dtype.type(of_params), params.dtype.type(of_mean)
    beta = params.dtype.type(beta)
    of_change, of_velocity = params.dtype.type(of_change), params.dtype.type(of_velocity)
    for i in range(params.size):
        w = params[i]
        d = of_params * w - of_mean * mean[i]
        v = beta * velocity[i] + d
        velocity[i] = v
        params[i] = w - (of_change * d + of_velocity * v)


@kernel()
def elastic(params: Vector, centre: Vector, change: Vector, rate: float) -> None:
    """Set ``change = rate * (params - centre)`` and subtract it from `params`."""
    if params.size != centre.size or params.size != change.size:
        raise ValueError("elastic: vectors of one length are expected")
    rate = params.dtype.type(rate)
    for i in range(params.size):
        x = params[i]
        d = rate * (x - centre[i])
        change[i] = d
        params[i] = x - d
