"""Losses of a model's outputs, and their gradients; accuracy."""

import numpy as np


def squared_error(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over rows of ``1/2 sum_j (z_ij - y_ij)^2``; `z` becomes its gradient.

    Args:
        z: Predictions, shape (n, k); overwritten with ``(z - y) / n``.
        y: Targets, n * k numbers in any shape that begins with n.
    """
    n = z.shape[0]
    z -= y.reshape(z.shape)
    # Summed in float64: the square of a float32 residual overflows long before the residual.
    total = np.einsum("ij,ij->", z, z, dtype=np.float64, casting="same_kind")
    z /= n
    return float(total) / (2 * n)


def cross_entropy(z: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross entropy of softmax(z) and labels; `z` becomes its gradient.

    Logits of any size are right: the largest of each row is subtracted first.

    Args:
        z: Logits, shape (n, classes); overwritten with ``(softmax(z) - onehot(y)) / n``.
        y: Labels, shape (n,), integers in [0, classes) (the dataset's reader has checked them).
    """
    rows = np.arange(z.shape[0])
    z -= z.max(axis=1, keepdims=True)
    own = z[rows, y]
    np.exp(z, out=z)
    total = z.sum(axis=1, keepdims=True)
    losses = np.log(total[:, 0]) - own
    z /= total
    z[rows, y] -= 1
    z /= z.shape[0]
    return float(losses.mean(dtype=np.float64))


def accuracy(z: np.ndarray, y: np.ndarray) -> float:
    """Return the part of the rows of `z` whose largest entry is at the label.

    Args:
        z: Logits, shape (n, classes). A row whose largest is NaN or infinite counts as wrong.
        y: Labels, shape (n,), integers.
    """
    best = z.argmax(axis=1)
    # A model that has diverged is not right by chance; argmax takes a NaN for the largest.
    defined = np.isfinite(z[np.arange(z.shape[0]), best])
    return float(np.mean((best == y) & defined))
