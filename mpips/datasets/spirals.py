"""Spirals that turn into each other: a generated problem that is harder than digits.

Points of arm k of ``ARMS`` lie at radius r in (0, 1] and angle ``2 pi (k / ARMS + TURNS r)``, with
noise added. Two inputs, one class an arm. Fitting them takes thousands of updates with a large
rate, so that stale gradients show: it is what consistency models are compared on.

Reference: K. J. Lang, M. J. Witbrock, "Learning to Tell Two Spirals Apart", Connectionist Models
Summer School, 1988, with more arms.
"""

import numpy as np

from mpips.datasets.table import MemoryTable

NAME = "spirals"
ARMS, TURNS, SAMPLES, NOISE = 4, 2.0, 6000, 0.015
SEED = 1988


def open_spirals() -> MemoryTable:
    """Generate the points, always the same: x (6000, 2) float32, y (6000,) uint8 0 to 3."""
    rng = np.random.default_rng(SEED)
    arm = rng.integers(0, ARMS, SAMPLES)
    radius = np.sqrt(rng.random(SAMPLES))
    angle = 2 * np.pi * (arm / ARMS + TURNS * radius)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x += rng.normal(0, NOISE, x.shape)
    return MemoryTable(NAME, x.astype("f4"), arm.astype("u1"))
