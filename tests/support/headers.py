"""Headers of pushes, as workers write them."""

import numpy as np

from mpips.datasets.ledger import Range
from mpips.kernels.exchange import announce


def pack(
    words: np.ndarray, worker: int, seq: int, batch: Range, samples: int, loss: float, number: int,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Write a push's header, shape (HEADER_WORDS,), dtype int64, with version 0."""
    pushed, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    said = worker, seq, *batch, samples, loss, number, factor
    announce(pushed, words, words.view(np.float64), none, none, *said)
