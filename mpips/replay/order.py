"""Who pushed what, and computed it from which versions: the records of a job, by worker."""

from collections.abc import Sequence

import numpy as np


class Order:
    """The pushes of a recorded job that every server with a shard has recorded.

    Args:
        records: Of each server; empty for those without a shard.
        owning: The servers that have one.
        workers: Number of workers.
        base: The version that all shards began at.

    Attributes:
        complete: Of each worker, how many of its first pushes they are.
        at: By server and worker: which of the server's updates, from 0, each push is.
        reads: Likewise: the version of the server's shard that it was computed from.
        readers: By server: how many pushes were computed from each version, from `base` on.
    """

    def __init__(
        self, records: Sequence[np.ndarray], owning: Sequence[int], workers: int, base: int
    ) -> None:
        self.at = {k: _by_worker(records[k]["worker"], workers) for k in owning}
        self.complete = [
            min((len(self.at[k][w]) for k in owning), default=0) for w in range(workers)
        ]
        self.reads: dict[int, list[np.ndarray]] = {}
        self.readers: dict[int, np.ndarray] = {}
        for k in owning:
            stale = records[k]["stale"].astype("i8")
            self.reads[k] = [base + at - stale[at] for at in self.at[k]]
            each = zip(self.reads[k], self.complete, strict=True)
            read = np.concatenate([versions[:n] for versions, n in each]) - base
            self.readers[k] = np.bincount(read, minlength=len(records[k]) + 1)


def _by_worker(numbers: np.ndarray, workers: int) -> list[np.ndarray]:
    """Return where in `numbers` each worker stands, in increasing order."""
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(workers + 1))
    return [order[ends[w] : ends[w + 1]] for w in range(workers)]
