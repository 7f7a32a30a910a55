"""Steps of a worker: pull, compute, push, and the early pull.

The loop that takes the batches, and attends to all that comes meanwhile, is `mpips.ps.worker`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from mpips.checkpoint import Pieces
from mpips.datasets import Batch
from mpips.datasets.ledger import Range
from mpips.health import status_board
from mpips.kernels.vectors import scale, sum_squares
from mpips.layout import aligned_zeros
from mpips.mpi.waiting import Background, patience_ns
from mpips.optim import clip_factor
from mpips.planning.job import Job
from mpips.planning.outcome import Times
from mpips.problems.accumulate import Accumulator, Tasks
from mpips.ps.assemble import WorkerHalf
from mpips.ps.consistency import Controller
from mpips.transport.push_sender import BUFFERS

LONG_S = 1e-3  # a computation that is worth waking a thread for


class Steps(ABC):
    """What a worker does with a batch, in two parts: a snapshot may come between them.

    Args:
        job: The run.
        half: This worker's half of the store.

    Attributes:
        times: Where the time went.
        versions: Version of each shard that the replica was read at, shape (servers,).
        background: Gets on with what crosses nodes while something is computed; None where nothing
            does.
        told: Whether servers are told which arrays the program has frozen.
    """

    told = False

    def __init__(self, job: Job, half: WorkerHalf) -> None:
        self.job, self.half = job, half
        self.times = Times()
        self.versions = half.puller.versions.copy()
        self.background = Background(half.advance) if half.puller.looks_ahead else None
        if self.background is not None and half.rows is not None:
            half.rows.alone = self.background.paused

    @property
    @abstractmethod
    def replica(self) -> np.ndarray:
        """The newest replica, shape (n_params,)."""

    @abstractmethod
    def state(self) -> dict[str, Pieces]:
        """Return what is this worker's alone: pieces (begin, view) of vectors, by name."""

    @abstractmethod
    def numbers(self) -> tuple[int, dict[str, int]]:
        """Return the number of pushes, and the numbers that go with its own state."""

    def local(self, batch: Range) -> list[Range]:
        """Return the local steps that are made of what is assigned at once."""
        return [batch]

    def may_read(self) -> bool:
        """Return whether the next read is here, or waits for nobody. Blocks: for local copies."""
        return True

    def read_whole(self) -> None:
        """Have the replica whole, whatever read is under way. Blocks: until that is here."""
        assert not self.half.puller.reading, "a read is under way between two steps"

    @abstractmethod
    def compute(self, batch: Range, batches: Iterator[Batch]) -> Tasks[float]:
        """Make the step up to its push; returns the mean loss.

        Args:
            batch: The samples of the step.
            batches: Their batches, of which the first is read already.
        """

    @abstractmethod
    def push(self, batch: Range, loss: float, number: int) -> None:
        """Push what was computed.

        Args:
            batch: As in `compute`.
            loss: What `compute` has returned.
            number: Of the batch, in the order in which batches are assigned.
        """


class GradientSteps(Steps):
    """Gradients, each computed from a replica that is pulled when the step begins, and pushed."""

    told = True

    def __init__(self, job: Job, half: WorkerHalf, replicas: int = 1) -> None:
        super().__init__(job, half)
        self._cluster, self._puller, self._sender = job.cluster, half.puller, half.sender
        self._replicas = half.replicas or [
            aligned_zeros(job.layout.size, job.dtype) for _ in range(replicas)
        ]
        self._params = [job.layout.views(r, writable=False) for r in self._replicas]
        self._rows, self._patience_ns = half.rows, patience_ns(job.cluster.ranks_per_core)
        self._keeps = job.staleness.origins  # replica seq % 2 stays as long as the push
        self._at_once = half.puller.at_once and half.rows is None and not self._keeps
        self._current = 0  # the replica in use
        self._ready = False  # whether it is whole before it is due
        self._long = False  # whether the last gradient took long
        self._buffers = [half.sender.buffer(k) for k in range(2)]
        self._grads = [job.layout.views(buffer) for buffer in self._buffers]
        self._accumulator = Accumulator(job)

    @property
    def replica(self) -> np.ndarray:
        """See `Steps.replica`."""
        return self._replicas[self._current]

    def state(self) -> dict[str, Pieces]:
        """See `Steps.state`."""
        return dict(self._sender.push_sender.state)

    def numbers(self) -> tuple[int, dict[str, int]]:
        """See `Steps.numbers`."""
        return self._sender.seq, {"packed": self._sender.push_sender.packed}

    def compute(self, batch: Range, batches: Iterator[Batch]) -> Tasks[float]:
        """See `Steps.compute`. Blocks: until two pushes ago was applied everywhere."""
        times, half, seq = self.times, self.half, self._sender.seq + 1
        start = time.perf_counter()
        if not self._at_once or not self._read_at_once(seq, start):
            start = self._wait_and_read(seq, start)
        pulled = time.perf_counter()
        status_board.set_phase(status_board.COMPUTING, pulled)
        grad, params = self._buffers[seq % 2], self._params[self._current]
        args = params, batches, batch[2] - batch[1], self._grads[seq % 2], grad
        before = self._accumulator.compute_s
        if self.background is not None and self._long and half.under_way():
            with self.background:
                loss = yield from self._accumulator.gradient(*args)
        else:
            loss = yield from self._accumulator.gradient(*args)
        compute_s = self._accumulator.compute_s - before
        if self.job.config.clip:
            clipped = time.perf_counter()
            self._clip(grad[: self.job.trained], self.job.config.clip)
            compute_s += time.perf_counter() - clipped
        self._long = compute_s > LONG_S
        times.compute_s += compute_s
        times.pull_s += pulled - start
        return loss

    def _read_at_once(self, seq: int, now: float) -> bool:
        """Read, if the buffer of push `seq` may be written; returns whether it may."""
        status_board.set_phase(status_board.PULLING, now)
        free = self._sender.awaited, seq - BUFFERS
        return self._puller.pull_when(free, self._replicas[0], self.versions)

    def _wait_and_read(self, seq: int, before: float) -> float:
        """Wait until the buffer of push `seq` may be written, and read.

        Returns when the read began.
        """
        half, rows = self.half, self._rows
        if not half.writable(seq, self._patience_ns):
            self._cluster.wait(lambda: half.writable(seq), status_board.BUFFER)
        start = time.perf_counter()
        self.times.wait_s += start - before
        if rows is not None:
            rows.begin(seq)
            start = time.perf_counter()
        status_board.set_phase(status_board.PULLING, start)
        if not self._ready:
            self._read(seq)
        self._ready = False
        return start

    def _clip(self, trained: np.ndarray, most: float) -> None:
        """Bound the norm of the step's gradient, rows of tables included."""
        rows, squares = self._rows, sum_squares(trained)
        if rows is None:
            scale(trained, clip_factor(squares, most))
            return
        factor = clip_factor(squares + rows.sum_squares(), most)
        scale(trained, factor)
        rows.scale(factor)

    def _into(self, seq: int) -> np.ndarray:
        """Return the replica that push `seq` is computed from; the push's buffer is writable."""
        if self._keeps:
            self._current = seq % 2
        return self._replicas[self._current]

    def _read(self, seq: int) -> None:
        """Have the replica of push `seq` whole, and `versions` those that it holds."""
        self.versions[:] = self._puller.pull(self._into(seq))

    def push(self, batch: Range, loss: float, number: int) -> None:
        """See `Steps.push`."""
        times, samples = self.times, batch[2] - batch[1]
        if self._rows is not None:
            self._rows.end()
        start = time.perf_counter()
        status_board.set_phase(status_board.PUSHING, start)
        self._sender.push(batch, samples, loss, self.versions, number, self.job.rate_factor)
        times.push_s += time.perf_counter() - start
        times.steps += 1
        times.samples += samples


class BoundedSteps(GradientSteps):
    """Gradients whose reads wait for other workers' pushes; see `mpips.ps.consistency`."""

    def __init__(self, job: Job, half: WorkerHalf, controller: Controller) -> None:
        super().__init__(job, half)
        self._controller = controller

    def may_read(self) -> bool:
        """See `Steps.may_read`."""
        puller, seq = self._puller, self._sender.seq + 1
        if self._ready:
            return True
        if not puller.reading:
            if not self.half.writable(seq):
                return False
            puller.begin(self._into(seq))
            puller.fetch()
            if self._rows is not None:
                needs = self._controller.needs()
                self._rows.begin_read(needs.clock, needs.own)
        if not (self._controller.ready() and puller.advance()):
            return False
        start = time.perf_counter()
        self.versions[:] = puller.finish()
        self.times.pull_s += time.perf_counter() - start
        self._ready = puller.usable
        return self._ready


class AheadSteps(GradientSteps):
    """Gradients from shards of other nodes, which are asked for a step before they are due.

    A read may still be under way when its step begins; with ``prefetch`` one is always under way
    into the other of two replicas.
    """

    def __init__(self, job: Job, half: WorkerHalf) -> None:
        self._prefetch = job.config.prefetch
        super().__init__(job, half, 1 + self._prefetch)

    def read_whole(self) -> None:
        """See `Steps.read_whole`."""
        if self._puller.reading and not self._ready:
            self._read(self._sender.seq + 1)
            self._ready = True

    def _read(self, seq: int) -> None:
        """See `GradientSteps._read`."""
        puller = self._puller
        if not puller.reading:
            puller.begin(self._into(seq))
            puller.fetch()
        self.versions[:] = puller.finish()
        if self._prefetch:
            puller.begin(self._replicas[1 - self._current])
            puller.fetch()

    def push(self, batch: Range, loss: float, number: int) -> None:
        """Push, and ask for the shards of the next step.

        They are asked for when the push before this one has left, so that a replica lacks one of
        this worker's own pushes at most, and in an order that keeps both directions of a link
        full: the versions before the push, whose body would be in the way, and the shards right
        behind its announcement, so that the body is let in before their bulk comes.
        """
        puller, times, newest = self._puller, self.times, self.versions
        seq, half = self._sender.seq + 2, self.half
        times.wait_s += self._cluster.wait(lambda: half.writable(seq), status_board.BUFFER)
        start = time.perf_counter()
        if self._prefetch:
            newest, self._ready = puller.finish(), True
        puller.begin(self._into(seq))
        times.pull_s += time.perf_counter() - start
        super().push(batch, loss, number)
        puller.fetch()
        self.versions[:] = newest
        if self._prefetch:
            self._current = 1 - self._current


def gradient_steps(job: Job, half: WorkerHalf) -> GradientSteps:
    """Return what a worker does with a batch whose gradient is pushed."""
    if half.puller.controller is not None:
        return BoundedSteps(job, half, half.puller.controller)
    return AheadSteps(job, half) if half.puller.looks_ahead else GradientSteps(job, half)
