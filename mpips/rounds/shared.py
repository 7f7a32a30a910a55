"""Rounds in node-shared memory, and by MPI's collectives alone.

In node-shared memory no gradient is copied within a node. A round has these steps:

1. Each worker computes its gradient in its segment. The ranks of the node meet at a barrier.
2. On each other node, the agent of a slice sums its node's gradients and sends the sum to the
   slice's owner (a reduce-scatter; `mpips.rounds.internode`).
3. The owner adds the local gradients and the sums of other nodes, and applies the update rule in
   the same pass, block by block.
4. The owner sends the result to the replicas of the other nodes (an all-gather).
5. The ranks of the node meet at a second barrier, and read their node's replica in place.

On one node steps 1, 3 and 5 are one compiled loop (`mpips.kernels.exchange.whole_round`), unless
the job clips, has tables, or lets programs set the learning rate.

If the job has a codec, the slices that cross nodes are compressed (`mpips.transport.wire`): the
sums on their way to an owner, and the owner's results. The replicas of other nodes then contain
the decompressed results. A message is compressed under the number of its round and of its node,
so a resumed run sends the same bits as a run without a stop.

Gradients are added in a fixed order, so equal worlds give equal bits.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.vectors import sum_rows
from mpips.layout import aligned_zeros
from mpips.mpi.collectives import begin_broadcast
from mpips.mpi.start import Request
from mpips.mpi.window import transfer_pieces
from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.rounds.base import (
    FROZEN,
    RATE,
    REPORT,
    OwnState,
    Report,
    Round,
    ShardUpdate,
    Transfers,
    Weights,
)
from mpips.rounds.node import CompiledRound, NodeRound
from mpips.rounds.reduction import OwnedPart, Reduction

if TYPE_CHECKING:
    from mpips.tables.rounds import OwnedTables


class SharedRound(NodeRound):
    """Round in node-shared memory, with messages between nodes."""

    def __init__(
        self, job: Job, rule: Rule | None = None, transfers: Transfers | None = None
    ) -> None:
        """See `Round.__init__`."""
        super().__init__(job, rule, transfers)
        self._summed: OwnedTables | None = None  # whose rows are part of the round
        if rule is None and tables_of(job):
            self._add_tables(job)
        views = self.replica, self.slots, self._addresses
        whole = bool(self._max_norm) or self._rule.whole
        self._slices = Reduction(job, job.shards, self._rule, *views, self.transfers, whole)
        self._compiled = self._compiled_round()

    def _compiled_round(self) -> CompiledRound | None:
        """Return the round as one loop; None if other work is part of a round."""
        more = self.tables is not None or self._max_norm or self._sets_rate
        if self._cluster.nodes > 1 or more or not self._slices.parts:
            return None
        (part,) = self._slices.parts
        args = part.update.arguments(part.rows)
        return None if args is None else self._barrier.round_of(*args)

    def _add_tables(self, job: Job) -> None:
        if job.config.mode == "hybrid":
            from mpips.tables.hybrid import HybridTables

            self.tables = HybridTables(job, self.transfers)
        else:
            from mpips.tables.rounds import RoundTables

            tables = self.tables = RoundTables(job, self.transfers)
            self._summed = tables.owned

    def own_state(self) -> OwnState:
        """See `Round.own_state`: the state of the push codec."""
        return self._slices.state()

    def publish_start(self) -> None:
        """Send the owners' parameters to the replicas of the other nodes. Collective: yes."""
        for ready in self._slices.share(self._job.base_step):
            self.transfers.wait_until(ready)
        self._barrier.wait()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        weights = np.asarray(weights)
        if self._compiled is not None:
            rates = self._slices.parts[0].update.rates(step, self._job.lr_scale)
            return self._compiled(report, weights, rates)
        self._barrier.enter(report)
        if self._cluster.nodes > 1:
            self._exchange_remote(step, weights)
        else:
            if self._sets_rate:
                self._leave_frozen(self._barrier.frozen)
            for part in self._slices.parts:
                self._update(step, weights, part, weights)
        if self.tables is not None:
            self.tables.end(step)
        return self._barrier.leave()

    def _exchange_remote(self, step: int, weights: np.ndarray) -> None:
        """Sum gradients and reports over the nodes, between the two barriers."""
        requests = self.tables.begin(step) if self.tables is not None else []
        update = partial(self._update, step, weights)
        exchanging = self._slices.exchange(step, weights[self._workers], update)
        next(exchanging)
        reports = self._begin_report_sum()
        if self._sets_rate:  # the update of every owner needs the sum of the reports
            self.transfers.wait(reports)
            self._publish_report_sum()
            self._barrier.wait()
            self._leave_frozen(self._barrier.frozen)
        else:
            requests += reports
        for ready in exchanging:
            self.transfers.wait_until(ready)
        self.transfers.wait(requests)
        if not self._sets_rate:
            self._publish_report_sum()

    def _update(
        self, step: int, of_workers: np.ndarray, part: OwnedPart, weights: np.ndarray
    ) -> None:
        """Sum the gradients of a part of the shard and of rows, and apply the rules.

        Args:
            step: Number of the update.
            of_workers: Weights of all workers.
            part: Part of the shard. Rows are updated with the first and the last part.
            weights: Weights of the local gradients, and of the sums of other nodes.
        """
        factor = self._barrier.factor if self._sets_rate else self._job.lr_scale
        rows = self.tables.owned if self.tables is not None else None
        if rows is not None and part is self._slices.parts[0]:
            rows.collect(step, of_workers)
        if self._max_norm:
            sum_rows(part.rows, weights, self._job.shard.begin, part.sum)
            clipped = self._clip(part.sum, self._summed.sum_squares() if self._summed else 0.0)
            if self._summed is not None:
                self._summed.scale(clipped)
            part.update.apply(step, factor)
        else:
            part.update.apply(step, factor, (part.rows, weights))
        if rows is not None and part is self._slices.parts[-1]:
            rows.apply(step, factor)

    def _apply_by(self, rule: Rule) -> None:
        self._slices.cut(rule)

    def free(self) -> None:
        """See `Round.free`."""
        self._slices.free()
        self._summed = self._compiled = None
        if self.tables is not None:
            self.tables.free()
        super().free()


class AllreduceRound(Round):
    """Round by MPI's collectives alone; each rank has a private replica."""

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
        owners = zip(self._cluster.roles.owners, self._job.shards, strict=True)
        shards = [(rank, transfer_pieces(self.replica[shard.range])) for rank, shard in owners]
        self.transfers.wait([self._begin_broadcast(p, r) for r, pieces in shards for p in pieces])

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


def make_round(job: Job, rule: Rule | None = None, transfers: Transfers | None = None) -> Round:
    """Make the round that the configuration asks for. Collective: yes.

    Args:
        job: The run.
        rule: Rule that gets the sum without clipping, in place of the job's rule.
        transfers: Counters to use; by default new ones.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    if job.config.codec == "powersgd" and job.cluster.nodes > 1 and rule is None:
        from mpips.rounds.powersgd import PowerSgdRound

        return PowerSgdRound(job)
    if job.config.on_death == "shrink" and rule is None:
        from mpips.rounds.survivable import kind_of

        return kind_of(job)(job)
    kind = AllreduceRound if job.config.reduce == "allreduce" else SharedRound
    return kind(job, rule, transfers)
