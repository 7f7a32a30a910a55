"""Rounds in node-shared memory, and by MPI's collectives alone.

In node-shared memory gradients are summed slice by slice where they lie.
Each rank writes its gradient, then all of a node's ranks wait for each other. The owner of a slice
reads every local gradient where it was computed, adds what the other nodes send, and applies the
update rule in the same pass, block by block; on the other nodes the slice's agent sums the node's
gradients and sends them to the owner (a reduce-scatter), which sends the result back into the
node's replica (an all-gather): see `mpips.rounds.internode`. Then the node's ranks wait for each
other again, and read the replica in place.

Where a job has a codec, the slices that cross nodes are packed (`mpips.transport.wire`): the
partial sums of a node on their way to an owner, and an owner's results on their way back, so that
the replicas of other nodes are what the pull codec makes of the owners' parameters. Round k has the
number k, and a sender that of its node, so that a resumed run packs as one that was never stopped.

Rows are summed in a fixed order, so equal worlds give equal bits.
"""

from collections.abc import Callable
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
from mpips.rounds.node import NodeRound
from mpips.rounds.reduction import OwnedPart, Reduction

if TYPE_CHECKING:
    from mpips.tables.rounds import OwnedTables


class SharedRound(NodeRound):
    """Rounds in node-shared memory, by messages between nodes."""

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
        self._loop = self._round_loop()

    def _round_loop(self) -> Callable[..., int] | None:
        """Return the loop of a whole round; None if other work is part of a round."""
        more = self.tables is not None or self._max_norm or self._sets_rate
        if self._cluster.nodes > 1 or more or not self._slices.parts:
            return None
        (part,) = self._slices.parts
        args = part.update.arguments(part.rows)
        return None if args is None else self._barrier.bind(*args)

    def _add_tables(self, job: Job) -> None:
        if job.config.mode == "hybrid":
            from mpips.tables.hybrid import HybridTables

            self.tables = HybridTables(job, self.transfers)
        else:
            from mpips.tables.rounds import RoundTables

            tables = self.tables = RoundTables(job, self.transfers)
            self._summed = tables.owned

    def own_state(self) -> OwnState:
        """See `Round.own_state`: what the push codec keeps, by name; positions in the vector."""
        return self._slices.state()

    def publish_start(self) -> None:
        """Send the owners' shards to the other nodes' replicas. Collective: yes."""
        for ready in self._slices.share(self._job.base_step):
            self.transfers.wait_until(ready)
        self._barrier.wait()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        weights = np.asarray(weights)
        if self._loop is not None:
            rates = self._slices.parts[0].update.rates(step, self._job.lr_scale)
            return self._barrier.run(report, self._loop, weights, rates)
        self._barrier.enter(report)
        if self._cluster.nodes > 1:
            self._exchange_remote(step, weights)
        else:
            if self._sets_rate:
                self._leave_frozen(self._barrier.frozen)
            for part in self._slices.parts:
                self._update(part, step, weights, weights)
        if self.tables is not None:
            self.tables.end(step)
        return self._barrier.leave()

    def _exchange_remote(self, step: int, weights: np.ndarray) -> None:
        """Do what the nodes' gradients and reports go through between the two barriers."""
        requests = self.tables.begin(step) if self.tables is not None else []
        exchanging = self._slices.exchange(
            step,
            weights[self._workers],
            lambda part, of_rows: self._update(part, step, of_rows, weights),
        )
        next(exchanging)
        reports = self._begin_report_sum()
        if self._sets_rate:  # every owner needs the sum before its update
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
        self, part: OwnedPart, step: int, weights: np.ndarray, of_workers: np.ndarray
    ) -> None:
        """Sum the gradients of a part of the shard, and all those of rows, and apply the rules.

        Args:
            part: Of the shard.
            step: Number of the update.
            weights: Of the gradients and sums that are here.
            of_workers: Of all workers.
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
        self._summed = self._loop = None
        if self.tables is not None:
            self.tables.free()
        super().free()


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
        self.transfers.wait(
            [
                self._begin_broadcast(part, rank)
                for rank, shard in zip(self._cluster.roles.owners, self._job.shards, strict=True)
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


def make_round(job: Job, rule: Rule | None = None, transfers: Transfers | None = None) -> Round:
    """Build the round that the configuration asks for. Collective: yes.

    Args:
        job: The run.
        rule: Takes the sum as it is, not clipped, in place of the job's rule.
        transfers: Where to count, by default a fresh one.

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
