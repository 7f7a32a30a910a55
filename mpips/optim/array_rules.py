"""Update rules of users that update whole arrays, such as Muon.

Such a class has a method `update` in place of `step` (`mpips.optim.own_rules`):

    class Muon(mpips.UpdateRule):
        lr: float = 0.02
        momentum: float = 0.95

        def update(self, name, w, g, m, /, t, lr):
            m = self.momentum * m + g
            return w - lr * orthogonal(m), m

The owner of an array calls it with the array in its own shape. So no shard divides an array
(`between` of `mpips.layout.cut`), and a block of an update is one array.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpips.config.user_file import raised
from mpips.errors import UserError
from mpips.optim.own_rules import PROBE, OwnRule
from mpips.optim.rule import Rule, Slots

FIRST = ("self", "name", "w", "g")  # positional parameters of `update` before the state
LAST = ("t", "lr")  # and those after it


class ArrayRule(OwnRule):
    """Rule of a user's class that updates whole arrays.

    Attributes:
        array: Name of the array that it updates; empty before `of_array`.
        shape: Shape of that array.
    """

    kernel = None
    whole: ClassVar[bool] = True

    array: str = ""
    shape: tuple[int, ...] = ()

    def of_array(self, name: str, shape: tuple[int, ...]) -> Rule:
        """See `Rule.of_array`."""
        return replace(self, array=name, shape=shape)

    def check(self, dtype: np.typing.DTypeLike) -> None:
        """See `Rule.check`: tries the smallest array of each number of dimensions, on copies."""
        smallest: dict[int, ArrayRule] = {}
        for part in self.ranges:
            if isinstance(part.rule, ArrayRule):
                known = smallest.setdefault(len(part.rule.shape), part.rule)
                if np.prod(part.rule.shape) < np.prod(known.shape):
                    smallest[len(known.shape)] = part.rule
        for rule in smallest.values():
            rule.try_array(np.dtype(dtype))

    def try_array(self, dtype: np.dtype) -> None:
        """Call `update` with constant arrays, to check what it returns.

        Raises:
            UserError: If `update` raises, or does not return the array and its state in their
                shapes.
        """
        count = 2 + len(states_of(self.kind))
        w, g, *states = (np.full(self.shape, PROBE[0], dtype) for _ in range(count))
        what = f"update of {self.kind.__name__} for {self.array!r}"
        try:
            with np.errstate(all="ignore"):
                found = self.own.update(self.array, w, g, *states, 1, PROBE[1])
        except Exception as error:
            raise raised(what, error, Path(), "new values for any array") from error
        names = ", ".join(("w", *states_of(self.kind)))
        expected = f"({names}{',' * (not states)}), the new values, each of shape {self.shape}"
        if not isinstance(found, tuple) or len(found) != 1 + len(states):
            told = f"{len(found)} values" if isinstance(found, tuple) else "no tuple"
            raise UserError(f"{what} that returns {told}", expected)
        shapes = [np.shape(each) for each in found]
        if any(shape != self.shape for shape in shapes):
            raise UserError(f"{what} that returns shapes {shapes}", expected)

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """See `Rule.apply`; the vectors are the flat array, its gradient and its state."""
        live = [params.reshape(self.shape), *(slot.reshape(self.shape) for slot in slots)]
        gradient = grad.reshape(self.shape)
        gradient.flags.writeable = False
        new = self.own.update(self.array, live[0], gradient, *live[1:], self.before + step, lr)
        # `update` may return an array in another's place, such as w as the state "previous w".
        moved = [
            np.copy(values) if any(np.may_share_memory(values, one) for one in live[:k]) else values
            for k, values in enumerate(new)
        ]
        for vector, values in zip(live, moved, strict=True):
            np.copyto(vector, values)

    def apply_sum(self, *given: Any, **named: Any) -> None:
        """Raise; never called, as the gradient of a whole array is summed before the update."""
        raise NotImplementedError("a rule of whole arrays")


def states_of(kind: Any) -> Sequence[str]:
    """Return the names of the state arrays that `update` of a user's class takes.

    Raises:
        UserError: If `update` has other parameters, or the class has `step` too.
    """
    parameters = list(inspect.signature(kind.update).parameters.values())
    before = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    after = tuple(p.name for p in parameters[len(before) :])
    if tuple(before[: len(FIRST)]) != FIRST or after != LAST:
        got = f"update{inspect.signature(kind.update)} of {kind.__name__}"
        raise UserError(got, "update(self, name, w, g, STATE.., /, t, lr)")
    if hasattr(kind, "step"):
        raise UserError(f"{kind.__name__} with step and update", "one of them")
    return tuple(before[len(FIRST) :])
