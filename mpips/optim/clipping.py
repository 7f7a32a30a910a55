"""Clipping of gradients by the norm of the whole."""

import math


def clip_factor(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor that brings a gradient's norm down to `max_norm`, at most 1.

    Args:
        sum_of_squares: Of the whole gradient, over all shards.
        max_norm: Greatest norm allowed; 0 means that clipping is off.

    Returns:
        1 where the norm is within the bound; NaN for a NaN and 0 for an infinite sum of squares,
        with which an infinite gradient becomes NaN and is not hidden.
    """
    norm = math.sqrt(sum_of_squares)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm
