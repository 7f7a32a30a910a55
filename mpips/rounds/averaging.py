"""Rounds that average the workers' replicas, and their update rules.

These rules take the mean of the workers' vectors in place of the mean gradient.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from mpips.kernels import update_rules
from mpips.optim import Part, Rule, Slots
from mpips.planning.job import Job
from mpips.rounds.base import Report, Round, Weights
from mpips.rounds.shared import make_round


class Average(Rule):
    """Copy of the mean: ``w = mean``.

    References: Stich, ICLR 2019, algorithm 1.
    """

    name = "average"
    kernel = None

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """Set `params` to `grad`, which is the mean."""
        np.copyto(params, grad)


class SlowMomentum(Rule):
    """Outer step with momentum: with ``d = w - mean``, ``v = momentum v + d; w -= rate v``.

    With `nesterov` it is ``w -= rate (d + momentum v)``, with the new v. Without momentum and with
    rate 1 it is the mean. With a constant inner learning rate, and without `nesterov`, it is SlowMo
    with slow rate `rate`, whose buffer is v over the inner rate.

    Args:
        momentum: Share of the velocity that a step keeps, in [0, 1).
        rate: Outer learning rate, > 0.
        nesterov: Whether the step looks ahead.
        given: Whether the rule takes d in place of the mean.

    References: Chen and Huo, ICASSP 2016 (block momentum); Wang et al., ICLR 2020 (SlowMo),
    algorithm 1; Douillard et al., arXiv 2311.08105 (DiLoCo), algorithm 1, whose outer optimizer is
    this one with `nesterov`, momentum 0.9 and rate 0.7.
    """

    name = "slow_momentum"
    slots = ("outer_velocity",)
    kernel = update_rules.slow_momentum

    momentum: float = 0.9
    rate: float = 1.0
    nesterov: bool = False
    given: bool = False

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the kernel's scalars; see `Rule.scalars`."""
        change = (0.0, -1.0) if self.given else (1.0, 1.0)
        if self.nesterov:
            return *change, self.momentum, self.rate, self.rate * self.momentum
        return *change, self.momentum, 0.0, self.rate


def outer_rule(job: Job) -> Rule:
    """Return the update rule for the mean of the replicas; for statistics it is the mean itself."""
    c = job.config
    if not c.outer_step:
        return Average()
    given = c.codec != "none" or c.streaming
    rule = SlowMomentum(
        momentum=c.outer_momentum, rate=c.outer_lr, nesterov=c.outer_nesterov, given=given
    )
    n, size = job.trained, job.layout.size
    if n == size:
        return rule
    mean = SlowMomentum(momentum=0.0, given=True) if given else Average()
    return replace(rule, ranges=(Part(0, n, rule, 1.0), Part(n, size, mean, 1.0)))


class AveragingRound(Round):
    """Averages of a round: of the replicas, and of each optimizer slot that workers do not keep.

    Here `grad` is this worker's own parameters, not a gradient. The `slots` of an owner are those
    of the job: the averaged slots of the rule, and the outer velocity. If a codec packs transfers
    between nodes, the round sums the workers' changes, which are small compared to the parameters.

    Attributes:
        own_params: A worker's own parameters, which are `grad`.
        own_slots: A worker's slots, each of shape (n_params,).
        own: Arrays that a worker keeps from round to round, in the order of `Job.own_slots`.
    """

    def __init__(self, job: Job) -> None:
        """See `Round.__init__`."""
        super().__init__(job, Average())
        self._changes = job.config.codec != "none"
        transfers, moved = self.transfers, () if job.own_slots else job.rule.slots
        self._of_slots = [make_round(job, Average(), transfers) for _ in moved]
        self._of_replica = self._make_round(job, self._of_slots)
        self._all = [*self._of_slots, self._of_replica]
        self.replica = self._of_replica.replica
        self.own_slots: Slots = ()
        self.own: Slots = ()
        if job.worker_id is not None:
            self.grad = self._of_replica.grad
            kept = tuple(np.zeros(job.layout.size, job.dtype) for _ in job.own_slots)
            self.own_slots, self.own = kept or tuple(r.grad for r in self._of_slots), kept
        self.own_params = self.grad
        if self._cluster.rank in self._cluster.roles.owners:
            self.params = self._of_replica.params
            self.slots = (*(r.params for r in self._of_slots), *self._of_replica.slots)

    def _make_round(self, job: Job, of_slots: Sequence[Round]) -> Round:
        """Make the round of the replicas, given the rounds of the slots."""
        return make_round(job, outer_rule(job), self.transfers)

    @property
    def vectors(self) -> int:
        """Number of vectors of the parameters' size that a round averages."""
        return len(self._all)

    def begin(self) -> None:
        """Set this worker's parameters, and its slots unless kept, to the averages."""
        for each in self._all:
            np.copyto(each.grad, each.replica)

    def begin_exchange(self, step: int) -> None:
        """Do nothing: `exchange` does all the work of a round."""

    def getting_on(self) -> AbstractContextManager[None]:
        """Return a context for computing a step; no exchange is under way meanwhile."""
        return nullcontext()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        if self._changes and self.grad.size:
            np.subtract(self.replica, self.grad, out=self.grad)
        return self._exchange_all(step, weights, report)

    def _exchange_all(self, step: int, weights: Weights, report: Report) -> Report:
        """Average all vectors."""
        for each in self._of_slots:
            each.exchange(step, weights, Report())
        return self._of_replica.exchange(step, weights, report)

    def publish_start(self) -> None:
        """See `Round.publish_start`."""
        for each in self._all:
            each.publish_start()

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self.own_slots = self.own = ()
        self.own_params = self.grad
        for each in self._all:
            each.free()
