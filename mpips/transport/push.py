"""Header of a push: its gradients, batches and versions."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.ledger import Range

if TYPE_CHECKING:
    from mpips.transport.rows import Section

# Worker, seq, epoch, begin, end, samples, loss, version read, number of the batch, rate factor;
# `mpips.kernels.exchange.announce` writes them.
_HEADER = struct.Struct("@6qd2qd")
LOSS, VERSION, NUMBER, FACTOR = range(6, 10)  # words of a header; LOSS and FACTOR are float64
ROWS_BYTES = _HEADER.size // 8  # word: bytes of the rows that follow the gradient to another node
HEADER_WORDS = ROWS_BYTES + 1
Batch = tuple[int, Range, int, float]  # worker, batch, number of samples, mean loss


@dataclass(slots=True)  # frozen would take a microsecond more for each push
class Push:
    """One worker's gradient of one shard, or the mean of several workers', as a server applies it.

    Attributes:
        worker: Worker number.
        seq: Number of the push, 1 for a worker's first.
        batch: Batch of the gradient.
        samples: Samples in the batch.
        loss: Mean loss over the batch.
        version: Version of this shard that the worker had read.
        grad: Gradient of the shard, shape (shard.size,); with `others`, the mean of all.
        number: Number of the batch, in the order in which batches are assigned.
        factor: Factor of the learning rate, set by the worker's program.
        origin: Parameters at which the gradient was computed, shape (shard.size,); None if no
            server needs them.
        others: Pushes of other workers whose gradients are also in `grad`.
        rows: Gradients of this server's rows, by table; empty without tables.
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
    factor: float = 1.0
    others: "tuple[Push, ...]" = ()
    rows: "tuple[Section, ...]" = ()

    @classmethod
    def unpack(
        cls, words: np.ndarray, grad: np.ndarray, origin: np.ndarray | None = None
    ) -> "Push":
        """Build a push from its header, shape (HEADER_WORDS,), dtype int64."""
        found = _HEADER.unpack_from(words.data)
        worker, seq, epoch, begin, end, samples, loss, version, number, factor = found
        batch = epoch, begin, end
        return cls(worker, seq, batch, samples, loss, version, grad, origin, number, factor)

    @classmethod
    def unpack_all(
        cls, rows: np.ndarray, grad: np.ndarray, origin: np.ndarray | None = None
    ) -> "Push":
        """Build an aggregated push from its headers, shape (workers, HEADER_WORDS), dtype int64."""
        first, *others = (cls.unpack(row, grad, origin) for row in rows)
        return replace(first, others=tuple(others)) if others else first

    @property
    def batches(self) -> list[Batch]:
        """Batch of each worker's push."""
        return [(each.worker, each.batch, each.samples, each.loss) for each in self]

    @property
    def count(self) -> int:
        """Number of workers' pushes."""
        return 1 + len(self.others)

    @property
    def factors(self) -> float:
        """Sum of the pushes' rate factors; their number, if no program sets a factor."""
        if not self.others:
            return self.factor
        return sum(part.factor for part in self)

    def __iter__(self) -> Iterator["Push"]:
        """Yield each worker's push."""
        return iter((self, *self.others))


def batches_of(rows: np.ndarray) -> list[Batch]:
    """Return the batches of pushes of these headers, shape (pushes, HEADER_WORDS), dtype int64."""
    heads, losses = rows[:, :LOSS].tolist(), rows[:, LOSS].view(np.float64).tolist()
    return [
        (worker, (epoch, begin, end), samples, loss)
        for (worker, _, epoch, begin, end, samples), loss in zip(heads, losses, strict=True)
    ]
