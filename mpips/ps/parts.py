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

BLOCK_BYTES = 1 << 20  # between two of an update a server of several nodes enters MPI


class Block(NamedTuple):
    """A part of a shard that is updated at a time.

    Attributes:
        range: Where it lies in the shard.
        params: Its parameters.
        slots: The same part of each slot.
        rule: The rule with the block's settings; `scale` is its factor of the learning rate.
    """

    range: slice
    params: np.ndarray
    slots: tuple[np.ndarray, ...]
    rule: Rule
    scale: float


class DensePart:
    """A shard of the flat vector, and the rule that changes it.

    Args:
        shard: Where it lies in the vector.
        params: Its parameters, shape (shard.size,).
        slots: Its slots, likewise: those of the rule, then those of `stale`.
        update: The rule, and the learning rate as a function of the update's number.
        stale: What is done about stale pushes.
        between: Called between two blocks of an update, where somebody waits for this server.

    Attributes:
        leaving: The rule without what pushes leave alone.
        blocks: What is updated at a time.
        undo: Keeps the old values of an update, if another server can take the shard over.
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
        """Cut what is updated into blocks; views are made once."""
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
            version: The version that it makes.
            oldest: Staleness of the oldest gradient in it.
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
        """Yield blocks; does between them what others wait for."""
        for block in blocks:
            if self._between is not None and block.range.start:
                self._between()
            yield block
