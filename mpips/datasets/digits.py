"""The digits that ship with the package: 1,797 handwritten ones, 8x8, ten classes.

Reference: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998; CC BY 4.0.
"""

from contextlib import closing
from pathlib import Path

from mpips.datasets.hdf5 import Hdf5Table
from mpips.datasets.table import MemoryTable

PATH = Path(__file__).with_name("digits.h5")


def open_digits() -> MemoryTable:
    """Read the digits into memory: x (1797, 8, 8), y (1797,)."""
    with closing(Hdf5Table(str(PATH))) as table:
        x, y = table.read_x(0, table.n), table.read_y(0, table.n)
        return MemoryTable(table.path, x, y, scale=table.scale)
