"""Update rules: what one is, and what it is applied to.

A rule is a pair: `Rule.init` fills the slots of a fresh run, `Rule.apply` makes one update. Both
work in place on flat vectors of one dtype, and element by element, so that the owner of a slice
may cut it into blocks as it likes: the same step and rate for every block give the same bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, dataclass_transform

import numpy as np

from mpips.kernels import vectors
from mpips.kernels.compiled import Kernel
from mpips.kernels.rule_loops import Undo, dense, rates_of, summed, undoable

Slots = tuple[np.ndarray, ...]


class RuleState(Protocol):
    """What an update rule has kept elsewhere, which a new run begins with.

    Attributes:
        steps: Updates that it has made.
        slot_names: Those slots of the rule that it has.
        skipped: How many of the updates were made without an array, by its name.
    """

    steps: int
    slot_names: tuple[str, ...]
    skipped: Mapping[str, int]

    def read_slot(
        self, name: str, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read ``[begin, end)`` of a slot, as `mpips.checkpoint.Checkpoint.read_slot` does."""


class Part(NamedTuple):
    """A range of the flat vector, and what is applied to it.

    Attributes:
        begin: Its first element; `end` is the one behind its last.
        rule: The rule with the settings of the range.
        scale: Factor of the learning rate.
    """

    begin: int
    end: int
    rule: "Rule"
    scale: float


class Sum(NamedTuple):
    """A gradient that is a sum of rows, as `mpips.kernels.vectors.sum_rows` makes it.

    Attributes:
        rows: Addresses of the rows.
        weights: Of the rows.
        begin: The first element that counts.
        room: For a block of the sum; what is in it does not matter.
    """

    rows: np.ndarray
    weights: np.ndarray
    begin: int
    room: np.ndarray


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Rule:
    """One update rule with its hyperparameters.

    Attributes:
        name: Name on the command line and in checkpoints.
        slots: Names of the rule's state vectors, each of the parameters' shape and dtype.
        kernel: The rule's step in `mpips.kernels.update_rules`, whose state vectors are the slots
            and whose rates are `scalars`; None for a rule without loops.
        weight_decay: Factor of w that is added to the gradient.
        before: Updates that the slots held when the run began: see `RuleState`.
        decays: Whether the rule has weight decay.
        whole: Whether it takes arrays as a whole, which no shard and no block may divide.
        ranges: Where settings differ, the whole vector cut by them (`mpips.optim.parts`); then
            `apply` is for those of `parts` alone.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    kernel: ClassVar[Kernel | None]
    decays: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    weight_decay: float = 0.0
    before: int = field(default=0, kw_only=True)
    ranges: tuple[Part, ...] = field(default=(), kw_only=True)

    def __init_subclass__(cls) -> None:
        """Make a rule a class of fields."""
        dataclass(frozen=True)(cls)

    def parts(self, begin: int, end: int) -> list[Part]:
        """Return ``[begin, end)`` of the flat vector in parts of one setting each."""
        if not self.ranges:
            return [Part(begin, end, self, 1.0)]
        cut = (p._replace(begin=max(begin, p.begin), end=min(end, p.end)) for p in self.ranges)
        return [part for part in cut if part.begin < part.end]

    def continued(self, before: int) -> "Rule":
        """Return the rule for slots that so many updates were made of when the run began."""
        return replace(self, before=before)

    def of_array(self, name: str, shape: tuple[int, ...]) -> "Rule":
        """Return the rule for an array, if it takes arrays as a whole."""
        return self

    def check(self, dtype: np.typing.DTypeLike) -> None:
        """Compile the rule, and refuse one of the user's that cannot be."""

    def init(self, params: np.ndarray, slots: Slots) -> None:
        """Fill the slots of a fresh run, in place.

        Args:
            params: Initial parameters, shape (n,), dtype float32 or float64.
            slots: One vector a name in `Rule.slots`, each of shape (n,) and params' dtype.
        """
        for slot in slots:
            slot.fill(0)

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """Make one update, in place; `grad` is only read.

        Args:
            params: Parameters or a block of them, shape (n,), dtype float32 or float64.
            grad: Gradient of the mean loss, shape (n,), params' dtype.
            slots: The same block of every slot, each of shape (n,) and params' dtype.
            step: Number of this update, from 1.
            lr: Learning rate of this update.

        Raises:
            ValueError: If the vectors differ in length.
        """
        self.loop(params, grad, *slots, *self.scalars(step, lr))

    def apply_sum(
        self,
        params: np.ndarray,
        grad: Sum,
        slots: Slots,
        step: int,
        lr: float,
        undo: Undo | None = None,
    ) -> None:
        """Make one update, as `apply` does, by a gradient that is summed in the same pass.

        Args:
            params: As in `apply`; must not overlap any row.
            grad: The gradient, whose room is at least one element.
            slots: As in `apply`.
            step: Likewise.
            lr: Likewise.
            undo: Where the old values of each block are kept, as a piece; its own vectors are no
                shorter than the room.
        """
        rows, weights, begin, room = grad
        if self.kernel is not None:
            loop = summed(self.kernel) if undo is None else summed(self.kernel, keeps=True)
            scalars = np.array(self.scalars(step, lr))
            loop(params, *slots, rows, weights, begin, room, scalars, *(undo or ()))
            return
        for at in range(0, params.size, room.size):
            block = slice(at, at + room.size)
            live = [params[block], *(slot[block] for slot in slots)]
            part = room[: live[0].size]
            vectors.sum_rows(rows, weights, begin + at, part)
            if undo is not None:
                undo.keep(live)
                undo = undo._replace(number=undo.number + 1)
            self.apply(live[0], part, tuple(live[1:]), step, lr)

    def apply_undoable(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float, undo: Undo
    ) -> None:
        """Make one update, as `apply` does; before each piece its old values are kept."""
        assert self.kernel is not None, "a rule without loops"
        undoable(self.kernel)(params, *slots, grad, np.array(self.scalars(step, lr)), *undo)

    @cached_property
    def loop(self) -> Callable[..., None]:
        """The loop of `apply`."""
        assert self.kernel is not None, "a rule without loops"
        return dense(self.kernel)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The rule's own numbers among the rates of its step, by their names there."""
        return tuple(getattr(self, name) for name in self.rates[1:])

    @cached_property
    def rates(self) -> tuple[str, ...]:
        """The names of `scalars`."""
        assert self.kernel is not None, "a rule without loops"
        return rates_of(self.kernel)

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the rates of the rule's step, the first of which is `lr`, in float64."""
        return lr, *self.numbers
