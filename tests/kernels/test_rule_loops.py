"""Loops of an update rule that has a step of its own: each does what the step says."""

from types import FunctionType

import numpy as np
import pytest

from mpips.kernels import rows
from mpips.kernels.compiled import Kernel
from mpips.kernels.rule_loops import by_rows, dense, step, summed, undoable
from mpips.kernels.vectors import addresses_of
from mpips.layout.tables import Ownership, Table
from mpips.optim.row_rules import LazyAdam, RowAdagrad, RowRule


@step
def three(w: float, g: float, a: float, b: float, c: float, /, lr: float, keep: float) -> object:
    """Keep three state vectors, more than any rule of the package."""
    a, b, c = keep * a + g, b + g * g, max(c, g)
    return w - lr * (a + b + c), a, b, c


RATES = np.array([0.25, 0.5])


def vectors(n: int) -> np.ndarray:
    """Return parameters, gradient and state vectors."""
    return np.random.default_rng(n).standard_normal((5, n))


def expected(before: np.ndarray) -> list[np.ndarray]:
    """Return parameters and state vectors after the step in Python."""
    found = [three.function(*column, *RATES) for column in before.T]
    return list(np.array(found).T.reshape(4, before.shape[1]))


def same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-15, atol=0)


@pytest.mark.parametrize("n", [0, 1, 33])
def test_dense_summed_and_undoable(n: int) -> None:
    before = vectors(n)
    w, g, *state = before.copy()
    dense(three)(w, g, *state, *RATES)
    want = expected(before)
    same([w, *state], want)

    w, g, *state = before.copy()
    room, weights = np.empty(7), np.ones(1)
    summed(three)(w, *state, addresses_of([g]), weights, 0, room, *RATES)
    same([w, *state], want)

    w, g, *state = before.copy()
    undo, words = np.zeros((40, 4, 1)), np.zeros(3, np.int64)
    undoable(three)(w, *state, g, RATES, undo, words, 1, 0)
    same([w, *state], want)
    same(list(undo[:n, :, 0].T), [before[0], *before[2:]])
    assert words.tolist() == [0, max(n - 1, 0), 0]


def test_rows() -> None:
    count, dim = 5, 4
    before = np.random.default_rng(0).standard_normal((count, 4 * dim))
    grads = np.random.default_rng(1).standard_normal((count, dim))
    lines, stripes = before.copy(), np.full(1, (1 << count) - 1, np.int64)
    key = Ownership("item", Table(count, dim), 1).key()
    which = np.array([0, 2, 3])
    by_rows(three)(which, which, grads[:3], lines, stripes, key, RATES)
    for row, grad in zip(which, grads, strict=False):
        w, *state = before[row].reshape(4, dim)
        same(list(lines[row].reshape(4, dim)), expected(np.array([w, grad, *state])))
    rest = np.setdiff1d(np.arange(count), which)
    assert lines[rest].tobytes() == before[rest].tobytes()
    assert stripes[0] >> 32 == len(which) * rows.WRITING * 2 >> 32


def test_arguments_that_do_not_fit_the_step() -> None:
    x, words, undo = np.ones(4), np.zeros(1, np.int64), np.zeros((2, 4, 2))
    key, grads = Ownership("item", Table(4, 2), 1).key(), np.ones((1, 2))
    one, log = (addresses_of([x]), np.ones(1), 0), (undo, words, 0, 0)
    length, numbers = "weights and a buffer are expected", "2 numbers, and 3 vectors of state"
    for loop, args, message in (
        (dense(three), (x, x, x, x, x, x, 0.5, 0.5), "three of 8 arguments, expected 7"),
        (summed(three), (x, x, x, x[1:], *one, np.empty(4), *RATES), length),
        (summed(three), (x, x, x, x, *one, np.empty(0), *RATES), length),
        (summed(three), (x, x, x, x, one[0], np.ones(2), 0, np.empty(4), *RATES), length),
        (undoable(three), (x, x, x, x, x, RATES[:1], *log), "2 rates are expected"),
        (undoable(three), (x, x, x, x, x, RATES, undo, words, 1, 0), "a word of the undo"),
        (undoable(three), (x, x, x, x, x, RATES, undo[:, :3], words, 0, 0), "room for 4 vectors"),
        (undoable(three, 1), (x, x, x, x, x, x, RATES, *log), "room for 5 vectors is expected"),
        (by_rows(three), (words, words, grads, np.ones((4, 7)), words, key, RATES), numbers),
        (by_rows(three), (words, words, grads, np.ones((4, 8)), words, key, RATES[:1]), numbers),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            loop(*args)
    assert (undo == 0).all()
    assert (x == 1).all()


@pytest.mark.parametrize(("rule", "width"), [(RowAdagrad(), 3), (LazyAdam(), 7)])
def test_lines_have_room_for_what_rates_keep(rule: RowRule, width: int) -> None:
    """A number more than the rows and their vectors of state, which is not of the next line."""
    key, which, stripes = Ownership("item", Table(2, 2), 1).key(), np.array([0]), np.array([0])
    lines, grads, numbers = np.zeros((2, width)), np.ones((1, 2)), np.array(rule.numbers(0.1))
    with pytest.raises(ValueError, match="vectors of state, are expected"):
        rule.loop(which, which, grads, np.zeros((2, width - 1)), stripes, key, numbers)
    rule.loop(which, which, grads, lines, stripes, key, numbers)
    assert lines[0].all()
    assert not lines[1].any()


def made(text: str, **names: Kernel) -> Kernel:
    """Make a step of the text of a function."""
    exec(text, found := dict(names))
    function: FunctionType = found["made"]
    return step(function)


def test_machine_code_on_the_disk_is_that_of_what_a_loop_calls() -> None:
    """Of two loops of one text and name, whose steps call functions that differ in a sign."""
    for sign in "+-":
        inner = made(f"def made(w, g): return w {sign} g")
        w = np.full(3, 2.0)
        dense(made("def made(w, g, /, lr): return (inner(w, lr * g),)", inner=inner))(
            w, np.ones(3), 1.0
        )
        assert w.tolist() == [3.0 if sign == "+" else 1.0] * 3
