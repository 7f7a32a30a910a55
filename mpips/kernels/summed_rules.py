"""Update rules of a gradient that is a sum of rows: each block of it is in the cache when applied.

Loops of `mpips.kernels.update_rules`, by the same names, behind `sum_rows`. They take parameters
and slots as those do, then what `sum_rows` takes, and the scalars of the rule as one vector `s`;
`room` is for a block of the sum, at least one element, and what is in it does not matter.
"""

from mpips.kernels import update_rules
from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.vectors import sum_rows


@kernel()
def sgd(params: Vector, rows: Vector, weights: Vector, begin: int, room: Vector, s: Vector) -> None:
    """Apply `update_rules.sgd` to ``sum_k weights[k] * row_k[begin + i]``."""
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        update_rules.sgd(params[part], grad, s[0], s[1])


@kernel()
def momentum(
    params: Vector,
    velocity: Vector,
    rows: Vector,
    weights: Vector,
    begin: int,
    room: Vector,
    s: Vector,
) -> None:
    """Apply `update_rules.momentum` to ``sum_k weights[k] * row_k[begin + i]``."""
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        update_rules.momentum(params[part], grad, velocity[part], s[0], s[1], s[2])


@kernel()
def nesterov(
    params: Vector,
    velocity: Vector,
    rows: Vector,
    weights: Vector,
    begin: int,
    room: Vector,
    s: Vector,
) -> None:
    """Apply `update_rules.nesterov` to ``sum_k weights[k] * row_k[begin + i]``."""
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        update_rules.nesterov(params[part], grad, velocity[part], s[0], s[1], s[2])


@kernel()
def adagrad(
    params: Vector,
    total: Vector,
    rows: Vector,
    weights: Vector,
    begin: int,
    room: Vector,
    s: Vector,
) -> None:
    """Apply `update_rules.adagrad` to ``sum_k weights[k] * row_k[begin + i]``."""
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        update_rules.adagrad(params[part], grad, total[part], s[0], s[1], s[2])


@kernel()
def rmsprop(
    params: Vector,
    square: Vector,
    rows: Vector,
    weights: Vector,
    begin: int,
    room: Vector,
    s: Vector,
) -> None:
    """Apply `update_rules.rmsprop` to ``sum_k weights[k] * row_k[begin + i]``."""
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        update_rules.rmsprop(params[part], grad, square[part], s[0], s[1], s[2], s[3], s[4])


@kernel()
def adam(
    params: Vector,
    m: Vector,
    v: Vector,
    rows: Vector,
    weights: Vector,
    begin: int,
    room: Vector,
    s: Vector,
) -> None:
    """Apply `update_rules.adam` to ``sum_k weights[k] * row_k[begin + i]``."""
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        update_rules.adam(
            params[part], grad, m[part], v[part],
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8],
        )  # fmt: skip
