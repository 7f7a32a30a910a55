"""Loops of an update rule's step: dense, summed, undoable, by rows.

Each is the text of a function, in which the step has as many state vectors and rates as it takes:
loops take no tuple and no object. The step is compiled into the loop.
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
    """Make a step, or what steps call: a function of numbers that is compiled into loops."""
    return Kernel(cast(FunctionType, function), frozenset(), quick=True, inlined=True)


_step = step  # functions here have a parameter of that name


class _Names(tuple[str, ...]):
    """Variables that a text repeats, each in place of the question mark of a format.

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
    """Return how many state vectors a step takes, 2 for that one."""
    return step.function.__code__.co_posonlyargcount - 2


def _counts(step: Kernel) -> tuple[int, int]:
    """Return how many state vectors and how many rates a step takes, ``(2, 1)`` for that one."""
    return states_of(step), len(rates_of(step))


def loop_of(name: str, text: str, **names: Any) -> Kernel:
    """Make a loop of its text, and of what the text names."""
    names |= {"Vector": Vector, "Matrix": Matrix, "Array": np.ndarray, "__name__": __name__}
    exec(text, names)
    made: FunctionType = names["loop"]
    made.__name__ = name
    return cast(Kernel, kernel()(made))


@cache
def dense(step: Kernel) -> Kernel:
    """Make the loop that applies a step to vectors.

    It takes parameters, gradient, state vectors, and each rate by itself, as float64.
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
    """Make the loop for a gradient that is a sum of rows: each block is in the cache when applied.

    It takes parameters and state vectors, what `mpips.kernels.vectors.sum_rows` takes, but `room`,
    of at least one element, for blocks of the sum, and all rates as a vector. If it `keeps` the old
    values of each block, as `undoable` those of a piece, it takes the fields of `Undo` too.
    """
    states, rates = _counts(step)
    s, r = several("s{}", states), several("rates[{}]", rates)
    undo, keep = "", ""
    if keeps:
        undo = "undo: Array, undo_log: Vector, word: int, number: int,"
        keep = _keep("part", states) + "; number += 1"
    text = f"""
def loop(
    params: Vector, {s:?: Vector, }rows: Vector, weights: Vector, begin: int, room: Vector,
    rates: Vector, {undo}
) -> None:
    if rates.size != {len(r)}:
        raise ValueError("{step.name}: {len(r)} rates are expected")
    for at in range(0, params.size, room.size):
        part = slice(at, min(at + room.size, params.size))
        grad = room[: part.stop - at]
        sum_rows(rows, weights, begin + at, grad)
        {keep}
        apply(params[part], grad, {s:?[part], }{r:?, })
"""
    names = {"sum_rows": vectors.sum_rows, "apply": dense(step), "copy": copy}
    return loop_of(f"{step.name}_summed{'_undoable' * keeps}", text, **names)


def _keep(part: str, states: int) -> str:
    """Return the text that keeps the old values of a part, and then writes its number."""
    copies = "".join(f"copy(s{k}[{part}], kept[{k + 1}]); " for k in range(states))
    return (
        f"kept = undo[number % undo.shape[0]]; copy(params[{part}], kept[0]); {copies}"
        "store_ordered(undo_log, word, number)"
    )


@kernel(quick=True)
def copy(values: Vector, kept: Vector) -> None:
    """Copy values to the beginning of `kept`."""
    for i in range(values.size):
        kept[i] = values[i]


@cache
def averaging(step: Kernel) -> Kernel:
    """Make the step that also keeps a mean of the parameters, which is its first state vector.

    Its rates are the step's, and then the share of the mean that is kept and the rest.
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
    """Where old values are kept, of a piece before it is changed.

    Attributes:
        values: Of pieces, by turns: shape (turns, 1 + vectors, piece).
        words: Header words, dtype int64, 8-byte aligned; only their owner may write them.
        word: Which of them is the number of the piece.
        number: Of the first piece.
    """

    values: np.ndarray
    words: Vector
    word: int
    number: int

    def keep(self, vectors: Sequence[Vector]) -> None:
        """Keep all of some vectors as one piece."""
        for old, live in zip(self.values[self.number % len(self.values)], vectors, strict=True):
            np.copyto(old[: live.size], live)
        publish(self.words, self.word, self.number)

    def put_back(self, vectors: Sequence[Vector]) -> None:
        """Set the vectors of a piece to what was kept of it; they may be longer."""
        for old, live in zip(self.values[self.number % len(self.values)], vectors, strict=True):
            np.copyto(live[: old.size], old[: live.size])


@cache
def undoable(step: Kernel, others: int = 0) -> Kernel:
    """Make the loop that keeps old values: piece by piece, so small that the cache has them.

    It copies the old values of a piece, then writes the piece's number, and then applies the step.
    It takes parameters, state vectors and as many `others`, which are kept too and stay as they
    are; the gradient, all rates as a vector, and the fields of `Undo`.
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
    """Make the loop that applies a step to rows of a table; a row's state lies behind it.

    It takes the rows' lines and local places, a gradient a row, the lines and stripe words of
    `mpips.kernels.rows`, the table's key, and the rule's numbers as float64. No row may be there
    twice.

    Args:
        step: What is applied.
        rates: Returns its rates in the lines' dtype for a line, its gradient, whether nobody has
            touched it, and the rule's numbers. Without it, they are these numbers.
        extra: How many numbers of its own `rates` keeps in a line, behind the state vectors.
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
