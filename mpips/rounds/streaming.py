"""Rounds of Streaming DiLoCo: one fragment each, exchanged while workers compute.

The vector is cut into P **fragments**. The p-th fragment is the p-th part of every owner's shard,
so that each exchange uses the links of all owners. Round r exchanges fragment ``(r - 1) mod P``, so
each fragment is exchanged every P rounds. Let w be the owners' parameters, x_k the parameters that
worker k trains, and a the mixing factor. In the ranges of that fragment:

    d   = mean over k of (w - x_k)        when the exchange begins, `overlap_steps` before the end
    w   = w after an outer step by d      (`mpips.rounds.averaging.SlowMomentum`)
    x_k = (1 - a) x_k + a w               at the end of the round, with the present x_k

The mean gives every worker the same weight, since a worker's change is of P rounds.

No call waits to begin an exchange: each rank publishes in its node's memory that its d is there,
and continues. The rest of the exchange (sums to owners, updates, results back) is a generator,
which yields where it would wait. A thread of `mpips.mpi.waiting.Background` resumes it while
gradients are computed, and the rank itself does so when the round ends. So no exchange is under way
at the end of a round. A checkpoint contains w and its slots, x_k and the worker's own slots. All
ranks have reached the end then, and their reports are summed there, in 64 bytes.

References: Douillard et al., arXiv 2501.18512, algorithm 2.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from mpips.health import status_board
from mpips.kernels.vectors import add_scaled
from mpips.layout import aligned_zeros, fragment_shards
from mpips.mpi.waiting import Background
from mpips.optim import Slots
from mpips.planning.job import OWN_PARAMS, Job
from mpips.rounds.averaging import outer_rule
from mpips.rounds.base import Report, Weights
from mpips.rounds.node import NodeRound
from mpips.rounds.reduction import Reduction

ADVANCE_S = 1e-3  # between two tests of an exchange under way: sockets buffer more


class StreamingRound(NodeRound):
    """Rounds that exchange one fragment each, for workers that make local steps.

    Attributes:
        own_params: Parameters that a worker trains, shape (n_params,); `replica` is the owners'.
        own_slots: Slots of the job's rule, each of that shape.
        vectors: Number of vectors of the parameters' size that a round moves, on average.
    """

    def __init__(self, job: Job) -> None:
        """See `Round.__init__`."""
        rule = outer_rule(job)
        super().__init__(job, rule, None)
        self.own_params = np.zeros(0, job.dtype)
        self.own_slots: Slots = ()
        if job.worker_id is not None:
            n = job.layout.size
            self.own_params = aligned_zeros(n, job.dtype)
            self.own_slots = tuple(np.zeros(n, job.dtype) for _ in job.rule.slots)
        self.shards = fragment_shards(job.shards, job.config.fragments, job.dtype.itemsize)
        args = rule, self.replica, self.slots, self._addresses, self.transfers
        self._fragments = [Reduction(job, shards, *args) for shards in self.shards]
        self._weights = np.full(self._addresses.size, 1 / len(self._cluster.roles.workers))
        self.vectors = 1 / len(self._fragments)
        self._under_way: Iterator[object] | None = None
        self._error: Exception | None = None
        self._background = Background(self._advance, ADVANCE_S)

    @property
    def own(self) -> Slots:
        """Arrays that a worker keeps for itself, in the order of `Job.own_slots`."""
        return (*self.own_slots, self.own_params)

    def begin(self) -> None:
        """Continue from this worker's own parameters; does nothing."""

    def publish_start(self) -> None:
        """See `Round.publish_start`; workers begin there, unless resumed with their own state."""
        for fragment in self._fragments:
            self._finish(fragment.share(self._job.base_step))
        self._barrier.wait()
        saved = self._job.checkpoint
        if self.own_params.size and (saved is None or OWN_PARAMS not in saved.worker_names):
            np.copyto(self.own_params, self.replica)

    def begin_exchange(self, step: int) -> None:
        """Begin the exchange of round `step`, unless it has begun. Blocks: no.

        Collective: yes, with `exchange`, which begins it on the other ranks.
        """
        if self._under_way is not None:
            return
        fragment = self._fragments[(step - 1) % len(self._fragments)]
        if self.own_params.size:
            for part in self._ranges(step):
                np.subtract(self.replica[part], self.own_params[part], out=self.grad[part])
        self._barrier.begin()
        self._under_way = self._exchanging(fragment, step)
        self._advance()

    def _ranges(self, step: int) -> list[slice]:
        """Return the ranges of a round's fragment in the vector."""
        shards = self.shards[(step - 1) % len(self.shards)]
        return [shard.range for shard in shards if shard.size]

    def _exchanging(self, fragment: Reduction, step: int) -> Iterator[object]:
        while not self._barrier.all_begun():
            yield None
        yield from fragment.exchange(step, self._weights)

    def getting_on(self) -> AbstractContextManager[None]:
        """Return a context that progresses an exchange under way while this rank computes."""
        return nullcontext() if self._advance() else self._background

    def _advance(self) -> bool:
        """Progress the exchange under way, in any thread; returns whether it is done."""
        if self._under_way is not None and self._error is None:
            try:
                return next(self._under_way, True) is True
            except Exception as error:  # a generator that has raised has ended
                self._error = error
        return True

    def _finish(self, under_way: Iterator[object]) -> None:
        """Wait for the end of an exchange. Blocks: never inside MPI."""
        self._under_way = under_way
        self.transfers.waited_s += self._cluster.wait(self._advance, status_board.ROUND)
        self._under_way = None
        if self._error is not None:
            raise self._error

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`; ignores `weights`: every worker has the same weight."""
        self.begin_exchange(step)
        assert self._under_way is not None, "an exchange was begun"
        self._finish(self._under_way)
        self._barrier.enter(report)
        if self._cluster.nodes > 1:
            self.transfers.wait(self._begin_report_sum())
            self._publish_report_sum()
        agreed = self._barrier.leave()
        if self.own_params.size:
            taken = self._job.config.mixed
            for part in self._ranges(step):
                add_scaled(self.own_params[part], 1 - taken, self.replica[part], taken)
        return agreed

    def free(self) -> None:
        """See `Round.free`."""
        self._background.end()
        for fragment in self._fragments:
            fragment.free()
        self.own_params, self.own_slots = np.zeros(0), ()
        super().free()
