"""Measures of a server against stale gradients, in modes async and ssp.

The **staleness** of a push is the number of updates between the version that it was computed from
and the one that it is applied to. With gradient g, rate lr and staleness t:

- *limit* N: a push with ``t > N`` is dropped: it is handled and counted, and changes nothing.
- *lower rate*: ``lr / max(1, t)`` (Zhang et al., "Staleness-aware async-SGD", IJCAI 2016).
- *delay compensation* with factor c: ``g + c g^2 (w - origin)`` in place of g, where w is what it
  is applied to and origin what it was computed from (DC-ASGD; Zheng et al., ICML 2017);
  *adaptive*: c is ``c0 / sqrt(mean_square + eps)`` element by element, where each push makes
  ``mean_square = decay mean_square + (1 - decay) g^2`` first (DC-ASGD-a, the same paper).
"""

from dataclasses import dataclass

import numpy as np

from mpips.config import Config
from mpips.kernels.vectors import compensate, compensate_adaptive

MEAN_SQUARE = "mean_square"
DECAY, EPS = 0.95, 1e-7  # the values of the paper


@dataclass(frozen=True)
class Staleness:
    """What is done about stale gradients; by default nothing.

    Args:
        limit: Largest staleness of a push that is applied, or None.
        lower_rate: Whether the rate is divided by the staleness.
        compensation: Factor of the delay compensation; 0 for none.
        adaptive: Whether it is divided by the root of the gradient's mean square.
    """

    limit: int | None = None
    lower_rate: bool = False
    compensation: float = 0.0
    adaptive: bool = False

    @classmethod
    def of(cls, config: Config) -> "Staleness":
        """Return what a job asks for."""
        c = config
        return cls(c.max_staleness, c.staleness_lr, c.delay_compensation, c.delay_adaptive)

    @property
    def origins(self) -> bool:
        """Whether the parameters that a gradient was computed from travel with it."""
        return self.compensation > 0

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of state vectors beside the rule's, each of the parameters' shape."""
        return (MEAN_SQUARE,) if self.origins and self.adaptive else ()

    def rate(self, lr: float, staleness: int) -> float:
        """Return the learning rate for a push."""
        return lr / max(1, staleness) if self.lower_rate else lr

    def compensate(
        self,
        out: np.ndarray,
        grad: np.ndarray,
        params: np.ndarray,
        origin: np.ndarray,
        slots: tuple[np.ndarray, ...],
    ) -> None:
        """Write the compensated gradient into `out`, and update the slots, in one pass.

        Args:
            out: Shape (n,), as all that follow: vectors of one dtype, or blocks of them.
            grad: The gradient.
            params: What it is about to be applied to.
            origin: What it was computed from.
            slots: Those named by `slots`.

        Raises:
            ValueError: If the vectors differ in length.
        """
        if slots:
            scalars = self.compensation, DECAY, 1 - DECAY, EPS
            compensate_adaptive(out, grad, params, origin, slots[0], *scalars)
        else:
            compensate(out, grad, params, origin, self.compensation)
