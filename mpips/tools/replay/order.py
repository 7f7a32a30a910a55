"""Order of a recorded job: pushes, and reads of rows."""

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
        self._first = records[owning[0]]
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

    def record(self, worker: int, at: int) -> np.void:
        """Return the record of a worker's push, from 0, which says what it was made of."""
        found: np.void = self._first[next(iter(self.at.values()))[worker][at]]
        return found


class RoundOrder(Order):
    """The pushes of a job in rounds: each is computed from the parameters of the round before."""

    def __init__(
        self, records: Sequence[np.ndarray], owning: Sequence[int], workers: int, base: int
    ) -> None:
        super().__init__(records, owning, workers, base)
        most = min(self.complete) + 1  # a round needs the pushes of all workers in the one before
        self.complete = [min(count, most) for count in self.complete]
        for k in owning:
            self.reads[k] = [base + np.arange(len(each)) for each in self.at[k]]
            self.readers[k] = np.zeros(len(records[k]) + 1, np.int64)


class RowOrder:
    """Who read rows of which server at which version, and has not done so again yet.

    Args:
        reads: Of each server; see `Recorded.reads`.
        workers: Number of workers.
        base: The version that all servers began at.
    """

    def __init__(self, reads: Sequence[np.ndarray], workers: int, base: int) -> None:
        self._versions: list[list[list[int]]] = []  # by server and worker
        for each in reads:
            found = ((base + each["at"][each["worker"] == w]).tolist() for w in range(workers))
            self._versions.append([versions[::-1] for versions in found])

    def next(self, server: int, worker: int) -> int | None:
        """Return the version at which a worker's next read of a server's rows is; None if never."""
        versions = self._versions[server][worker]
        return versions[-1] if versions else None

    def take(self, server: int, worker: int) -> None:
        """Note that a worker has read."""
        self._versions[server][worker].pop()

    def drop(self, worker: int) -> None:
        """Leave out what a worker has read behind its last push."""
        for by_worker in self._versions:
            by_worker[worker].clear()

    def waits_at(self, server: int, version: int) -> bool:
        """Return whether somebody is still to read a server's rows at a version."""
        return any(v and v[-1] <= version for v in self._versions[server])


def _by_worker(numbers: np.ndarray, workers: int) -> list[np.ndarray]:
    """Return where in `numbers` each worker stands, in increasing order."""
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(workers + 1))
    return [order[ends[w] : ends[w + 1]] for w in range(workers)]
