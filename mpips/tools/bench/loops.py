"""Plain loops over table rows, and memory in small pages."""

import math
import mmap

import numpy as np
from numba import njit

from mpips.mpi.pages import MAP_NORESERVE


@njit(error_model="numpy", nogil=True)
def gather(table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Set ``out[i] = table[ids[i]]``, of which `out` may have fewer columns."""
    for i in range(ids.size):
        row, line = out[i], table[ids[i]]
        for j in range(row.size):
            row[j] = line[j]


@njit(error_model="numpy", nogil=True)
def scatter_add(table: np.ndarray, ids: np.ndarray, grads: np.ndarray, rate: float) -> None:
    """Subtract ``rate * grads[i]`` from ``table[ids[i]]``."""
    factor = table.dtype.type(rate)
    for i in range(ids.size):
        row, grad = table[ids[i]], grads[i]
        for j in range(row.size):
            row[j] -= factor * grad[j]


def zeros(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of memory of the kind that windows have at first: in small pages."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize, flags)
    return np.frombuffer(memory, dtype).reshape(shape)
