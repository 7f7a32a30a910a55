"""Base class of update rules, and the arguments of an update.

A rule keeps its state in **slots**: vectors of the parameters' shape and dtype, such as a momentum.
`Rule.init` fills the slots of a new run, and `Rule.apply` makes one update. Both work in place on
flat vectors of one dtype. They treat each element by itself, so the owner of a slice may divide it
into blocks of any size: with the same step and learning rate, the results are the same bits. Rules
with `Rule.whole` are the exception: they update one array at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, dataclass_transform

import numpy as np

from mpips.kernels import vectors
from mpips.kernels.compiled import Kernel
from mpips.kernels.exchange import whole_round
from mpips.kernels.rule_loops import Undo, dense, rates_of, summed, undoable

Slots = tuple[np.ndarray, ...]


class RuleState(Protocol):
    """State of an update rule that a new run begins with.

    Attributes:
        steps: Number of updates that led to this state.
        slot_names: Names of the slots that it holds; a subset of the rule's.
        skipped: Number of those updates that left an array out, by the array's name.
    """

    steps: int
    slot_names: tuple[str, ...]
    skipped: Mapping[str, int]

    def read_slot(
        self, name: str, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read ``[begin, end)`` of a slot, as `mpips.checkpoint.Checkpoint.read_slot` does."""


class Part(NamedTuple):
    """A range of the flat vector that one rule with one set of hyperparameters updates.

    Attributes:
        begin: First element of the range ``[begin, end)``.
        end: One past its last element.
        rule: The rule, with the hyperparameters of this range.
        scale: Factor of the learning rate.
    """

    begin: int
    end: int
    rule: "Rule"
    scale: float


class Sum(NamedTuple):
    """A gradient as a weighted sum of vectors; see `mpips.kernels.vectors.sum_rows`.

    Attributes:
        rows: Address in bytes of each vector, shape (n_rows,), dtype int64.
        weights: Weight of each vector, shape (n_rows,), dtype float64.
        begin: Index in each vector of the first element to sum.
        block: Scratch memory for one block of the sum, of the gradient's dtype; overwritten. Its
            size is the size of a block.
    """

    rows: np.ndarray
    weights: np.ndarray
    begin: int
    block: np.ndarray


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Rule:
    """One update rule with its hyperparameters.

    Attributes:
        name: Name on the command line and in checkpoints.
        slots: Names of the rule's state vectors, each of the parameters' shape and dtype.
        kernel: The rule's step in `mpips.kernels.update_rules`. Its state vectors are the slots,
            and its rates are `scalars`. None for a rule without compiled loops.
        decays: Whether the rule has weight decay.
        whole: Whether the rule updates one whole array at a time. Then no shard and no block may
            divide an array.
        weight_decay: Factor of w that is added to the gradient.
        before: Number of updates that the slots contained when the run began; see `RuleState`.
        ranges: Ranges of the flat vector, each with its own rule, if rules differ between arrays
            (`mpips.optim.parts`); otherwise empty. Updates change no element outside them. Never
            apply a rule with ranges itself: apply the rules that `parts` returns.
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
        """Make each subclass a frozen dataclass."""
        dataclass(frozen=True)(cls)

    def parts(self, begin: int, end: int) -> list[Part]:
        """Divide ``[begin, end)`` of the flat vector into parts, each with its rule."""
        if not self.ranges:
            return [Part(begin, end, self, 1.0)]
        cut = (p._replace(begin=max(begin, p.begin), end=min(end, p.end)) for p in self.ranges)
        return [part for part in cut if part.begin < part.end]

    def continued(self, before: int) -> "Rule":
        """Return a copy of the rule whose slots contained `before` updates when the run began."""
        return replace(self, before=before)

    def of_array(self, name: str, shape: tuple[int, ...]) -> "Rule":
        """Return the rule for one array: this rule itself, unless it updates whole arrays."""
        return self

    def check(self, dtype: np.typing.DTypeLike) -> None:
        """Check that a rule of the user's runs and compiles; other rules need no check.

        Raises:
            UserError: If its `step` or `update` raises, returns wrong values or does not compile.
        """

    def init(self, params: np.ndarray, slots: Slots) -> None:
        """Fill the slots of a new run, in place.

        Args:
            params: Initial parameters, shape (n,), dtype float32 or float64.
            slots: One vector for each name in `Rule.slots`, of shape (n,) and params' dtype.
        """
        for slot in slots:
            slot.fill(0)

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """Make one update, in place; `grad` is only read.

        Args:
            params: Parameters, or a block of them, shape (n,), dtype float32 or float64.
            grad: Gradient of the mean loss, shape (n,), params' dtype.
            slots: The same block of every slot, each of shape (n,) and params' dtype.
            step: Number of this update; the first is 1.
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
        """Make one update, and sum its gradient in the same pass, block by block.

        Args:
            params: As in `apply`; must not overlap any row of `grad`.
            grad: The gradient; its `Sum.block` has at least one element.
            slots: As in `apply`.
            step: As in `apply`.
            lr: As in `apply`.
            undo: Undo log that gets the old values of each block as one piece, or None. A piece of
                the log has at least as many elements as `Sum.block`.
        """
        rows, weights, begin, buffer = grad
        if self.kernel is not None:
            loop = summed(self.kernel) if undo is None else summed(self.kernel, keeps=True)
            rates = self.scalars(step, lr)
            loop(params, *slots, rows, weights, begin, buffer, *rates, *(undo or ()))
            return
        for at in range(0, params.size, buffer.size):
            block = slice(at, at + buffer.size)
            live = [params[block], *(slot[block] for slot in slots)]
            part = buffer[: live[0].size]
            vectors.sum_rows(rows, weights, begin + at, part)
            if undo is not None:
                undo.keep(live)
                undo = undo._replace(number=undo.number + 1)
            self.apply(live[0], part, tuple(live[1:]), step, lr)

    def apply_undoable(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float, undo: Undo
    ) -> None:
        """Make one update, as `apply` does, and save old values to an undo log.

        The update is made piece by piece. The old values of a piece are saved before it changes.

        Args:
            params: As in `apply`.
            grad: As in `apply`.
            slots: As in `apply`.
            step: As in `apply`.
            lr: As in `apply`.
            undo: The undo log; its shape determines the size of a piece.
        """
        assert self.kernel is not None, "a rule without loops"
        undoable(self.kernel)(params, *slots, grad, np.array(self.scalars(step, lr)), *undo)

    @cached_property
    def loop(self) -> Callable[..., None]:
        """The compiled loop of `apply`."""
        assert self.kernel is not None, "a rule without loops"
        return dense(self.kernel)

    @cached_property
    def round_loop(self) -> Callable[..., int]:
        """The compiled loop of a round in a node: `mpips.kernels.exchange.whole_round`."""
        assert self.kernel is not None, "a rule without loops"
        return whole_round(self.kernel)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The rates of the step after the learning rate: attributes of the rule, by name."""
        return tuple(getattr(self, name) for name in self.rates[1:])

    @cached_property
    def rates(self) -> tuple[str, ...]:
        """Names of the rates that `scalars` returns, in their order."""
        assert self.kernel is not None, "a rule without loops"
        return rates_of(self.kernel)

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the rates of the rule's step in float64; unless overridden, `lr` comes first."""
        return lr, *self.numbers
