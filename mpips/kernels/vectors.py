"""Loops over vectors: sums, norms, checks, copies, delay compensation.

Each block is a slice with an inner loop from zero. With an index plus an offset, numba would test
every index for being negative, which prevents vectorisation (three times slower).
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # the compiler of loops defines this name
    from mpips.kernels.intrinsics import array_at

# Elements of a block of the output, which stays in the L1 cache over all rows.
_BLOCK = 2048


def addresses_of(arrays: Iterable[np.ndarray], index: int = 0) -> np.ndarray:
    """Return the address in bytes of element `index` of each array, dtype int64, for loops."""
    return np.array([array.ctypes.data + index * array.itemsize for array in arrays], np.int64)


@kernel()
def sum_rows(addresses: Vector, weights: Vector, begin: int, out: Vector) -> None:
    """Set ``out[i] = sum_k weights[k] * row_k[begin + i]``, adding the rows in their order.

    A row of weight 0 is not read: the row of a rank without samples may contain anything. The
    result has the same bits in every call, also if several calls sum parts of the range ``[begin,
    begin + out.size)``.

    Args:
        addresses: Address in bytes of element 0 of each row, shape (n_rows,), dtype int64. The
            rows have out's dtype, are aligned to it, have at least ``begin + out.size`` elements,
            and stay alive during the call. The loop cannot check any of this.
        weights: Weight of each row, shape (n_rows,), dtype float64; rounded to out's dtype.
        begin: Index of the first element of the rows to sum, at least 0.
        out: Gets the sum; must not overlap any row.

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
                if two != 0:  # reading two rows at once is faster than one after the other
                    k += 1
                    other = array_at(np.int64(addresses[k]) + at, out, block.size)
                    for i in range(block.size):
                        block[i] = block[i] + one * row[i] + two * other[i]
                else:
                    for i in range(block.size):
                        block[i] += one * row[i]
            k += 1


# Reassociation allows a sum in vector lanes; its order depends only on the length and the type of
# CPU. The flags do not allow LLVM to assume anything about NaN and infinity.
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
        rows: The rows to read, shape (n, width), of real numbers.
        numbers: Index in `rows` of each row to copy, shape (k,), dtype int64.
        places: Index in `out` of each copy, shape (k,), dtype int64.
        factor: Factor of the copies; rounded to out's dtype.
        out: Gets the rows, shape (m, width), float32 or float64; must not overlap `rows`.

    Raises:
        ValueError: If the widths or lengths differ, or an index is out of range.
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
    """Set ``out = grad + factor grad^2 (params - origin)``; see `mpips.optim.staleness`.

    Raises:
        ValueError: If the lengths differ.
    """
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
    """Update `square`, and do as `compensate`, with ``factor / sqrt(square + eps)`` as the factor.

    The update is ``square = decay square + rest grad^2``. The loop has 9 parameters, since loops
    take neither tuples nor objects.

    Raises:
        ValueError: If the lengths differ.
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
