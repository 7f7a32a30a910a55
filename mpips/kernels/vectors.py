"""Loops over vectors: sums, norms, checks, copies, delay compensation.

Blocks are slices with their own loop from zero: an index with an offset is tested for being
negative at every element, and the loop is not vectorised (three times slower).
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, this is among its names
    from mpips.kernels.intrinsics import array_at

# Short enough for a block of the output to stay in the first-level cache over all rows.
_BLOCK = 2048


def addresses_of(arrays: Iterable[np.ndarray], index: int = 0) -> np.ndarray:
    """Return the address in bytes of that element of each array, dtype int64, for loops."""
    return np.array([array.ctypes.data + index * array.itemsize for array in arrays], np.int64)


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
        at = (begin + offset) * out.itemsize
        k = 0
        while k < addresses.size:
            one = out.dtype.type(weights[k])
            if one != 0:
                row = array_at(np.int64(addresses[k]) + at, out, block.size)
                two = out.dtype.type(weights[k + 1] if k + 1 < addresses.size else 0.0)
                if two != 0:  # two rows at once come from memory sooner than one behind the other
                    k += 1
                    other = array_at(np.int64(addresses[k]) + at, out, block.size)
                    for i in range(block.size):
                        block[i] = block[i] + one * row[i] + two * other[i]
                else:
                    for i in range(block.size):
                        block[i] += one * row[i]
            k += 1


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
def take_rows(
    rows: np.ndarray, numbers: Vector, places: Vector, factor: float, out: np.ndarray
) -> None:
    """Set ``out[places[k]] = factor * rows[numbers[k]]``, in out's dtype.

    Args:
        rows: Shape (n, width), of real numbers.
        numbers: Which rows, shape (k,), dtype int64.
        places: Where each goes, shape (k,), dtype int64.
        factor: Rounded to out's dtype.
        out: Shape (m, width), float32 or float64; must not overlap `rows`.

    Raises:
        ValueError: If the widths or lengths differ, or a number is no row of its array.
    """
    if rows.shape[1] != out.shape[1] or numbers.size != places.size:
        raise ValueError("take_rows: rows of one length, and a place for each, are expected")
    for k in range(numbers.size):
        if not (0 <= numbers[k] < rows.shape[0] and 0 <= places[k] < out.shape[0]):
            raise ValueError("take_rows: a number beyond the rows")
    real = out.dtype.type
    one = real(factor)
    for k in range(numbers.size):
        row, target = rows[numbers[k]], out[places[k]]
        for i in range(row.size):
            target[i] = one * real(row[i])


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
