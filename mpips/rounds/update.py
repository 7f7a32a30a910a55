"""An owner's update of its shard, block by block."""

from time import perf_counter

import numpy as np

from mpips.kernels.vectors import sum_rows
from mpips.optim import Rule, Slots
from mpips.planning.job import Job
from mpips.rounds.base import Transfers

BLOCK_BYTES = 1 << 17  # of the sum, which stays in the cache until the rule has used it


class ShardUpdate:
    """Applies a rule to this owner's shard.

    Args:
        job: The run.
        rule: The rule.
        params: The shard's parameters, shape (shard.size,).
        slots: Its slots, each of that shape.
        grad: As large as the shard, or one block that serves for all.
        transfers: Where the time is counted.
    """

    def __init__(
        self,
        job: Job,
        rule: Rule,
        params: np.ndarray,
        slots: Slots,
        grad: np.ndarray,
        transfers: Transfers,
    ) -> None:
        self._cluster, self._rule, self._rate = job.cluster, rule, job.rate()
        self._transfers = transfers
        self._blocks: list[tuple[int, np.ndarray, np.ndarray, Slots]] = []
        size, shard, whole = BLOCK_BYTES // grad.itemsize, job.shard, grad.size == params.size
        for begin in range(0, shard.size, size):
            block = slice(begin, min(begin + size, shard.size))
            part = grad[block] if whole else grad[: block.stop - begin]
            of_block = tuple(slot[block] for slot in slots)
            self._blocks.append((shard.begin + begin, params[block], part, of_block))

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
        apply, lr, far = self._rule.apply, self._rate(step) * factor, self._cluster.nodes > 1
        for begin, params, grad, slots in self._blocks:
            if sources:
                sum_rows(*sources, begin, grad)
            apply(params, grad, slots, step, lr)
            if far:
                self._cluster.progress()
        self._transfers.busy_s += perf_counter() - start
