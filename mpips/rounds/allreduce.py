"""Rounds by MPI's collectives alone.

Allreduce of the gradients; then each owner updates its slice, and broadcasts it.
"""

import numpy as np

from mpips.layout import aligned_zeros
from mpips.mpi.collectives import begin_broadcast
from mpips.mpi.start import Request
from mpips.mpi.window import transfer_pieces
from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.rounds.base import FROZEN, RATE, REPORT, Report, Round, Transfers, Weights
from mpips.rounds.update import ShardUpdate


class AllreduceRound(Round):
    """Rounds by MPI's collectives alone, each rank with a private replica."""

    def __init__(
        self, job: Job, rule: Rule | None = None, transfers: Transfers | None = None
    ) -> None:
        """See `Round.__init__`."""
        super().__init__(job, rule, transfers)
        n, dtype = job.layout.size, job.dtype
        self.replica, self.grad = aligned_zeros(n, dtype), aligned_zeros(n, dtype)
        self._update: ShardUpdate | None = None  # of an owner
        if self._cluster.rank in self._cluster.roles.owners:
            shard = job.shard
            self.params = self.replica[shard.range]
            self.slots = tuple(aligned_zeros(shard.size, dtype) for _ in self._rule.slots)
            views = self.params, self.slots, self.grad[shard.range]
            self._update = ShardUpdate(job, shard, self._rule, *views, self.transfers)
        self._sums = np.zeros(8)

    def publish_start(self) -> None:
        """Broadcast the owners' shards. Collective: yes."""
        owners = self._cluster.roles.owners
        self.transfers.wait(
            [
                self._begin_broadcast(part, rank)
                for rank, shard in zip(owners, self._job.shards, strict=True)
                for part in transfer_pieces(self.replica[shard.range])
            ]
        )

    def _begin_broadcast(self, part: np.ndarray, owner: int) -> Request:
        if not self._cluster.is_local(owner):
            self.transfers.bytes_received += part.nbytes / len(self._cluster.my_node)
        return begin_broadcast(self._cluster.comm, part, owner)

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        worker = self._job.worker_id
        weight = 0.0 if worker is None else weights[worker]
        if weight:
            self.grad *= self.grad.dtype.type(weight)
        else:
            self.grad[:] = 0
        REPORT.pack_into(self._sums.data, 0, *report)
        comm, begin_sum = self._cluster.comm, self.transfers.begin_sum
        sums = [begin_sum(comm, part) for part in transfer_pieces(self.grad)]
        self.transfers.wait([*sums, begin_sum(comm, self._sums)])
        if self._sets_rate:
            self._leave_frozen(self._sums.item(FROZEN))
        if self._update is not None:
            if self._max_norm:
                self._clip(self.grad[self._job.shard.range])
            self._update.apply(step, 1 + self._sums.item(RATE))
        self.publish_start()
        return Report._make(REPORT.unpack_from(self._sums.data))

    def _apply_by(self, rule: Rule) -> None:
        if self._update is not None:
            self._update.cut(rule)

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._update = None
