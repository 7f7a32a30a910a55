"""Lion (Chen et al., NeurIPS 2023) as an update rule of one's own.

    mpirun -n 4 python -m mpips.train --optimizer jobs/lion_rule.py:Lion --epochs 5
    mpirun -n 4 python -m mpips.train --optimizer jobs/lion_rule.py:Lion:beta2=0.95 --mode sync

A program gives ``optimizer=Lion(1e-4)`` to `mpips.run`.
"""

from collections.abc import Iterable

import numpy as np

import mpips


class Lion(mpips.UpdateRule):
    """``w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w)``, and m moves to g."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    @property
    def rest1(self) -> float:
        """Share of the gradient in the step; a property is computed in float64."""
        return 1 - self.beta1

    @property
    def rest2(self) -> float:
        """Share of the gradient in m."""
        return 1 - self.beta2

    @staticmethod
    def step(
        w: float, g: float, m: float, /, lr: float, beta1: float, beta2: float, rest1: float,
        rest2: float, weight_decay: float,
    ) -> tuple[float, float]:  # fmt: skip
        """Return the new parameter and the new m."""
        mean = beta1 * m + rest1 * g
        return w - lr * (sign(mean) + weight_decay * w), beta2 * m + rest2 * g


def sign(x: float) -> float:
    """Return 1, -1, or what is neither above nor below 0."""
    return 1 if x > 0 else -1 if x < 0 else x


def serial(params: np.ndarray, grads: Iterable[np.ndarray], lr: float, decay: float) -> np.ndarray:
    """Return the parameters after updates in one process, as the paper's algorithm 2 makes them."""
    w, m = params.copy(), np.zeros_like(params)
    for g in grads:
        w -= lr * (np.sign(0.9 * m + 0.1 * g) + decay * w)
        m = 0.999 * m + 0.001 * g
    return w
