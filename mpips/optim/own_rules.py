"""Update rules of users: their classes, and compiled loops.

Such a class has a function `step` on numbers, and its hyperparameters with defaults:

    class Lion(mpips.UpdateRule):
        lr: float = 3e-4
        beta1: float = 0.9
        beta2: float = 0.99

        def step(w, g, m, /, lr, beta1, beta2):
            mean = beta1 * m + (1 - beta1) * g
            sign = 1 if mean > 0 else -1 if mean < 0 else mean
            return w - lr * sign, beta2 * m + (1 - beta2) * g

The first two parameters of `step` are a parameter of the model and its gradient. The others before
``/`` are the state. `step` returns the new parameter and then the new state. The names after ``/``
are ``lr``, attributes of the class, or keys of the dictionary that its method ``rates(t, lr)``
returns for update t. The rules that come with mpips have the same loops
(`mpips.kernels.rule_loops`).
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpips.config.groups import RowOptimizer, parse_rule
from mpips.config.user_file import DEFINED, classes_of, raised, run_file
from mpips.errors import UserError, nearest, unknown
from mpips.kernels.compiled import Kernel
from mpips.kernels.rule_loops import by_rows, dense
from mpips.optim.own_steps import step_of
from mpips.optim.row_rules import RowRule
from mpips.optim.rule import Rule

RATE = "lr"
PROBE = 0.5, 0.25  # an element and a learning rate for a trial of a step


def own_class(name: str) -> type:
    """Return the class that ``file.py:Class`` names, from this program or from the file.

    Raises:
        UserError: If there is no such class, or it is not an update rule.
    """
    if name in DEFINED:
        return DEFINED[name]
    file, _, class_name = name.rpartition(":")
    path = Path(os.path.expanduser(file)).resolve()
    return _class_of_file(path, class_name, path.stat().st_mtime_ns if path.is_file() else 0)


@cache
def _class_of_file(path: Path, class_name: str, changed: int) -> type:
    module = run_file(path, "optimizer")
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        names = classes_of(module)
        legal = f"one of {', '.join(names)}" if names else "a class"
        raise UserError(f"no class {class_name!r} in {path}", legal, nearest(class_name, names))
    if not hasattr(found, "options"):
        got = f"optimizer {path}:{class_name}, which is no update rule"
        raise UserError(got, f"class {class_name}(mpips.UpdateRule)")
    return found


def default_rate(optimizer: str) -> float:
    """Return the learning rate of a user's rule: ``lr=`` of the text, or the class's default.

    Raises:
        UserError: As `own_class`, or if there is no learning rate.
    """
    found = parse_rule(optimizer, "optimizer")
    kind: Any = own_class(found.name)
    return _rate(kind, found.numbers.get(RATE, kind.lr))


def _rate(kind: type, lr: Any) -> float:
    if not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        got = f"lr {lr!r} of {kind.__name__}"
        raise UserError(got, "a number > 0", "give lr= or --lr, or a default")
    return float(lr)


class OwnRule(Rule):
    """Rule of a user's class; `make_own_rule` makes a subclass for each class.

    Attributes:
        kind: The user's class.
        given: Hyperparameters that the text of the rule sets, without ``lr`` and ``weight_decay``.
    """

    kind: ClassVar[Any]

    given: tuple[tuple[str, float], ...] = ()

    @cached_property
    def own(self) -> Any:
        """An instance of the user's class with these hyperparameters."""
        numbers = dict(self.given)
        if self.decays:
            numbers["weight_decay"] = self.weight_decay
        return self.kind(**numbers)

    @cached_property
    def _rates(self) -> Callable[[int, float], Mapping[str, float]] | None:
        return getattr(self.own, "rates", None)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """See `Rule.numbers`."""
        return tuple(self.constants[name] for name in self.rates[1:])

    @cached_property
    def constants(self) -> dict[str, float]:
        """The rates of the step that are the same for all updates, by name.

        Raises:
            UserError: If the rule lacks one of them as an attribute, or it is not a finite number,
                or ``rates`` does not return a mapping.
        """
        rates = self._rates(1, PROBE[1]) if self._rates else {}
        if not isinstance(rates, Mapping):
            got = f"rates of {self.kind.__name__} that returns {type(rates).__name__}"
            raise UserError(got, 'numbers by name, such as {"rate": lr / (1 - self.beta**t)}')
        found = {}
        for name in (name for name in self.rates if name != RATE and name not in rates):
            value = getattr(self.own, name, None)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                got = f"{name} in step of {self.kind.__name__}, which is {value!r} there"
                remedy = f"give a default, as {name}: float = 1"
                raise UserError(got, "a number of the class", remedy)
            found[name] = float(value)
        return found

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """See `Rule.scalars`."""
        if self._rates is None and self.rates[:1] == (RATE,):
            return lr, *self.numbers
        of_update = self._rates(self.before + step, lr) if self._rates else {}
        found = {**self.constants, RATE: lr, **of_update}
        return tuple(found[name] for name in self.rates)

    def check(self, dtype: np.typing.DTypeLike) -> None:
        """See `Rule.check`: calls `step` from Python, and then compiled."""
        step, rates = step_of(self.kind), OwnRule.scalars(self, 1 - self.before, PROBE[1])
        vectors = _try(self.kind, step, rates, np.dtype(dtype))
        try:
            dense(step)(*vectors, *rates)
        except Exception as error:  # numba cannot compile the user's function
            text = next((line for line in str(error).splitlines()[1:] if line.strip()), str(error))
            got = f"step of {self.kind.__name__}, which does not compile ({text.strip()})"
            raise UserError(got, "only numbers and functions of math") from error


def make_own_rule(text: str, weight_decay: float | None = None) -> Rule:
    """Make the rule of ``file.py:Class`` or ``file.py:Class: beta=0.9, ..``.

    Args:
        text: The rule; a weight decay in it has precedence.
        weight_decay: Weight decay; None for the default of the class.

    Raises:
        UserError: If there is no such class, it is not an update rule, or it lacks one of the
            hyperparameters.
    """
    found = parse_rule(text, "optimizer")
    kind: Any = own_class(found.name)
    numbers, made = _numbers(kind, found), _rule_class(kind)
    numbers.pop(RATE, None)  # the job has the learning rate: see `default_rate`
    if weight_decay is None:
        weight_decay = float(getattr(kind, "weight_decay", 0.0))
    decay = numbers.pop("weight_decay", weight_decay)
    if decay and not made.decays:
        got = f"weight_decay {decay} with {kind.__name__}, which has none"
        raise UserError(got, "a rule with weight_decay", "leave it out, or add it to step")
    if decay < 0:
        raise UserError(f"weight_decay {decay} of {kind.__name__}", "a number >= 0")
    return made(weight_decay=decay, given=tuple(sorted(numbers.items())))


def _numbers(kind: Any, given: RowOptimizer) -> dict[str, float]:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(kind)}
    for name in given.numbers:
        if name not in defaults:
            raise unknown(f"number of {kind.__name__}", name, defaults)
    return {name: _as(defaults[name], x) for name, x in given.numbers.items()}


def _as(default: Any, value: float) -> Any:
    """Convert a number to the type of its default, unless that changes it (0.9 with default 0)."""
    found = type(default)(value) if isinstance(default, (bool, int)) else value
    return found if found == value else value


@cache
def _rule_class(kind: Any) -> type[OwnRule]:
    decays = any(field.name == "weight_decay" for field in fields(kind))
    members: dict[str, Any] = {"name": _short_name(kind), "kind": kind, "decays": decays}
    if hasattr(kind, "update"):
        from mpips.optim.array_rules import ArrayRule, states_of

        members |= {"slots": states_of(kind)}
        return type(kind.__name__, (ArrayRule,), members)
    kernel = step_of(kind)
    code = kernel.function.__code__
    members |= {"kernel": kernel, "slots": code.co_varnames[2 : code.co_posonlyargcount]}
    return type(kind.__name__, (OwnRule,), members)


def _short_name(kind: Any) -> str:
    """Return the name of a rule in checkpoints, without the folder, which may change."""
    file, _, name = kind.name.rpartition(":")
    return f"{Path(file).name}:{name}"


# Rules of table rows ---------------------------------------------------------------------------


class OwnRowRule(RowRule):
    """Rule of table rows of a user's class.

    Attributes:
        dense: The same rule for dense parameters.
    """

    dense: OwnRule | None = None

    def numbers(self, rate: float) -> tuple[float, ...]:
        """See `RowRule.numbers`."""
        assert self.dense is not None, "it is made of a rule"
        return self.dense.scalars(1, rate)

    def check(self, dtype: np.typing.DTypeLike) -> None:
        """See `OwnRule.check`."""
        assert self.dense is not None, "it is made of a rule"
        self.dense.check(dtype)

    @cached_property
    def loop(self) -> Any:
        """See `RowRule.loop`."""
        return by_rows(self.kernel)


def make_own_row_rule(given: RowOptimizer) -> RowRule:
    """Make the rule of table rows of a user's class.

    Raises:
        UserError: If the class has `update` or ``rates``; and as `make_own_rule`.
    """
    found = parse_rule(given.name, "optimizer")
    kind: Any = own_class(found.name)
    numbers = {**given.numbers, **found.numbers}  # the text counts, as for dense parameters
    lr, decay = numbers.pop(RATE, None), numbers.pop("weight_decay", None)
    lr = given.numbers.get(RATE, lr)
    for method in ("update", "rates"):
        if hasattr(kind, method):
            got = f"{kind.__name__} with {method}(..) as optimizer of a table"
            remedy = "make a row's count a state, or give rows another rule: --row-optimizer adam"
            raise UserError(got, "a rule with only step", remedy)
    settings = ", ".join(f"{name}={x!r}" for name, x in numbers.items())
    dense = make_own_rule(f"{found.name}: {settings}" if settings else found.name, decay)
    members = {
        "name": dense.name, "kernel": dense.kernel, "states": dense.slots,
        "default_lr": _rate(kind, kind.lr if lr is None else lr),
    }  # fmt: skip
    made: type[OwnRowRule] = type(kind.__name__, (OwnRowRule,), members)
    assert isinstance(dense, OwnRule), "of a user's class"
    return made(lr, dense)


def _try(kind: Any, kernel: Kernel, rates: tuple[float, ...], dtype: np.dtype) -> np.ndarray:
    """Call a step from Python.

    Returns:
        Vectors of one element for a trial of the loop, shape (2 + states, 1): parameter, gradient
        and state.

    Raises:
        UserError: If the step raises, or does not return the parameter and the state.
    """
    code, real = kernel.function.__code__, dtype.type
    states = code.co_posonlyargcount - 2
    try:
        with np.errstate(all="ignore"):
            got = kernel.function(*[real(PROBE[0])] * (2 + states), *map(real, rates))
    except Exception as error:
        expected = "numbers for any w and g"
        raise raised(f"step of {kind.__name__}", error, Path(), expected) from error
    if not isinstance(got, tuple) or len(got) != 1 + states:
        count = f"{len(got)} values" if isinstance(got, tuple) else "no tuple"
        names = ", ".join(("w", *code.co_varnames[2 : 2 + states]))
        expected = f"({names}{',' * (not states)}), the new values"
        raise UserError(f"step of {kind.__name__} that returns {count}", expected)
    return np.full((2 + states, 1), PROBE[0], dtype)
