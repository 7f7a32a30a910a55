"""Two fits: a fixed and a per-byte part of a time, and the power by which something grows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """A time as ``fixed_s + per_byte_s * size``.

    Attributes:
        fixed_s: What a step takes whatever its size, in seconds; at least 0.
        per_byte_s: Seconds for each byte; at least 0.
        worst: The largest factor between a time that was fitted and the line; at least 1.
    """

    fixed_s: float
    per_byte_s: float
    worst: float = 1.0

    def at(self, size: float) -> float:
        """Return the seconds at `size` bytes."""
        return self.fixed_s + self.per_byte_s * size


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> Line | None:
    """Fit a line by least squares on the relative errors, neither part below 0.

    So 10 % off counts as much at 64 KB as at 256 MB, where the time is a thousand times as long.

    Args:
        sizes: Bytes, each > 0.
        times: Seconds, each > 0.

    Returns:
        The line, or None where there are fewer than two different sizes.
    """
    if len(set(sizes)) < 2:
        return None
    x, t = np.asarray(sizes, "f8"), np.asarray(times, "f8")
    parts = np.stack([1 / t, x / t], axis=1)
    scale = parts.max(axis=0)  # bytes and 1 differ by eight orders of magnitude
    found = np.linalg.lstsq(parts / scale, np.ones(len(t)), rcond=None)[0] / scale
    if found.min() < 0:  # then the best of those allowed has one part alone
        alone = parts.sum(axis=0) / (parts**2).sum(axis=0)
        misses = ((parts * alone - 1) ** 2).sum(axis=0)
        found = np.where(np.arange(2) == misses.argmin(), alone, 0.0)
    ratios = t / (found[0] + found[1] * x)
    worst = float(max(ratios.max(), 1 / ratios.min()))
    return Line(float(found[0]), float(found[1]), worst)


def power(counts: Sequence[float], values: Sequence[float]) -> float | None:
    """Return p of the best ``value = c * count**p``, by least squares on the logarithms.

    Values that are 0 are left out: nothing is known of how they grow.

    Returns:
        The power, or None where fewer than two different counts are left.
    """
    pairs = [(n, v) for n, v in zip(counts, values, strict=True) if v > 0]
    if len({n for n, _ in pairs}) < 2:
        return None
    logs = np.log(np.asarray(pairs, "f8"))
    slope, _ = np.polyfit(logs[:, 0], logs[:, 1], 1)
    return float(slope)
