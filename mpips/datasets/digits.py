"""The digits that ship with the package: 1,797 handwritten ones, 8x8, ten classes.

Reference: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998; CC BY 4.0.
"""

from pathlib import Path

from mpips.datasets.hdf5 import load_hdf5
from mpips.datasets.table import MemoryTable

PATH = Path(__file__).with_name("digits.h5")


def open_digits() -> MemoryTable:
    """Read the digits into memory: x (1797, 8, 8), y (1797,)."""
    return load_hdf5(str(PATH))
