"""An owner's update of its shard, block by block.

On several nodes MPI is entered between two blocks.
"""

from collections.abc import Iterable, Iterator
from time import perf_counter

import numpy as np

from mpips.kernels.vectors import sum_rows
from mpips.layout import Shard
from mpips.optim import Part, Rule, Slots, Sum
from mpips.planning.job import Job
from mpips.rounds.base import Transfers

BLOCK_BYTES = 1 << 17  # of the sum, which stays in the cache until the rule has used it


class ShardUpdate:
    """Applies a rule to what this owner updates.

    Args:
        job: The run.
        shard: What is updated.
        rule: The rule.
        params: The shard's parameters, shape (shard.size,).
        slots: Its slots, each of that shape.
        grad: As large as the shard, or room for a block of what is summed.
        transfers: Where the time is counted.
    """

    def __init__(
        self,
        job: Job,
        shard: Shard,
        rule: Rule,
        params: np.ndarray,
        slots: Slots,
        grad: np.ndarray,
        transfers: Transfers,
    ) -> None:
        self._cluster, self._rate = job.cluster, job.rate()
        self._transfers = transfers
        self._shard, self._params, self._slots, self._grad = shard, params, slots, grad
        self._blocks: list[tuple[Part, np.ndarray, np.ndarray, Slots]] = []
        self.cut(rule)

    def cut(self, rule: Rule) -> None:
        """Apply this rule from now on, in blocks; views of them are made once."""
        params, grad, begin = self._params, self._grad, self._shard.begin
        whole = grad.size == params.size
        self._blocks.clear()
        most = BLOCK_BYTES // grad.itemsize if self._cluster.nodes > 1 else max(1, params.size)
        for part in _cut(rule.parts(begin, self._shard.end), most):
            block = slice(part.begin - begin, part.end - begin)
            of_block = grad[block] if whole else grad[: part.end - part.begin]
            views = tuple(slot[block] for slot in self._slots)
            self._blocks.append((part, params[block], of_block, views))

    def apply(
        self,
        step: int,
        factor: float = 1.0,
        sources: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Make update `step`.

        Args:
            step: Its number.
            factor: Of the learning rate.
            sources: Addresses and weights of the rows whose sum is the gradient; None where it is
                in its place.
        """
        start = perf_counter()
        lr, remote = self._rate(step) * factor, self._cluster.nodes > 1
        for (begin, _, rule, scale), params, grad, slots in self._blocks:
            if sources and params.size > grad.size:
                rule.apply_sum(params, Sum(*sources, begin, grad), slots, step, lr * scale)
            else:  # of what fits into the room, two calls are sooner made than one that cuts it
                if sources:
                    sum_rows(*sources, begin, grad)
                rule.apply(params, grad, slots, step, lr * scale)
            if remote:
                self._cluster.progress()
        self._transfers.busy_s += perf_counter() - start


def _cut(parts: Iterable[Part], size: int) -> Iterator[Part]:
    """Cut parts into blocks of at most so many elements."""
    for part in parts:
        for begin in range(part.begin, part.end, size):
            yield part._replace(begin=begin, end=min(begin + size, part.end))
