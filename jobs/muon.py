"""Muon (Jordan et al., 2024) as an update rule of one's own that takes whole arrays.

    mpirun -n 4 python -m mpips.train --optimizer jobs/muon.py:Muon --epochs 5
    mpirun -n 4 python -m mpips.train --optimizer jobs/muon.py:Muon:momentum=0.9 --mode sync

Matrices have Muon: the momentum of the gradient, made nearly orthogonal. Other arrays have Adam.

References: K. Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024),
https://kellerjordan.github.io/posts/muon/
"""

from collections.abc import Iterable

import numpy as np

import mpips

ITERATION = 3.4445, -4.7750, 2.0315  # of Newton and Schulz, with the steepest rise from 0


class Muon(mpips.UpdateRule):
    """``w -= lr (orthogonal(momentum of g) + weight_decay w)`` for matrices."""

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    steps: int = 5
    adam_lr: float = 0.1  # of arrays that are no matrices, times lr
    beta2: float = 0.99
    outputs: int = 1  # axis of a layer's outputs in its matrix; 0 for a model of PyTorch

    def update(
        self, name: str, w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, /,
        t: int, lr: float,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """Return the new array, its momentum, and the mean square of gradients that Adam needs."""
        m = self.momentum * m + (1 - self.momentum) * g
        if w.ndim == 2:
            change = orthogonal((1 - self.momentum) * g + self.momentum * m, self.steps)
            change *= max(1.0, w.shape[self.outputs] / w.shape[1 - self.outputs]) ** 0.5
        else:
            v = self.beta2 * v + (1 - self.beta2) * g * g
            mean = m / (1 - self.momentum**t)
            change = self.adam_lr * mean / (np.sqrt(v / (1 - self.beta2**t)) + 1e-8)
        return w - lr * (change + self.weight_decay * w), m, v


def orthogonal(m: np.ndarray, steps: int = 5) -> np.ndarray:
    """Return a matrix with the singular vectors of `m`, and singular values near 1."""
    a, b, c = ITERATION
    tall = m.shape[0] > m.shape[1]
    x = (m.T if tall else m) / (np.linalg.norm(m) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def serial(
    params: dict[str, np.ndarray], grads: Iterable[dict[str, np.ndarray]], lr: float
) -> dict[str, np.ndarray]:
    """Return matrices after updates in one process, with singular values made by their polynomial.

    That is the iteration of Newton and Schulz by a singular value decomposition.
    """
    a, b, c = ITERATION
    w = {name: array.astype(float) for name, array in params.items()}
    m = {name: np.zeros(array.shape) for name, array in params.items()}
    for grad in grads:
        for name, g in grad.items():
            m[name] = 0.95 * m[name] + 0.05 * g
            u, s, vt = np.linalg.svd(0.05 * g + 0.95 * m[name], full_matrices=False)
            s = s / (np.linalg.norm(s) + 1e-7)
            for _ in range(5):
                s = a * s + b * s**3 + c * s**5
            inputs, outputs = g.shape
            w[name] -= lr * max(1.0, outputs / inputs) ** 0.5 * (u * s) @ vt
    return w
