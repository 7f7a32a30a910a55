"""Dense part of a server: its shard of the flat vector."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpips.layout import Shard
from mpips.optim import Change, FrozenMask, Rule
from mpips.optim.staleness import Staleness
from mpips.transport.push import Push

if TYPE_CHECKING:
    from mpips.failover.undo_log import DenseUndo

BLOCK_BYTES = 1 << 20  # in a job on several nodes, a server enters MPI between two blocks


class Block(NamedTuple):
    """Part of a shard that one call of the rule updates.

    Attributes:
        range: Its elements, as a slice of the shard.
        params: Its parameters.
        slots: The same part of each slot.
        rule: The rule with the block's settings.
        scale: The block's factor of the learning rate.
    """

    range: slice
    params: np.ndarray
    slots: tuple[np.ndarray, ...]
    rule: Rule
    scale: float


class DensePart:
    """A shard of the flat vector, and the rule that updates it.

    Args:
        shard: Range of the shard in the vector.
        params: Parameters, shape (shard.size,).
        slots: Slots, shape (shard.size,) each: those of the rule, then those of `stale`.
        update: The rule, and the learning rate as a function of the update's number.
        stale: Corrections for stale pushes.
        between: Called between two blocks of an update, so that other ranks need not wait for the
            whole update; None if no rank waits.

    Attributes:
        leaving: The rule without the frozen arrays.
        blocks: Blocks of an update.
        undo: Saves the old values of an update; None if no other server can take over the shard.
    """

    def __init__(
        self,
        shard: Shard,
        params: np.ndarray,
        slots: tuple[np.ndarray, ...],
        update: tuple[Rule, Callable[[int], float]],
        stale: Staleness,
        between: Callable[[], object] | None,
    ) -> None:
        self.shard, self.params, self.slots = shard, params, slots
        (self.rule, self.rate), self.stale, self._between = update, stale, between
        self.leaving = FrozenMask(self.rule)
        self.undo: DenseUndo | None = None
        self._own_slots = len(self.rule.slots)
        self.cut()
        largest = max((block.params.size for block in self.blocks), default=0)
        self._scratch = np.zeros(largest if stale.origins else 0, params.dtype)

    def cut(self) -> None:
        """Divide the shard into blocks. Views of arrays are made only here."""
        self.blocks, first = list[Block](), self.shard.begin
        step = (self.undo.block_bytes if self.undo else BLOCK_BYTES) // self.params.itemsize
        for begin, end, rule, scale in self.leaving.rule.parts(first, self.shard.end):
            size = end - begin if rule.whole else step
            for at in range(begin, end, size):
                p = slice(at - first, min(at + size, end) - first)
                slots = tuple(slot[p] for slot in self.slots)
                self.blocks.append(Block(p, self.params[p], slots, rule, scale))

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and slots."""
        return self.params.nbytes * (1 + len(self.slots))

    def apply(self, push: Push, version: int, oldest: int) -> None:
        """Apply a push.

        Args:
            push: The push.
            version: Version of the shard after it.
            oldest: Staleness of the oldest gradient in the push.
        """
        lr, undo = self.rate(version), self.undo
        if self.stale.lower_rate:
            lr = self.stale.rate(lr, oldest)
        lr *= push.factors
        for block in self.each(self.blocks if undo is None else undo.rest(self.blocks)):
            part, params, slots, rule, scale = block
            grad = push.grad[part]
            if push.origin is not None and not isinstance(rule, Change):
                out = self._scratch[: grad.size]
                more = slots[self._own_slots :]
                self.stale.compensate(out, grad, params, push.origin[part], more)
                grad = out
            if undo is None:
                rule.apply(params, grad, slots[: self._own_slots], version, lr * scale)
            else:
                undo.apply(block, grad, version, lr * scale)

    def each(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield blocks; call `between` before each one but the shard's first."""
        for block in blocks:
            if self._between is not None and block.range.start:
                self._between()
            yield block
