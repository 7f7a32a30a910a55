"""Rules that put the workers' mean replica in the place of the parameters, for `mpips.rounds`.

Where an update rule takes the mean gradient, these take the mean of the workers' vectors.
"""

from dataclasses import dataclass

import numpy as np

from mpips.optim import Rule, Slots


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
