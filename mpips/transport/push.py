"""What a push says: which gradients, of which batches, computed from which versions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpips.datasets.ledger import Range

# Worker, seq, epoch, begin, end, samples, loss (its bits), version read, number of the batch.
HEADER_WORDS = 9


@dataclass(frozen=True)
class Push:
    """One worker's gradient for one shard, or the mean of several workers', as a server takes it.

    Attributes:
        worker: Worker number.
        seq: Number of the push, 1 for a worker's first.
        batch: The batch that it was computed from.
        samples: Samples in the batch.
        loss: Mean loss over the batch.
        version: Version of this shard that the worker had read.
        grad: Gradient of the shard, shape (shard.size,); with `others`, the mean of all.
        number: Of the batch, in the order in which batches are handed out.
        origin: Parameters that it was computed from, shape (shard.size,), where a server needs
            them.
        others: The further pushes whose gradients are in `grad`, each of another worker.
    """

    worker: int
    seq: int
    batch: Range
    samples: int
    loss: float
    version: int
    grad: np.ndarray
    origin: np.ndarray | None = None
    number: int = 0
    others: "tuple[Push, ...]" = ()

    @classmethod
    def unpack(
        cls, words: np.ndarray, grad: np.ndarray, origin: np.ndarray | None = None
    ) -> "Push":
        """Build a push from its header, shape (HEADER_WORDS,), dtype int64."""
        worker, seq, epoch, begin, end, samples, _, version, number = words.tolist()
        loss = float(words[6:7].view("f8")[0])
        push = (worker, seq, (epoch, begin, end), samples, loss, version)
        return cls(*push, grad, origin, number)

    @classmethod
    def unpack_all(
        cls, rows: np.ndarray, grad: np.ndarray, origin: np.ndarray | None = None
    ) -> "Push":
        """Build a push from the headers in it, shape (workers, HEADER_WORDS), dtype int64."""
        first, *others = (cls.unpack(row, grad, origin) for row in rows)
        return cls(**{**vars(first), "others": tuple(others)}) if others else first

    @property
    def count(self) -> int:
        """Number of workers' pushes in it."""
        return 1 + len(self.others)

    def __iter__(self) -> Iterator["Push"]:
        """Yield each worker's push in it."""
        yield self
        yield from self.others


def pack(
    words: np.ndarray, worker: int, seq: int, batch: Range, samples: int, loss: float, number: int
) -> None:
    """Write a push's header, shape (HEADER_WORDS,), dtype int64, but for the version."""
    words[:6] = (worker, seq, *batch, samples)
    words[6:7].view("f8")[0] = loss
    words[8] = number
