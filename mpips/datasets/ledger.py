"""Sample allocator: it assigns batches, and records those that were applied.

A batch is a range of positions in an epoch's shuffled order, ``(epoch, begin, end)``. It names its
samples for any number of workers, so a run can resume on another number. Every range is assigned
once. A resumed run assigns the ranges again that were assigned and not applied at the snapshot. If
a worker dies, its ranges are assigned to the others.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

Range = tuple[int, int, int]
EXHAUSTED: Range = (-1, 0, 0)


@dataclass
class SampleAllocator:
    """Allocator of the batches of a run, in order.

    Args:
        samples: Training samples in an epoch.
        batch_size: Samples in a batch; the last of an epoch may have fewer.
        epochs: Number of epochs, with those before a resume; None for no end.
        quota: Number of steps of each worker, with those before a resume; None for no quota.
        workers: Number of workers.
        chunk: Consecutive batches that one worker takes, so that it reads a block of a file once.

    Attributes:
        cursor: ``(epoch, position)`` of the first sample that was never assigned.
        pending: Ranges to assign first.
        clocks: Steps of each worker, with those before a resume.
        issued: Number of batches that this object has assigned; also the number of the next one.
        before: Steps of each worker before a resume.
        taken_back: Numbers of the batches that were taken back.
        stopped: Whether to assign no more batches.
        samples_done: Samples applied so far, in all epochs.
    """

    samples: int
    batch_size: int
    workers: int
    epochs: int | None = None
    quota: int | None = None
    chunk: int = 1

    def __post_init__(self) -> None:
        self.cursor = (0, 0)
        self.pending = deque[Range]()
        self.clocks = [0] * self.workers
        self.before = list(self.clocks)
        self._chunks: list[deque[Range]] = [deque() for _ in range(self.workers)]
        self._later: list[Range] = []  # ranges of epochs that this run does not have now
        self._open: list[deque[tuple[Range, int]]] = [deque() for _ in range(self.workers)]
        self.issued = 0
        self.taken_back: list[int] = []
        self.stopped = False
        self.samples_done = 0

    def next(self, worker: int) -> Range | None:
        """Assign a batch to `worker`; None if none is left for it."""
        issued = self.clocks[worker] + len(self._open[worker])
        if self.stopped or (self.quota is not None and issued >= self.quota):
            return None
        batch = self._take(worker)
        if batch is not None:
            self._open[worker].append((batch, self.issued))
            self.issued += 1
        return batch

    def _take(self, worker: int) -> Range | None:
        if self.pending:
            return self.pending.popleft()
        own = self._chunks[worker]
        if not own:
            while len(own) < self.chunk and (batch := self._fresh()) is not None:
                own.append(batch)
        if own:
            return own.popleft()
        fullest = max(self._chunks, key=len)  # only batches in other workers' chunks are left
        return fullest.pop() if fullest else None

    def _fresh(self) -> Range | None:
        epoch, begin = self.cursor
        if self.epochs is not None and epoch >= self.epochs:
            return None
        end = min(begin + self.batch_size, self.samples)
        self.cursor = (epoch, end) if end < self.samples else (epoch + 1, 0)
        return (epoch, begin, end)

    def applied(self, worker: int, *batches: Range) -> None:
        """Note that `batches`, the oldest open batches of `worker`, were applied."""
        for batch in batches:
            oldest, _ = self._open[worker].popleft()
            assert oldest == batch, f"worker {worker} applied {batch} before {oldest}"
            self.samples_done += batch[2] - batch[1]
        self.clocks[worker] += len(batches)

    def take_back(self, worker: int, keep: int) -> list[int]:
        """Take back the open batches of `worker`, except its oldest `keep`, and its chunk.

        Others get these batches.

        Returns:
            The numbers of these batches. The batches get new numbers when they are assigned again.
        """
        batches = self._open[worker]
        back = [batches.pop() for _ in range(len(batches) - keep)]
        self.pending.extendleft(batch for batch, _ in back)
        self.pending.extend(self._chunks[worker])
        self._chunks[worker].clear()
        void = [number for _, number in back]
        self.taken_back += void
        return void

    def given(self, worker: int) -> int:
        """Return how many batches `worker` holds or has applied in this job."""
        return self.clocks[worker] - self.before[worker] + len(self._open[worker])

    def open_to(self, worker: int) -> list[tuple[Range, int]]:
        """Return the open batches of `worker`, oldest first, with their numbers."""
        return list(self._open[worker])

    def catch_up(self, pushes: Sequence[int]) -> None:
        """Note applied batches of each worker, up to the given numbers of pushes in this job."""
        for worker, count in enumerate(pushes):
            while self.clocks[worker] - self.before[worker] < count:
                self.applied(worker, self._open[worker][0][0])

    @property
    def may_come_back(self) -> bool:
        """Whether a worker has an open batch, which would be assigned again if the worker died."""
        return not self.stopped and any(self._open)

    def unfinished(self) -> list[Range]:
        """Return the ranges that were taken from the data and not applied, sorted."""
        assigned = (batch for each in self._open for batch, _ in each)
        return sorted(chain(self.pending, self._later, *self._chunks, assigned))

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain data."""
        return {
            "cursor": list(self.cursor),
            "pending": [list(b) for b in self.unfinished()],
            "clocks": list(self.clocks),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`, also with another number of workers or fewer epochs.

        A range may be larger than a batch is now, as from a round of more workers. It is split,
        since a worker's buffers may hold only a batch.

        Ranges of later epochs are kept for a run that has these epochs again.
        """
        epoch, position = map(int, state["cursor"])
        ranges = [(int(e), int(b), int(n)) for e, b, n in state["pending"]]
        self.cursor = (epoch, position)
        end = epoch + 1 if self.epochs is None else self.epochs
        self._later = [batch for batch in ranges if batch[0] >= end]
        now = (batch for batch in ranges if batch[0] < end)
        self.pending = deque(p for batch in now for p in pieces(batch, self.batch_size))
        self.clocks = share_clocks([int(c) for c in state["clocks"]], self.workers)
        self.before = list(self.clocks)
        open_samples = sum(end - begin for _, begin, end in ranges)
        self.samples_done = epoch * self.samples + position - open_samples

    @property
    def epochs_done(self) -> float:
        """Epochs applied so far, with fractions."""
        # From an exact integer: ranks that have assigned different batches ahead get equal bits.
        return self.samples_done / self.samples


def leave(allocator: SampleAllocator, batch: Range, left: Sequence[Range]) -> None:
    """Assign again the rest of the batch that the only worker has applied last."""
    count = sum(end - begin for _, begin, end in left)
    allocator.pending.extend(left)
    allocator.samples_done -= count
    allocator.clocks[0] -= count == batch[2] - batch[1]  # no step, if nothing of it was computed


def resize(allocator: SampleAllocator, batch_size: int) -> None:
    """Change the size of batches with a single worker; its open batches are assigned again.

    The resulting state does not depend on the number of batches that were assigned ahead.
    """
    allocator.take_back(0, 0)
    allocator.batch_size, at, n = batch_size, allocator.cursor, allocator.samples
    ranges = sorted(allocator.pending)
    while ranges and (ranges[-1][0] + ranges[-1][2] // n, ranges[-1][2] % n) == at:
        at = ranges.pop()[:2]
    allocator.cursor = at
    allocator.pending = deque(p for batch in ranges for p in pieces(batch, batch_size))


def epochs_over(allocator: SampleAllocator) -> int:
    """Return the number of epochs of which every batch is applied."""
    return min((epoch for epoch, _, _ in allocator.unfinished()), default=allocator.cursor[0])


def share_clocks(clocks: list[int], workers: int) -> list[int]:
    """Divide the sum of steps among another number of workers."""
    if len(clocks) == workers:
        return clocks
    whole, extra = divmod(sum(clocks), workers)
    return [whole + (w < extra) for w in range(workers)]


def part(batch: Range, worker: int, workers: int) -> Range:
    """Return a worker's part of a synchronous batch; parts differ by at most one sample."""
    epoch, begin, end = batch
    n = end - begin
    return epoch, begin + worker * n // workers, begin + (worker + 1) * n // workers


@cache
def is_uneven(samples: int, workers: int, step_size: int, size: int) -> bool:
    """Return whether some workers compute fewer batches than others in a round.

    Args:
        samples: Samples of the round.
        workers: Number of workers.
        step_size: Most samples in a step of a worker; each makes as many steps.
        size: Most samples in a batch.
    """
    steps = -(-samples // (workers * step_size))
    parts = (split((0, 0, n), steps) for n in (samples // workers, -(-samples // workers)))
    fewest, most = (sum(-(-(end - begin) // size) for _, begin, end in part) for part in parts)
    return fewest < most


def pieces(batch: Range, size: int) -> list[Range]:
    """Split a batch into the fewest equal parts of at most `size` samples, to within one sample."""
    n = batch[2] - batch[1]
    return [batch] if 0 < n <= size else split(batch, -(-n // size))


def split(batch: Range, workers: int) -> list[Range]:
    """Split a batch into a part for each worker."""
    return [part(batch, worker, workers) for worker in range(workers)]
