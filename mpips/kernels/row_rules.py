"""Update rules row by row, each one fused loop; the equations stand in `mpips.optim.row_rules`.

All loops take the same: the rows' lines and local places, a gradient a row, the lines and stripe
words of `mpips.kernels.rows`, the table's key, and the rule's numbers as float64. No row may be
there twice. Numbers are rounded to the lines' dtype here, as in `mpips.kernels.update_rules`.
"""

import math

from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.rows import AHEAD, BIT_MASK, STRIPE_BITS, Matrix, close_line, fetch, open_line


@kernel()
def sgd(
    slot: Vector,
    local: Vector,
    grads: Matrix,
    lines: Matrix,
    stripes: Vector,
    key: Vector,
    numbers: Vector,
) -> None:
    """Apply `mpips.optim.row_rules.Sgd`; numbers: rate, weight decay."""
    real, dim = lines.dtype.type, grads.shape[1]
    lr, decay = real(numbers[0]), real(numbers[1])
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        word = open_line(slot[u], local[u], dim, lines, stripes, key)
        w, grad = lines[slot[u], :dim], grads[u]
        for j in range(dim):
            g = grad[j] + decay * w[j] if decay != 0 else grad[j]
            w[j] -= lr * g
        close_line(slot[u], stripes, word)


@kernel()
def adagrad(
    slot: Vector,
    local: Vector,
    grads: Matrix,
    lines: Matrix,
    stripes: Vector,
    key: Vector,
    numbers: Vector,
) -> None:
    """Apply `mpips.optim.row_rules.Adagrad`; numbers: rate, eps, weight decay."""
    real, dim = lines.dtype.type, grads.shape[1]
    lr, eps, decay = real(numbers[0]), real(numbers[1]), real(numbers[2])
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        word = open_line(slot[u], local[u], dim, lines, stripes, key)
        w, total, grad = lines[slot[u], :dim], lines[slot[u], dim : 2 * dim], grads[u]
        for j in range(dim):
            g = grad[j] + decay * w[j] if decay != 0 else grad[j]
            s = total[j] + g * g
            total[j] = s
            w[j] -= lr * g / (math.sqrt(s) + eps)
        close_line(slot[u], stripes, word)


@kernel("reassoc", "contract")
def sum_of_squares(x: Vector, y: Vector, decay: float) -> float:
    """Return the sum of the squares of ``x + decay y``."""
    total = x.dtype.type(0)
    for j in range(x.size):
        g = x[j] + x.dtype.type(decay) * y[j] if decay != 0 else x[j]
        total += g * g
    return total


@kernel()
def row_adagrad(
    slot: Vector,
    local: Vector,
    grads: Matrix,
    lines: Matrix,
    stripes: Vector,
    key: Vector,
    numbers: Vector,
) -> None:
    """Apply `mpips.optim.row_rules.RowAdagrad`; numbers: rate, eps, weight decay."""
    real, dim = lines.dtype.type, grads.shape[1]
    lr, eps, decay = real(numbers[0]), real(numbers[1]), real(numbers[2])
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        word = open_line(slot[u], local[u], dim, lines, stripes, key)
        w, grad = lines[slot[u], :dim], grads[u]
        s = real(lines[slot[u], dim] + sum_of_squares(grad, w, numbers[2]) / real(dim))
        lines[slot[u], dim] = s
        rate = real(lr / (math.sqrt(s) + eps))
        for j in range(dim):
            g = grad[j] + decay * w[j] if decay != 0 else grad[j]
            w[j] -= rate * g
        close_line(slot[u], stripes, word)


@kernel(quick=True)
def power(base: float, exponent: int) -> float:
    """Return a number from 0 to 1 to the power of a whole one."""
    result = 1.0
    while exponent > 0 and result > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@kernel()
def adam(
    slot: Vector,
    local: Vector,
    grads: Matrix,
    lines: Matrix,
    stripes: Vector,
    key: Vector,
    numbers: Vector,
) -> None:
    """Apply `mpips.optim.row_rules.LazyAdam`; numbers: rate, beta1, beta2, eps, weight decay."""
    real, dim = lines.dtype.type, grads.shape[1]
    beta1, beta2, eps, decay = (
        real(numbers[1]),
        real(numbers[2]),
        real(numbers[3]),
        real(numbers[4]),
    )
    rest1, rest2 = real(1 - numbers[1]), real(1 - numbers[2])
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        word = open_line(slot[u], local[u], dim, lines, stripes, key)
        line, grad = lines[slot[u]], grads[u]
        w, m, v = line[:dim], line[dim : 2 * dim], line[2 * dim : 3 * dim]
        line[3 * dim] += real(1)
        t = int(line[3 * dim])
        rate = real(numbers[0] / (1 - power(numbers[1], t)))
        root = real(1 / math.sqrt(1 - power(numbers[2], t)))
        for j in range(dim):
            g = grad[j] + decay * w[j] if decay != 0 else grad[j]
            first = beta1 * m[j] + rest1 * g
            second = beta2 * v[j] + rest2 * g * g
            m[j] = first
            v[j] = second
            w[j] -= rate * first / (math.sqrt(second) * root + eps)
        close_line(slot[u], stripes, word)


@kernel()
def ftrl(
    slot: Vector,
    local: Vector,
    grads: Matrix,
    lines: Matrix,
    stripes: Vector,
    key: Vector,
    numbers: Vector,
) -> None:
    """Apply `mpips.optim.row_rules.Ftrl`; numbers: rate, beta, l1, l2."""
    real, dim = lines.dtype.type, grads.shape[1]
    alpha, beta, l1, l2 = real(numbers[0]), real(numbers[1]), real(numbers[2]), real(numbers[3])
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        fresh = not stripes[slot[u] >> STRIPE_BITS] >> (slot[u] & BIT_MASK) & 1
        word = open_line(slot[u], local[u], dim, lines, stripes, key)
        line, grad = lines[slot[u]], grads[u]
        w, z, n = line[:dim], line[dim : 2 * dim], line[2 * dim : 3 * dim]
        if fresh:  # the z of which the parameters that it begins with are made
            for j in range(dim):
                size = abs(w[j]) * (beta / alpha + l2) + l1
                z[j] = real(0) if w[j] == 0 else -math.copysign(size, w[j])
        for j in range(dim):
            g, old = grad[j], n[j]
            new = old + g * g
            at = z[j] + g - (math.sqrt(new) - math.sqrt(old)) / alpha * w[j]
            n[j] = new
            z[j] = at
            least = math.copysign(l1, at)
            divisor = (beta + math.sqrt(new)) / alpha + l2
            w[j] = real(0) if abs(at) <= l1 else (least - at) / divisor
        close_line(slot[u], stripes, word)
