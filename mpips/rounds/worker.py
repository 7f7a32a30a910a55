"""A worker's part in each round."""

from abc import ABC, abstractmethod
from contextlib import nullcontext

from mpips.datasets.ledger import Range, part
from mpips.planning.job import Job
from mpips.problems.accumulate import Accumulator, Tasks, submit, taken
from mpips.ps.steps import Times
from mpips.ps.worker import make_loader, units_ahead
from mpips.rounds.base import Round


class RoundWorker(ABC):
    """Reads the samples of this worker, and computes.

    Attributes:
        times: Where its time went.
        pushes: Rounds that it brought something into.
        ahead: Rounds after the one in work whose samples its reader wants to know.
        vectors: Vectors of the parameters' size that a round moves.
    """

    vectors: float = 1

    def __init__(self, job: Job) -> None:
        assert job.worker_id is not None, "servers have no part of a batch"
        self._job, self._worker_id = job, job.worker_id
        self._loader = make_loader(job)
        self.times, self.pushes, self.ahead = Times(), 0, units_ahead(job)

    def part(self, batch: Range) -> Range:
        """Return this worker's part of a round's batch."""
        return part(batch, self._worker_id, len(self._job.cluster.roles.workers))

    def steps(self, batch: Range) -> list[Range]:
        """Return what this worker reads for a round, one part a step."""
        return [self.part(batch)]

    def read_ahead(self, batch: Range) -> None:
        """Begin to read what a round takes."""
        for step in self.steps(batch):
            submit(self._job, self._loader, step)

    @abstractmethod
    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """Compute what this worker brings into a round.

        Args:
            batch: The round's.
            step: Updates applied before it.

        Returns:
            The mean loss and the number of samples.
        """

    def close(self) -> None:
        """Stop reading."""
        self._loader.close()


class GradientWorker(RoundWorker):
    """Computes the gradient of its part of the batch, from the round's replica."""

    def __init__(self, job: Job, rounds: Round) -> None:
        super().__init__(job)
        self._params = job.layout.views(rounds.replica, writable=False)
        self._flat, self._grad = rounds.grad, job.layout.views(rounds.grad)
        self._accumulator = Accumulator(job)
        self._tables = rounds.tables

    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """See `RoundWorker.compute`."""
        mine = self.part(batch)
        samples = mine[2] - mine[1]
        if self._job.rows is not None:
            self._job.rows.begin(step + 1)
        if not samples:
            return 0.0, 0
        batches = taken(self._job, self._loader, mine)
        args = self._params, batches, samples, self._grad, self._flat
        with nullcontext() if self._tables is None else self._tables.serving():
            loss = yield from self._accumulator.gradient(*args)
        self.times.compute_s = self._accumulator.compute_s
        self.times.steps += 1
        self.times.samples += samples
        self.pushes += 1
        return loss, samples
