"""Update rules that keep old values: `mpips.kernels.update_rules`, piece by piece.

A piece is so small that it, and what is kept of it, stay in the first-level cache.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels import update_rules
from mpips.kernels.compiled import Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, this is among its names
    from mpips.kernels.compiler import store_ordered

LOOPS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam")
SGD, MOMENTUM, NESTEROV, ADAGRAD, RMSPROP, ADAM = range(len(LOOPS))


@kernel(quick=True)
def copy(values: Vector, kept: Vector) -> None:
    """Copy values to the beginning of `kept`."""
    for i in range(values.size):
        kept[i] = values[i]


@kernel()
def keeping(
    rule: int,
    params: Vector,
    a: Vector,
    b: Vector,
    grad: Vector,
    s: Vector,
    undo: np.ndarray,
    journal: Vector,
    word: int,
    number: int,
) -> None:
    """Apply a rule; before each piece its old values are kept, and then its number is written.

    It takes ten arguments since a loop takes neither tuple nor object.

    Args:
        rule: Index of the rule in `LOOPS`.
        params: Parameters.
        a: The first slot, of no elements if there is none.
        b: Likewise the second one.
        grad: Gradient.
        s: The scalars of the rule.
        undo: Where the old values of a piece go, by turns: shape (turns, 1 + slots, piece).
        journal: Header words, dtype int64, 8-byte aligned; only their owner may write them.
        word: Which of them the number of a piece goes to.
        number: Of the first piece.
    """
    if params.size != grad.size or word < 0 or word >= journal.size:
        raise ValueError("keeping: vectors of one length, and a word of the journal, are expected")
    for at in range(0, params.size, undo.shape[2]):
        p = slice(at, min(at + undo.shape[2], params.size))
        w, g, a_p, b_p = params[p], grad[p], a[p], b[p]
        kept = undo[number % undo.shape[0]]
        copy(w, kept[0])
        if a.size:
            copy(a_p, kept[1])
        if b.size:
            copy(b_p, kept[2])
        store_ordered(journal, word, number)
        if rule == SGD:
            update_rules.sgd(w, g, s[0], s[1])
        elif rule == MOMENTUM:
            update_rules.momentum(w, g, a_p, s[0], s[1], s[2])
        elif rule == NESTEROV:
            update_rules.nesterov(w, g, a_p, s[0], s[1], s[2])
        elif rule == ADAGRAD:
            update_rules.adagrad(w, g, a_p, s[0], s[1], s[2])
        elif rule == RMSPROP:
            update_rules.rmsprop(w, g, a_p, s[0], s[1], s[2], s[3], s[4])
        else:
            update_rules.adam(
                w, g, a_p, b_p, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]
            )  # fmt: skip
        number += 1
