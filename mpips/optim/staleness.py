"""Corrections for stale gradients in modes async and ssp.

A worker computes a gradient from one version of a shard, and the server applies it to a later one.
The **staleness** of the push is the number of updates between them. A server can correct a push
with gradient g, learning rate lr and staleness t:

- *limit* N: the server drops a push with ``t > N``. It counts as handled, and changes nothing.
- *lower rate*: ``lr / max(1, t)`` (Zhang et al., "Staleness-aware async-SGD", IJCAI 2016).
- *delay compensation* with factor c: ``g + c g^2 (w - origin)`` in place of g. w are the parameters
  that g is applied to, and origin those that it was computed from (DC-ASGD; Zheng et al., ICML
  2017).
- *adaptive* delay compensation: the same with ``c0 / sqrt(mean_square + eps)`` in place of c for
  each element. Each push first sets ``mean_square = decay mean_square + (1 - decay) g^2``
  (DC-ASGD-a, the same paper).
"""

from dataclasses import dataclass

import numpy as np

from mpips.config import Config
from mpips.kernels.vectors import compensate, compensate_adaptive

MEAN_SQUARE = "mean_square"
DECAY, EPS = 0.95, 1e-7  # the values of the paper


@dataclass(frozen=True)
class Staleness:
    """A server's corrections for stale gradients; none by default.

    Args:
        limit: Largest staleness of a push that is applied; None for no limit.
        lower_rate: Whether the learning rate is divided by the staleness.
        compensation: Factor of the delay compensation; 0 for none.
        adaptive: Whether that factor is divided by the root of the gradient's mean square.
    """

    limit: int | None = None
    lower_rate: bool = False
    compensation: float = 0.0
    adaptive: bool = False

    @classmethod
    def of(cls, config: Config) -> "Staleness":
        """Return the corrections that a job's options ask for."""
        c = config
        return cls(c.max_staleness, c.staleness_lr, c.delay_compensation, c.delay_adaptive)

    @property
    def origins(self) -> bool:
        """Whether workers send the parameters that a gradient was computed from with it."""
        return self.compensation > 0

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of state vectors beside the rule's, each of the parameters' shape."""
        return (MEAN_SQUARE,) if self.origins and self.adaptive else ()

    def rate(self, lr: float, staleness: int) -> float:
        """Return the learning rate of a push of this staleness."""
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

        All vectors have the same shape (n,) and the same dtype; they may be blocks of a shard.

        Args:
            out: Gets the compensated gradient.
            grad: The gradient.
            params: The parameters that it will be applied to.
            origin: The parameters that it was computed from.
            slots: The vectors named by the property `slots`; updated in place.

        Raises:
            ValueError: If the vectors differ in length.
        """
        if slots:
            scalars = self.compensation, DECAY, 1 - DECAY, EPS
            compensate_adaptive(out, grad, params, origin, slots[0], *scalars)
        else:
            compensate(out, grad, params, origin, self.compensation)
