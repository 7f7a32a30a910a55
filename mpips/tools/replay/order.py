"""Order of a recorded job: pushes, and reads of rows."""

from collections.abc import Sequence

import numpy as np

from mpips.tools.replay.record import Part


class Order:
    """Order of a recorded job's pushes, as far as every server with a shard has recorded them.

    Args:
        part: Record of the job.
        owning: Numbers of the servers with a shard.

    Attributes:
        complete: For each worker, the number of its pushes that all these servers have recorded.
        at: By server and worker, the index of each push among the server's updates, from 0.
        reads: By server and worker, the version of the shard from which each push was computed.
        readers: By server, the number of pushes computed from each version, from `base` on.
    """

    def __init__(self, part: Part, owning: Sequence[int]) -> None:
        records, workers, base = part.records, len(part.about["workers"]), part.base
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
        """Return the record of a worker's push number `at`, from 0, with its batch and loss."""
        record: np.void = self._first[next(iter(self.at.values()))[worker][at]]
        return record


class RoundOrder(Order):
    """Order of the pushes of a job in rounds.

    Each push is computed from the parameters after the previous round.
    """

    def __init__(self, part: Part, owning: Sequence[int]) -> None:
        super().__init__(part, owning)
        most = min(self.complete) + 1  # a round needs all workers' pushes of the previous one
        self.complete = [min(count, most) for count in self.complete]
        for k in owning:
            self.reads[k] = [part.base + np.arange(len(each)) for each in self.at[k]]
            self.readers[k] = np.zeros_like(self.readers[k])


class RowOrder:
    """Recorded reads of rows, by server and worker, that the replay has not repeated yet.

    Args:
        part: Record of the job.
    """

    def __init__(self, part: Part) -> None:
        workers = range(len(part.about["workers"]))
        self._versions: list[list[list[int]]] = []  # by server and worker, the next read last
        for reads in (each.reads for each in part.servers):
            own = [part.base + reads["at"][reads["worker"] == w] for w in workers]
            self._versions.append([versions[::-1].tolist() for versions in own])

    def next(self, server: int, worker: int) -> int | None:
        """Return the version of a server at a worker's next read of its rows; None for no read."""
        versions = self._versions[server][worker]
        return versions[-1] if versions else None

    def take(self, server: int, worker: int) -> None:
        """Remove a worker's next read, after the replay has repeated it."""
        self._versions[server][worker].pop()

    def drop(self, worker: int) -> None:
        """Remove all reads of a worker, after its last push."""
        for by_worker in self._versions:
            by_worker[worker].clear()

    def waits_at(self, server: int, version: int) -> bool:
        """Return whether a worker must still read a server's rows at a version."""
        return any(v and v[-1] <= version for v in self._versions[server])


def _by_worker(numbers: np.ndarray, workers: int) -> list[np.ndarray]:
    """Return the indices of each worker in `numbers`, ascending."""
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(workers + 1))
    return [order[ends[w] : ends[w + 1]] for w in range(workers)]
