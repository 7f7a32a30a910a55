"""Make ``digits.h5``, the dataset that ships with the package, from scikit-learn's copy.

Usage: ``python -m mpips.datasets.make_digits [PATH]``
"""

import sys
from importlib import import_module
from pathlib import Path

import h5py
import numpy as np

SOURCE = (
    "E. Alpaydin, C. Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning "
    "Repository, 1998. https://doi.org/10.24432/C50P49 (its test part, 1,797 samples of 8x8, as "
    "bundled with scikit-learn)"
)
LICENCE = "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/"


def make(path: str | Path) -> None:
    """Write ``x``, shape (1797, 8, 8), uint8 0 to 16, and ``y``, shape (1797,), uint8 0 to 9."""
    digits = import_module("sklearn.datasets").load_digits()
    with h5py.File(path, "w") as file:
        file.attrs["source"] = SOURCE
        file.attrs["licence"] = LICENCE
        # Times are left out, so that the same data makes the same bytes.
        options = {"compression": "gzip", "compression_opts": 9, "track_times": False}
        x = file.create_dataset("x", data=digits.images.astype(np.uint8), shuffle=True, **options)
        x.attrs["scale"] = 1 / 16
        file.create_dataset("y", data=digits.target.astype(np.uint8), **options)


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("digits.h5"))
