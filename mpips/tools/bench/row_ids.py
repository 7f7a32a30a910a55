"""Ids of table rows, drawn by Zipf's law or evenly."""

from typing import Any

ROW_IDS, ROW_DIM, ROW_LISTS = 8192, 32, 64  # ids of a step, floats of a row, lists of ids
ZIPF = 1.05


def zipf(rng: Any, rows: int, n: int) -> Any:
    """Draw `n` row numbers k with a probability of about ``1 / (k + 1)**1.05``, as floats."""
    power = 1 - ZIPF
    return (((rows + 1.0) ** power - 1) * rng.random(n) + 1) ** (1 / power) // 1 - 1


def row_ids(measure: str, rows: int, ids: int = ROW_IDS) -> Any:
    """Return the ids of steps, row numbers by Zipf's law or evenly.

    Scripts of peers run this file without mpips, and some of them without NumPy.

    Returns:
        Row numbers, shape (ROW_LISTS, ids), dtype int64.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    if measure == "uniform-rows":
        return rng.integers(0, rows, (ROW_LISTS, ids))
    numbers = zipf(rng, rows, ROW_LISTS * ids).astype("i8")
    return np.minimum(numbers, rows - 1).reshape(ROW_LISTS, ids)
