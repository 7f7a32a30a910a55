"""Sample allocator: the batches assigned, and those applied.

A batch is a range of positions in an epoch's shuffled order, ``(epoch, begin, end)``: it names
its samples whatever the number of workers, so a run can be resumed on another number. Every
range is assigned once; what was assigned and not applied at a snapshot is assigned
again by the run that resumes it, and what a worker had that has died to the others.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

Range = tuple[int, int, int]
EXHAUSTED: Range = (-1, 0, 0)


@dataclass
class SampleAllocator:
    """The batches of a run, in the order in which they are assigned.

    Args:
        samples: Training samples in an epoch.
        batch_size: Samples in a batch; the last of an epoch may have fewer.
        epochs: Epochs in all, resumed ones included; None for no end.
        quota: Steps in all of each worker; None for no quota.
        workers: Number of workers.
        chunk: Batches that one worker takes in a row, so that it reads a block of a file once.
        cursor: ``(epoch, position)`` of the first sample that was never assigned.
        pending: Ranges to be assigned first.
        clocks: Steps that each worker has done before.

    Attributes:
        issued: Batches assigned by this object; the next one has this number.
        before: Steps that each worker had done when it was made, or restored.
        taken_back: Numbers of the batches that were taken back.
        samples_done: Samples applied so far, in all epochs.
    """

    samples: int
    batch_size: int
    workers: int
    epochs: int | None = None
    quota: int | None = None
    chunk: int = 1
    cursor: tuple[int, int] = (0, 0)
    pending: deque[Range] = field(default_factory=deque)
    clocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = deque((int(e), int(b), int(n)) for e, b, n in self.pending)
        self.clocks = list(self.clocks) or [0] * self.workers
        self.before = list(self.clocks)
        self._chunks: list[deque[Range]] = [deque() for _ in range(self.workers)]
        self._open: list[deque[tuple[Range, int]]] = [deque() for _ in range(self.workers)]
        self.issued = 0
        self.taken_back: list[int] = []
        self.stopped = False
        self._count()

    def _count(self) -> None:
        epoch, position = self.cursor
        open_samples = sum(end - begin for _, begin, end in self.unfinished())
        self.samples_done = epoch * self.samples + position - open_samples

    def next(self, worker: int) -> Range | None:
        """Assign a batch to `worker`; None if there is none left for it."""
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
        fullest = max(self._chunks, key=len)  # no batch is left but those set aside
        return fullest.pop() if fullest else None

    def _fresh(self) -> Range | None:
        epoch, begin = self.cursor
        if self.epochs is not None and epoch >= self.epochs:
            return None
        end = min(begin + self.batch_size, self.samples)
        self.cursor = (epoch, end) if end < self.samples else (epoch + 1, 0)
        return (epoch, begin, end)

    def applied(self, worker: int, *batches: Range) -> None:
        """Note that the oldest open batches of `worker`, which must be `batches`, were applied."""
        for batch in batches:
            oldest, _ = self._open[worker].popleft()
            assert oldest == batch, f"worker {worker} applied {batch} before {oldest}"
            self.samples_done += batch[2] - batch[1]
        self.clocks[worker] += len(batches)

    def take_back(self, worker: int, keep: int) -> list[int]:
        """Assign to others what `worker` has open, but for the oldest `keep` batches.

        Returns:
            The numbers of the batches, which nothing has any more; they get others.
        """
        batches = self._open[worker]
        back = [batches.pop() for _ in range(len(batches) - keep)]
        self.pending.extendleft(batch for batch, _ in back)
        void = [number for _, number in back]
        self.taken_back += void
        return void

    def given(self, worker: int) -> int:
        """Return how many batches `worker` has been given in this job and not been taken back."""
        return self.clocks[worker] - self.before[worker] + len(self._open[worker])

    def open_to(self, worker: int) -> list[tuple[Range, int]]:
        """Return the batches that `worker` has open, oldest first, each with its number."""
        return list(self._open[worker])

    def catch_up(self, pushes: Sequence[int]) -> None:
        """Note that so many batches of each worker were applied in this job."""
        for worker, count in enumerate(pushes):
            while self.clocks[worker] - self.before[worker] < count:
                self.applied(worker, self._open[worker][0][0])

    @property
    def may_come_back(self) -> bool:
        """Whether a batch is open that would be assigned again if its worker died."""
        return not self.stopped and any(self._open)

    def unfinished(self) -> list[Range]:
        """Return the ranges that were cut off the data and not applied, in order."""
        assigned = (batch for each in self._open for batch, _ in each)
        return sorted(chain(self.pending, *self._chunks, assigned))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data (see `restore`)."""
        return {
            "cursor": list(self.cursor),
            "pending": [list(b) for b in self.unfinished()],
            "clocks": list(self.clocks),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, perhaps with another number of workers.

        What was larger than a batch is now, as that of a round of more workers, comes in parts:
        whoever takes one may have room for a batch and no more.
        """
        epoch, position = state["cursor"]
        self.cursor = (int(epoch), int(position))
        left = [(int(e), int(b), int(n)) for e, b, n in state["pending"]]
        self.pending = deque(each for batch in left for each in pieces(batch, self.batch_size))
        self.clocks = share_clocks([int(c) for c in state["clocks"]], self.workers)
        self.before = list(self.clocks)
        self._count()

    @property
    def epochs_done(self) -> float:
        """Epochs applied so far, whole and part."""
        # Whole numbers first: ranks that have assigned differently far ahead get the same.
        return self.samples_done / self.samples


def leave(allocator: SampleAllocator, batch: Range, left: Sequence[Range]) -> None:
    """Assign again what was left of the batch that an only worker has applied last."""
    count = sum(end - begin for _, begin, end in left)
    allocator.pending.extend(left)
    allocator.samples_done -= count
    allocator.clocks[0] -= count == batch[2] - batch[1]  # else it was a step


def resize(allocator: SampleAllocator, batch_size: int) -> None:
    """Assign batches of another size to an only worker; those that it has open come again.

    The state after it is the same however many batches were assigned ahead.
    """
    allocator.take_back(0, 0)
    allocator.batch_size, at, n = batch_size, allocator.cursor, allocator.samples
    left = sorted(allocator.pending)
    while left and (left[-1][0] + left[-1][2] // n, left[-1][2] % n) == at:
        at = left.pop()[:2]
    allocator.cursor = at
    allocator.pending = deque(each for batch in left for each in pieces(batch, batch_size))


def epochs_over(allocator: SampleAllocator) -> int:
    """Return of how many epochs every batch is applied."""
    return min((epoch for epoch, _, _ in allocator.unfinished()), default=allocator.cursor[0])


def share_clocks(clocks: list[int], workers: int) -> list[int]:
    """Divide the steps done among another number of workers; the sum stays what it was."""
    if len(clocks) == workers:
        return clocks
    whole, extra = divmod(sum(clocks), workers)
    return [whole + (w < extra) for w in range(workers)]


def part(batch: Range, worker: int, workers: int) -> Range:
    """Return a worker's part of a synchronous batch; all parts are equal to within one sample."""
    epoch, begin, end = batch
    n = end - begin
    return epoch, begin + worker * n // workers, begin + (worker + 1) * n // workers


def pieces(batch: Range, size: int) -> list[Range]:
    """Cut a batch into as few parts of at most `size` samples as go, equal to within one sample."""
    n = batch[2] - batch[1]
    return [batch] if 0 < n <= size else split(batch, -(-n // size))


def split(batch: Range, workers: int) -> list[Range]:
    """Cut a batch into as many parts; a synchronous one into one a worker."""
    return [part(batch, worker, workers) for worker in range(workers)]
