"""Rounds that average the workers' replicas, and the rules that take the mean.

Where an update rule takes the mean gradient, these take the mean of the workers' vectors.
"""

from dataclasses import dataclass, replace

import numpy as np

from mpips.optim import Part, Rule, Slots
from mpips.planning.job import Job
from mpips.rounds.base import Report, Round, Weights
from mpips.rounds.factory import make_round


@dataclass(frozen=True)
class Average(Rule):
    """The mean itself: ``w = mean``.

    References: Stich, ICLR 2019, algorithm 1.
    """

    name = "average"
    kernel = ""

    def apply(
        self, params: np.ndarray, grad: np.ndarray, slots: Slots, step: int, lr: float
    ) -> None:
        """Set `params` to `grad`, which is the mean."""
        np.copyto(params, grad)

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return nothing: there is no kernel."""
        return ()


@dataclass(frozen=True)
class SlowMomentum(Rule):
    """Momentum of what a round changes: ``v = momentum v + (w - mean); w -= v``.

    Without momentum it is the mean. Where the learning rate is constant it is SlowMo with slow
    rate 1, whose buffer is v over that rate.

    Args:
        momentum: Share of the velocity kept, in [0, 1).

    References: Chen and Huo, ICASSP 2016 (block momentum); Wang et al., ICLR 2020 (SlowMo),
    algorithm 1.
    """

    name = "slow_momentum"
    slots = ("outer_velocity",)
    kernel = "slow_momentum"

    momentum: float = 0.9

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what the kernel takes; see `Rule.scalars`."""
        return (self.momentum,)


def _slow(job: Job, momentum: float) -> Rule:
    """Return what is done with the mean of the replicas; statistics are the mean itself."""
    rule, n, size = SlowMomentum(momentum=momentum), job.trained, job.layout.size
    if n == size:
        return rule
    return replace(rule, ranges=(Part(0, n, rule, 1.0), Part(n, size, Average(), 1.0)))


class AveragingRound(Round):
    """The averages of a round: of the replicas, and of each slot of the rule that is not kept.

    Here `grad` is not a gradient but this worker's own parameters, and `slots` of an owner are
    those of the job: the rule's, averaged, and the outer velocity.

    Attributes:
        own_slots: A worker's slots, each of shape (n_params,).
    """

    def __init__(self, job: Job) -> None:
        """See `Round.__init__`."""
        super().__init__(job, Average())
        beta, transfers = job.config.outer_momentum, self.transfers
        moved = () if job.own_slots else job.rule.slots
        self._of_slots = [make_round(job, Average(), transfers) for _ in moved]
        rule = _slow(job, beta) if beta else Average()
        self._of_replica = make_round(job, rule, transfers)
        self._all = [*self._of_slots, self._of_replica]
        self.replica = self._of_replica.replica
        self.own_slots: Slots = ()
        if job.worker_id is not None:
            self.grad = self._of_replica.grad
            kept = tuple(np.zeros(job.layout.size, job.dtype) for _ in job.own_slots)
            self.own_slots = kept or tuple(r.grad for r in self._of_slots)
        if self._cluster.rank in self._cluster.roles.owners:
            self.params = self._of_replica.params
            self.slots = (*(r.params for r in self._of_slots), *self._of_replica.slots)

    @property
    def vectors(self) -> int:
        """Vectors of the parameters' size that a round averages."""
        return len(self._all)

    def begin(self) -> None:
        """Let this worker's parameters, and slots unless kept, begin at the averages."""
        for each in self._all:
            np.copyto(each.grad, each.replica)

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
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
        self.own_slots = ()
        for each in self._all:
            each.free()
