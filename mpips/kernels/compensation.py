"""Delay compensation of a gradient, in one pass; see `mpips.optim.staleness`."""

import math

from mpips.kernels.compiled import Vector, kernel


@kernel()
def compensate(out: Vector, grad: Vector, params: Vector, origin: Vector, factor: float) -> None:
    """Write ``grad + factor grad^2 (params - origin)``; see `mpips.optim.staleness`."""
    if out.size != grad.size or out.size != params.size or out.size != origin.size:
        raise ValueError("compensate: vectors of one length are expected")
    factor = params.dtype.type(factor)
    for i in range(out.size):
        g = grad[i]
        out[i] = g + factor * g * g * (params[i] - origin[i])


@kernel()
def compensate_adaptive(
    out: Vector,
    grad: Vector,
    params: Vector,
    origin: Vector,
    square: Vector,
    factor: float,
    decay: float,
    rest: float,
    eps: float,
) -> None:
    """Update ``square``, and write what `compensate` does with ``factor / sqrt(square + eps)``.

    It takes 9 arguments since a loop takes neither tuple nor object: every scalar stands alone.
    """
    if out.size != grad.size or out.size != params.size:
        raise ValueError("compensate_adaptive: vectors of one length are expected")
    if out.size != origin.size or out.size != square.size:
        raise ValueError("compensate_adaptive: vectors of one length are expected")
    real = params.dtype.type
    factor, decay, rest, eps = real(factor), real(decay), real(rest), real(eps)
    for i in range(out.size):
        g = grad[i]
        s = decay * square[i] + rest * g * g
        square[i] = s
        out[i] = g + factor / math.sqrt(s + eps) * g * g * (params[i] - origin[i])
