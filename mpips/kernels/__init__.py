"""Compiled loops: header words, slice reductions, checks, and one fused loop an update rule.

Every array is one-dimensional; float32 and float64 both work, and all arrays of one call share
the dtype. Loops are compiled without fast-math: each element is computed operation by operation
as IEEE 754 says, so NaN and infinity propagate, results equal NumPy's bit for bit, and a vector
cut into blocks gives the same bits as the whole. Contraction was measured and gains nothing,
since the loops wait for memory. Those that take any time
run without the GIL; all are kept on the disk (`mpips.kernels.compiled`).
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import compiling, kernel

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.compiler import array_at, load_acquire, sched_yield, store_release

__all__ = ["compiling", "kernel"]

# Short enough for a block of the output to stay in the first-level cache over all rows.
_BLOCK = 2048

# While a rank waits: offers of the core that it makes, each of under a microsecond where nobody
# takes it, and the looks between two of them.
_OFFERS = 40
_LOOKS = 50

Vector = np.ndarray


def addresses_of(arrays: Iterable[np.ndarray], index: int = 0) -> np.ndarray:
    """Return the address in bytes of that element of each array, dtype int64, for loops."""
    return np.array([array.ctypes.data + index * array.itemsize for array in arrays], np.int64)


def no_limit(n: int) -> np.ndarray:
    """Return bounds for `find_ahead` that nothing reaches, shape (n,), dtype int64."""
    return np.full(n, np.iinfo(np.int64).max)


# Header words -----------------------------------------------------------------------------


@kernel(quick=True)
def publish(words: Vector, index: int, value: int) -> None:
    """Write one header word, after everything that this thread has written before.

    A fence follows, so that nothing that comes after is done before the word can be seen.

    Args:
        words: Header, dtype int64, 8-byte aligned; only its owner may publish.
        index: Which word, in ``[0, words.size)``.
        value: Its new value.

    Raises:
        IndexError: If the index is outside the header.
    """
    if index < 0 or index >= words.size:
        raise IndexError("header word outside the header")
    store_release(words, index, value)


@kernel(quick=True)
def observe(words: Vector, index: int) -> int:
    """Read one header word, after all earlier reads and before all later ones.

    What its owner wrote before publishing the value read is visible from then on.

    Args:
        words: Header, dtype int64, 8-byte aligned.
        index: Which word, in ``[0, words.size)``.

    Raises:
        IndexError: If the index is outside the header.
    """
    if index < 0 or index >= words.size:
        raise IndexError("header word outside the header")
    return load_acquire(words, index)


@kernel(quick=True)
def find_ahead(words: Vector, own: Vector, done: Vector, limit: Vector, first: int) -> int:
    """Find a header word that is ahead of what was done about it; all are looked at in turn.

    Args:
        words: Addresses of header words, shape (n,), dtype int64. The words are int64, 8-byte
            aligned, and stay alive during the call.
        own: Place of each in `done` and `limit`, shape (n,), dtype int64.
        done: Header words of what was done last, dtype int64; the next is one more.
        limit: The most that may be done now, shape and dtype of `done`.
        first: Which word to look at first, in ``[0, n)``.

    Returns:
        The index of the first one found, or -1. What its owner wrote before is then visible.
    """
    for i in range(words.size):
        k = (first + i) % words.size
        seq = observe(done, own[k]) + 1
        word = array_at(words[k], words, 1)
        if seq <= limit[own[k]] and observe(word, 0) >= seq:
            return k
    return -1


@kernel()
def meet(words: Vector, turn: int, looks: int) -> bool:
    """Publish `turn` in one's own header word, and look whether the others' have reached it too.

    Args:
        words: Addresses of header words, one's own first, shape (n,), dtype int64. The words are
            int64, 8-byte aligned, and stay alive during the call.
        turn: Number of the meeting, larger than that of the one before.
        looks: How many looks may be in vain before the core is offered to whoever else wants it;
            then it is offered again and again, for a bounded time. 0 for a single look.

    Returns:
        Whether all have come. What they wrote before is then visible; if not, call again.
    """
    publish(array_at(words[0], words, 1), 0, turn)
    k, offers = 1, _OFFERS if looks else 0
    for offer in range(offers + 1):
        vain = 0
        while k < words.size and vain <= looks:
            if observe(array_at(words[k], words, 1), 0) >= turn:
                k += 1
            else:
                vain += 1
        if k == words.size:
            return True
        if offer < offers:
            sched_yield()
        looks = min(looks, _LOOKS)
    return False


@kernel()
def meet_and_add(words: Vector, turn: int, looks: int, rows: Vector, out: Vector) -> bool:
    """`meet`, and where all have come, add up a row of each; one call instead of two.

    Args:
        words: Addresses of header words, one's own first; see `meet`.
        turn: Number of the meeting.
        looks: How many looks may be in vain; see `meet`.
        rows: Address in bytes of each row, shape (n,), dtype int64. The rows have out's dtype and
            length, are aligned to it, and stay alive during the call.
        out: Where the sum goes, in the order of `rows`; must not overlap any of them.

    Returns:
        Whether all have come; if not, nothing is added up.
    """
    if not meet(words, turn, looks):
        return False
    out[:] = 0
    for k in range(rows.size):
        row = array_at(rows[k], out, out.size)
        for i in range(out.size):
            out[i] += row[i]
    return True


# Reductions, copies and checks --------------------------------------------------------------


# Blocks are slices with their own loop from zero: an index with an offset is tested for being
# negative at every element, and the loop is not vectorised (three times slower).


@kernel()
def sum_rows(addresses: Vector, weights: Vector, begin: int, out: Vector) -> None:
    """Set ``out[i] = sum_k weights[k] * row_k[begin + i]``, adding the rows in their order.

    A row of weight 0 is not read at all: a rank without samples may hold anything. The result
    is the same bit for bit in every call, however ``[begin, begin + out.size)`` is cut.

    Args:
        addresses: Address in bytes of element 0 of each row, shape (n_rows,), dtype int64. The
            rows have out's dtype, are aligned to it, hold begin + out.size elements at least,
            and stay alive during the call, which cannot check any of this.
        weights: Shape (n_rows,), dtype float64; rounded to out's dtype.
        begin: First element of the rows that is summed, at least 0.
        out: Where the sum goes; must not overlap any row.

    Raises:
        ValueError: If addresses and weights differ in length, or begin is negative.
    """
    if addresses.size != weights.size or begin < 0:
        raise ValueError("sum_rows: one weight a row and begin >= 0 are expected")
    for offset in range(0, out.size, _BLOCK):
        block = out[offset : offset + _BLOCK]
        block[:] = 0
        for k in range(addresses.size):
            weight = out.dtype.type(weights[k])
            if weight != 0:
                address = np.int64(addresses[k]) + (begin + offset) * out.itemsize
                row = array_at(address, out, block.size)
                for i in range(block.size):
                    block[i] += weight * row[i]


# Reassociation lets the sum run in vector lanes, in an order fixed by the length and the CPU
# type; it says nothing about NaN or infinity.
@kernel("reassoc", "contract")
def sum_squares(x: Vector) -> float:
    """Return ``sum(x ** 2)``, accumulated in float64 block by block.

    The relative error is below 1e-12 for vectors of up to 10 million elements. NaN if any element
    is NaN.
    """
    total = 0.0
    for offset in range(0, x.size, _BLOCK):
        block = x[offset : offset + _BLOCK]
        partial = 0.0
        for i in range(block.size):
            value = np.float64(block[i])
            partial += value * value
        total += partial
    return total


@kernel()
def all_finite(x: Vector) -> bool:
    """Return whether no element is NaN or infinite; True for an empty vector."""
    for offset in range(0, x.size, _BLOCK):
        block = x[offset : offset + _BLOCK]
        bad = False
        for i in range(block.size):
            bad |= not math.isfinite(block[i])
        if bad:
            return False
    return True


@kernel()
def scale(x: Vector, factor: float) -> None:
    """Multiply `x` in place by `factor`, rounded to x's dtype."""
    real = x.dtype.type(factor)
    for i in range(x.size):
        x[i] *= real


@kernel()
def add_scaled(out: Vector, keep: float, x: Vector, weight: float) -> None:
    """Set ``out = keep * out + weight * x``, the factors rounded to out's dtype.

    Raises:
        ValueError: If the lengths differ.
    """
    if out.size != x.size:
        raise ValueError("add_scaled: vectors of one length are expected")
    real = out.dtype.type
    keep, weight = real(keep), real(weight)
    for i in range(out.size):
        out[i] = keep * out[i] + weight * x[i]


@kernel()
def copy_finite(src: Vector, dst: Vector) -> bool:
    """Copy all of `src` to `dst`, and return whether no element is NaN or infinite.

    Raises:
        ValueError: If the lengths differ.
    """
    if src.size != dst.size:
        raise ValueError("copy_finite: vectors of one length are expected")
    bad = False
    for i in range(src.size):
        value = src[i]
        dst[i] = value
        bad |= not math.isfinite(value)
    return not bad


@kernel()
def slow_momentum(params: Vector, mean: Vector, velocity: Vector, beta: float) -> None:
    """Apply `mpips.rounds.averaging.SlowMomentum` in place."""
    if params.size != mean.size or params.size != velocity.size:
        raise ValueError("slow_momentum: vectors of one length are expected")
    beta = params.dtype.type(beta)
    for i in range(params.size):
        w = params[i]
        v = beta * velocity[i] + (w - mean[i])
        velocity[i] = v
        params[i] = w - v


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


# Update rules: the equations stand in optim.py ------------------------------------------------
#
# Scalars come as float64 and are rounded to the vectors' dtype here, since one float64 operand
# would turn the whole loop into float64. Weight decay is tested for zero so that an infinite
# parameter without decay does not become NaN; LLVM makes a mask of the test.


@kernel()
def sgd(params: Vector, grad: Vector, lr: float, weight_decay: float) -> None:
    """Apply `mpips.optim.Sgd` in place."""
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
    """Apply `mpips.optim.Momentum` in place."""
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
    """Apply `mpips.optim.Nesterov` in place."""
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
    """Apply `mpips.optim.Adagrad` in place."""
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
    """Apply `mpips.optim.RMSProp` in place."""
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
    """Apply `mpips.optim.Adam` or `mpips.optim.AdamW` in place.

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


# Delay compensation -----------------------------------------------------------------------


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
    """Update ``square``, and write what `compensate` does with ``factor / sqrt(square + eps)``."""
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
