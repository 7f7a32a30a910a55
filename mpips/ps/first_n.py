"""Server of first-N aggregation: rounds with backup workers.

N workers train, b of them as backup. In round r, a server takes the first N - b gradients that were
computed from version r of its shard. It applies their mean, weighted by samples, at a learning rate
with the mean of their factors. The result is version r + 1. A gradient from an earlier version is
dropped and counted. A worker reads one version of all shards. After its push it waits for a later
version (`mpips.ps.consistency.RoundController`).

If fewer than N - b workers can still push, a round ends when all unfinished workers are in it. A
snapshot also ends the current round, so that no part of a round must be saved. All servers have the
same pushes then, and the pushes of the open round have the same version. So all shards get to the
same version.

Reference: Chen et al., arXiv 1604.00981 (2016), algorithms 3 and 4.
"""

import time

import numpy as np

from mpips.kernels.atomics import observe, publish
from mpips.kernels.vectors import add_scaled, scale
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.optim import Ranges, common
from mpips.ps.design import Design
from mpips.ps.shard import Server
from mpips.transport.push import Push
from mpips.transport.remote_reads import BEGUN, COMMITTED


class FirstNServer(Server):
    """A server that applies the mean of a round's first gradients. Collective: no.

    The learning rate is a function of the round's number.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int, design: Design) -> None:
        super().__init__(cluster, window, server_id, design)
        assert design.backup is not None, "all gradients count"
        self._needed = len(cluster.roles.workers) - design.backup  # number that ends a round
        self._sum = np.zeros_like(self.params)
        self._samples, self._factors = 0, 0.0  # sums of samples, and of samples times rate factor
        self._last: dict[int, int] = {}  # final number of pushes, by finished worker
        self._in: set[int] = set()  # workers whose gradients are in the sum
        self._frozen: list[Ranges] = []  # frozen ranges of each gradient in the sum
        self._whole = self.dense.blocks

    def apply(self, push: Push) -> int:
        """Add a push, the next of its worker, to the round, or drop it; see `Server.apply`.

        Returns:
            Version of the shard after the push.
        """
        start, before = time.perf_counter(), self.version
        assert push.count == 1, "the mean of several workers' gradients"
        assert push.seq == observe(self.applied, push.worker) + 1, "pushes out of order"
        if before > push.version:
            self.tally.dropped += 1
        else:
            for block in self.dense.each(self._whole):
                part = block.range
                add_scaled(self._sum[part], 1.0, push.grad[part], push.samples)
            self._samples += push.samples
            self._factors += push.factor * push.samples
            self._in.add(push.worker)
            self._frozen.append(() if self.frozen.nothing else self.frozen.of(push))
        publish(self.applied, push.worker, push.seq)
        self.clocks.advance(push.number)
        self._end_when_due()
        for observer in self.observers:
            observer.note(push, before, before - push.version, start)
        return self.version

    def finished(self, rank: int, pushes: int) -> None:
        """See `Server.finished`; the round may end, since fewer workers can still push."""
        self._last[self._cluster.roles.workers.index(rank)] = pushes
        self._end_when_due()

    def settle(self, step: int) -> int:
        """See `Server.settle`; ends the round, and returns the version as the step."""
        if self._in:
            self._end()
        return self.version

    def _end_when_due(self) -> None:
        if self._in and (len(self._in) >= self._needed or self._others_ended()):
            self._end()

    def _others_ended(self) -> bool:
        """Return whether the workers that are not in the round push no more."""
        ended = {w for w, last in self._last.items() if observe(self.applied, w) >= last}
        return len(self._in | ended) == self.applied.size

    def _end(self) -> None:
        version, frozen, dense = self.version + 1, common(self._frozen), self.dense
        if dense.leaving.leave(frozen):
            dense.cut()
        publish(self.header, BEGUN, version)
        lr, mean = dense.rate(version) * (self._factors / self._samples), 1 / self._samples
        for part, params, slots, rule, rate_scale in dense.each(dense.blocks):
            grad = self._sum[part]
            scale(grad, mean)
            rule.apply(params, grad, slots, version, lr * rate_scale)
            grad.fill(0)
        if frozen:
            self._sum.fill(0)
        self._samples, self._factors = 0, 0.0
        self._in.clear()
        self._frozen.clear()
        dense.leaving.count()
        publish(self.header, COMMITTED, version)
        self.version = version
        self.clocks.publish()
