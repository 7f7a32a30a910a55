"""Built-in datasets: handwritten digits and generated spirals.

`digits` is part of the package: 1,797 handwritten digits, 8x8, ten classes. `spirals` is harder:
points of arm k of ``ARMS`` are at radius r in (0, 1] and angle ``2 pi (k / ARMS + TURNS r)``, with
noise. It has two inputs, and one class an arm. Training takes thousands of updates with a large
learning rate. So stale gradients have an effect, which consistency models are compared by.

References: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998; CC BY 4.0. K. J. Lang, M. J. Witbrock, "Learning to Tell Two Spirals
Apart", Connectionist Models Summer School, 1988, with more arms.
"""

from pathlib import Path

import numpy as np

from mpips.datasets.table import MemoryTable

PATH = Path(__file__).with_name("digits.npy")  # a row for each digit: pixels from 0 to 16, label
ARMS, TURNS, SAMPLES, NOISE = 4, 2.0, 6000, 0.015
SEED = 1988


def open_digits() -> MemoryTable:
    """Read the digits into memory: x (1797, 8, 8) uint8, y (1797,) uint8."""
    rows = np.load(PATH)
    table = MemoryTable(str(PATH), rows[:, :-1].reshape(-1, 8, 8), rows[:, -1])
    table.scale = 1 / 16
    return table


def open_spirals() -> MemoryTable:
    """Generate the points, always the same: x (6000, 2) float32, y (6000,) uint8 0 to 3."""
    rng = np.random.default_rng(SEED)
    arm = rng.integers(0, ARMS, SAMPLES)
    radius = np.sqrt(rng.random(SAMPLES))
    angle = 2 * np.pi * (arm / ARMS + TURNS * radius)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x += rng.normal(0, NOISE, x.shape)
    return MemoryTable("spirals", x.astype("f4"), arm.astype("u1"))
