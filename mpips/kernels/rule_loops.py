"""Loops made of an update rule's step: dense, summed, undoable, by rows.

Each loop is generated as the text of a function. It has one parameter for each state vector and
each rate of the step, since loops take neither tuples nor objects. The step is compiled into the
loop.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np

from mpips.kernels import vectors
from mpips.kernels.atomics import publish
from mpips.kernels.compiled import Kernel, Matrix, Vector, kernel


def step(function: Callable[..., object]) -> Kernel:
    """Make a step, or a function that steps call; it is compiled into the loops that use it."""
    return Kernel(cast(FunctionType, function), frozenset(), quick=True, inlined=True)


_step = step  # functions of this module have a parameter named `step`


class _Names(tuple[str, ...]):
    """Names of variables; formatting repeats the format text with each name in place of ``?``.

    ``f"{_Names(['a', 'b']):?[i], }"`` is ``"a[i], b[i], "``.
    """

    def __format__(self, text: str) -> str:
        return "".join(text.replace("?", name) for name in self)


def several(form: str, count: int) -> _Names:
    """Return numbered variables: `s0` and `s1` for ``several("s{}", 2)``."""
    return _Names(form.format(k) for k in range(count))


def rates_of(step: Kernel) -> tuple[str, ...]:
    """Return the names of a step's rates: ``("lr",)`` for ``def step(w, g, m, v, /, lr)``."""
    code = step.function.__code__
    return code.co_varnames[code.co_posonlyargcount : code.co_argcount]


def states_of(step: Kernel) -> int:
    """Return the number of state vectors of a step: 2 for ``def step(w, g, m, v, /, lr)``."""
    return step.function.__code__.co_posonlyargcount - 2


def _counts(step: Kernel) -> tuple[int, int]:
    """Return the numbers of state vectors and of rates of a step."""
    return states_of(step), len(rates_of(step))


def loop_of(name: str, text: str, **names: Any) -> Kernel:
    """Make a loop from the text of a function called ``loop``.

    Args:
        name: Name of the loop.
        text: Definition of the function.
        names: Values of the global names that the text uses.
    """
    names |= {"Vector": Vector, "Matrix": Matrix, "Array": np.ndarray, "__name__": __name__}
    exec(text, names)
    made: FunctionType = names["loop"]
    made.__name__ = name
    return cast(Kernel, kernel()(made))


@cache
def dense(step: Kernel) -> Kernel:
    """Make the loop that applies a step to each element of vectors.

    The loop takes parameters, gradient, state vectors, and each rate as a float64.
    """
    states, rates = _counts(step)
    s, r = several("s{}", states), several("r{}", rates)
    text = f"""
def loop(params: Vector, grad: Vector, {s:?: Vector, }{r:?: float, }) -> None:
    if params.size != grad.size{s: or params.size != ?.size}:
        raise ValueError("{step.name}: vectors of one length are expected")
    real = params.dtype.type
    {r:? = real(?); }
    for i in range(params.size):
        params[i], {s:?[i], } = step(params[i], grad[i], {s:?[i], }{r:?, })
"""
    return loop_of(step.name, text, step=step)


@cache
def summed(step: Kernel, keeps: bool = False) -> Kernel:
    """Make the loop for a gradient that is a weighted sum of vectors.

    The last two vectors are added in the pass that applies the step. The sum of the vectors before
    them is computed block by block, so that a block stays in the CPU's cache. All orders of
    additions, and so all bits, are those of `mpips.kernels.vectors.sum_rows` and `dense`.

    The loop takes parameters, state vectors, and the arguments of `sum_rows`. In place of `out` it
    takes a buffer for one block, of at least one element. Then comes each rate as a float64.

    Args:
        step: The step.
        keeps: Whether the loop saves the old values of each block to an undo log, as a piece. Then
            it takes the fields of `Undo` too.
    """
    states, rates = _counts(step)
    s, r = several("s{}", states), several("r{}", rates)
    undo, keep = "", ""
    if keeps:
        undo = "undo: Array, undo_log: Vector, word: int, number: int,"
        keep = _keep("part", states) + "; number += 1"
    text = f"""
def loop(
    params: Vector, {s:?: Vector, }rows: Vector, weights: Vector, begin: int, buffer: Vector,
    {r:?: float, }{undo}
) -> None:
    if rows.size != weights.size or begin < 0 or not buffer.size{s: or params.size != ?.size}:
        raise ValueError("{step.name}: vectors of one length, weights and a buffer are expected")
    first, last, count = read_last(weights, params)
    for at in range(0, params.size, buffer.size):
        part = slice(at, min(at + buffer.size, params.size))
        grad = buffer[: part.stop - at]
        {keep}
        if count == 0:
            sum_rows(rows, weights, begin + at, grad)
            apply_one(params[part], {s:?[part], }grad, 1.0, {r:?, })
            continue
        offset = (begin + at) * params.itemsize
        a = array_at(rows[first] + offset, grad, grad.size)
        b = array_at(rows[last] + offset, grad, grad.size)
        if count == 1:
            apply_one(params[part], {s:?[part], }b, weights[last], {r:?, })
        elif count == 2:
            apply_two(params[part], {s:?[part], }a, weights[first], b, weights[last], {r:?, })
        else:
            sum_rows(rows[:first], weights[:first], begin + at, grad)
            apply_three(
                params[part], {s:?[part], }grad, 1.0, a, weights[first], b, weights[last], {r:?, }
            )
"""
    names: dict[str, Any] = {"sum_rows": vectors.sum_rows, "copy": copy, "read_last": _last_two}
    names |= {f"apply_{word}": _fused(step, n) for n, word in enumerate(("one", "two", "three"), 1)}
    return loop_of(f"{step.name}_summed{'_undoable' * keeps}", text, **names)


@kernel(quick=True)
def _last_two(weights: Vector, params: Vector) -> tuple[int, int, int]:
    """Return the indices of the last two rows whose weight is not 0, and the number of all such."""
    first, last, count = 0, 0, 0
    for k in range(weights.size):
        if params.dtype.type(weights[k]) != 0:
            first, last, count = last, k, count + 1
    return first, last, count


@cache
def _fused(step: Kernel, count: int) -> Kernel:
    """Make the loop that applies a step to the weighted sum of vectors, added from left to right.

    Args:
        step: The step.
        count: Number of vectors.
    """
    states, rates = _counts(step)
    s, r, v = several("s{}", states), several("r{}", rates), several("v{}", count)
    text = f"""
def loop(params: Vector, {s:?: Vector, }{v:?: Vector, of_?: float, }{r:?: float, }) -> None:
    real = params.dtype.type
    {r:? = real(?); }
    for i in range(params.size):
        grad = real(0){v: + real(of_?) * ?[i]}
        params[i], {s:?[i], } = step(params[i], grad, {s:?[i], }{r:?, })
"""
    return loop_of(f"{step.name}_fused", text, step=step)


def _keep(part: str, states: int) -> str:
    """Return text that saves the old values of a part to the undo log, and then its number."""
    copies = "".join(f"copy(s{k}[{part}], old[{k + 1}]); " for k in range(states))
    return (
        f"old = undo[number % undo.shape[0]]; copy(params[{part}], old[0]); {copies}"
        "store_ordered(undo_log, word, number)"
    )


@kernel(quick=True)
def copy(values: Vector, out: Vector) -> None:
    """Copy `values` to the beginning of `out`."""
    for i in range(values.size):
        out[i] = values[i]


@cache
def averaging(step: Kernel) -> Kernel:
    """Make a step that also updates a moving average of the parameters, its first state vector.

    Its rates are those of `step`, then the share of the average that is kept, and 1 minus that.
    """
    s, r = several("_s{}", _counts(step)[0]), _Names(rates_of(step))
    text = f"""
def loop(
    _w: float, _g: float, _mean: float, {s:?: float, }/, {r:?: float, }_kept: float, _rest: float
) -> None:
    _w, {s:?, } = _step(_w, _g, {s:?, }{r:?, })
    return _w, _kept * _mean + _rest * _w, {s:?, }
"""
    names: dict[str, Any] = {"_step": step, "__name__": __name__}
    exec(text, names)
    names["loop"].__name__ = f"{step.name}_averaging"
    return _step(names["loop"])


class Undo(NamedTuple):
    """Undo log: memory for the old values of a piece of the vectors, before it is changed.

    Attributes:
        values: Old values, shape (turns, 1 + vectors, piece). Piece number k is at ``k % turns``.
        words: Header words, dtype int64, 8-byte aligned; only their owner may write them.
        word: Index of the word that is the number of the last piece saved.
        number: Number of the first piece to save, or of the piece to restore.
    """

    values: np.ndarray
    words: Vector
    word: int
    number: int

    def keep(self, vectors: Sequence[Vector]) -> None:
        """Save the values of whole vectors as one piece, and publish its number."""
        for old, live in zip(self.values[self.number % len(self.values)], vectors, strict=True):
            np.copyto(old[: live.size], live)
        publish(self.words, self.word, self.number)

    def put_back(self, vectors: Sequence[Vector]) -> None:
        """Restore the old values of a piece; vectors that are longer keep their other elements."""
        for old, live in zip(self.values[self.number % len(self.values)], vectors, strict=True):
            np.copyto(live[: old.size], old[: live.size])


@cache
def undoable(step: Kernel, others: int = 0) -> Kernel:
    """Make the loop that applies a step piece by piece, and saves the old values of each piece.

    It copies the old values of a piece, then writes the piece's number, and then applies the step.
    A piece is small enough to stay in the CPU's cache. The loop takes parameters, state vectors,
    `others` further vectors, the gradient, all rates as one vector, and the fields of `Undo`.

    Args:
        step: The step.
        others: Number of further vectors; they are saved, but not changed.
    """
    states, rates = _counts(step)
    s, r = several("s{}", states), several("rates[{}]", rates)
    every = several("s{}", states + others)
    text = f"""
def loop(
    params: Vector, {every:?: Vector, }grad: Vector, rates: Vector, undo: Array,
    undo_log: Vector, word: int, number: int,
) -> None:
    if params.size != grad.size or rates.size != {len(r)}:
        raise ValueError("{step.name}: vectors of one length and {len(r)} rates are expected")
    if undo.shape[1] < {1 + states + others}:
        raise ValueError("{step.name}: room for {1 + states + others} vectors is expected")
    if word < 0 or word >= undo_log.size:
        raise ValueError("{step.name}: a word of the undo log is expected")
    for at in range(0, params.size, undo.shape[2]):
        p = slice(at, min(at + undo.shape[2], params.size))
        {_keep("p", states + others)}
        apply(params[p], grad[p], {s:?[p], }{r:?, })
        number += 1
"""
    return loop_of(f"{step.name}_undoable", text, copy=copy, apply=dense(step))


@cache
def by_rows(step: Kernel, rates: Kernel | None = None, extra: int = 0) -> Kernel:
    """Make the loop that applies a step to rows of a table.

    A row and its state vectors are one line of memory. The loop takes the slot of each row in
    `lines`, its local place, and its gradient; the lines and stripe words of `mpips.kernels.rows`;
    the table's key; and the rule's numbers as float64. Each row may occur only once.

    Args:
        step: The step.
        rates: Computes the step's rates for one row, in the lines' dtype. It takes the line, the
            gradient, whether the line is fresh (not yet updated), and the rule's numbers. None if
            the rule's numbers are the rates.
        extra: Number of elements of a line that `rates` uses, after the state vectors.
    """
    from mpips.kernels import row_keys, rows

    states, count = _counts(step)
    numbers = len(rates_of(rates or step))
    s, r, n = several("s{}", states), several("r{}", count), several("n{}", numbers)
    numbered = several("numbers[{}]", numbers)
    parts = "".join(f"line[{k} * dim : {k + 1} * dim], " for k in range(1, states + 1))
    rates_of_row = f"rates(line, grad, fresh, {n:?, })" if rates else f"{n:real(?), }"
    name = (rates or step).name
    text = f"""
def loop(
    slot: Vector, local: Vector, grads: Matrix, lines: Matrix, stripes: Vector, key: Vector,
    numbers: Vector,
) -> None:
    real, dim = lines.dtype.type, grads.shape[1]
    if numbers.size != {numbers} or lines.shape[1] < {states + 1} * dim + {extra}:
        raise ValueError("{name}: {numbers} numbers, and {states} vectors of state, are expected")
    {n:?, } = {numbered:?, }
    for u in range(slot.size):
        if u + rows.AHEAD < slot.size:
            rows.fetch(slot[u + rows.AHEAD], lines, stripes)
        at, line, grad = slot[u], lines[slot[u]], grads[u]
        bit, word = 1 << (at & rows.BIT_MASK), rows.begin_write(at, stripes)
        fresh = not word & bit
        if fresh:
            row_keys.make_row(np.int64(key[row_keys.FIRST]) + local[u], key, line[:dim])
        w, {s:?, } = line[:dim], {parts}
        {r:?, } = {rates_of_row}
        for j in range(dim):
            w[j], {s:?[j], } = step(w[j], grad[j], {s:?[j], }{r:?, })
        rows.close_line(at, stripes, word | bit)
"""
    names = {"rows": rows, "row_keys": row_keys, "np": np}
    return loop_of(f"{name}_by_rows", text, **names, step=step, rates=rates)
