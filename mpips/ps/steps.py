"""Steps of an asynchronous worker: pull, compute, push.

`mpips.ps.worker` has the loop that takes batches and calls these steps.
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

LONG_S = 1e-3  # shortest computation during which a thread advances messages


class Steps(ABC):
    """Base of a mode's step, in two parts: `compute`, then `push`.

    A snapshot may take the worker's state between the two.

    Args:
        job: The run.
        half: This worker's half of the store.

    Attributes:
        times: Seconds spent in each phase.
        versions: Version of each shard in the replica, shape (servers,), dtype int64.
        background: Thread that advances messages between nodes during a computation, or None if
            no push or read crosses nodes.
        told: Whether the worker tells servers which arrays the program has frozen.
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
        """Replica that was read last, shape (n_params,)."""

    @abstractmethod
    def state(self) -> dict[str, Pieces]:
        """Return the state that only this worker has: pieces (begin, view) of vectors, by name."""

    @abstractmethod
    def numbers(self) -> tuple[int, dict[str, int]]:
        """Return the number of pushes, and further numbers to save with the worker's state."""

    def local(self, batch: Range) -> list[Range]:
        """Return the batch of each local step into which an assigned batch is divided."""
        return [batch]

    def may_read(self) -> bool:
        """Return whether the next step can read without waiting for another rank.

        Blocks: for copies of local shards.
        """
        return True

    def read_whole(self) -> None:
        """Complete the read of the replica that is under way, if any. Blocks: until complete."""
        assert not self.half.puller.reading, "a read is under way between two steps"

    @abstractmethod
    def compute(self, batch: Range, batches: Iterator[Batch]) -> Tasks[float]:
        """Make the step up to its push; return the mean loss.

        Args:
            batch: Samples of the step.
            batches: Their data, in batches; the first has been read already.
        """

    @abstractmethod
    def push(self, batch: Range, loss: float, number: int) -> None:
        """Push the result of `compute`. Blocks: no.

        Args:
            batch: As in `compute`.
            loss: Mean loss, from `compute`.
            number: Number of the batch, in the order in which batches are assigned.
        """


class GradientSteps(Steps):
    """Step that pulls a replica, computes a gradient from it, and pushes the gradient."""

    told = True

    def __init__(self, job: Job, half: WorkerHalf, replicas: int = 1) -> None:
        super().__init__(job, half)
        self._cluster, self._puller, self._sender = job.cluster, half.puller, half.sender
        self._replicas = half.replicas or [
            aligned_zeros(job.layout.size, job.dtype) for _ in range(replicas)
        ]
        self._params = [job.layout.views(r, writable=False) for r in self._replicas]
        self._rows, self._patience_ns = half.rows, patience_ns(job.cluster.ranks_per_core)
        self._keeps = job.staleness.origins  # replica seq % 2 is kept until push seq is applied
        self._at_once = half.puller.at_once and half.rows is None and not self._keeps
        self._current = 0  # index of the replica in use
        self._ready = False  # whether the replica of the next step is complete
        self._long = False  # whether the last gradient took at least LONG_S
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
        """See `Steps.compute`. Blocks: until all servers have applied the push before the last."""
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
        """Read if the buffer of push `seq` may be written; return whether it may. Blocks: no."""
        status_board.set_phase(status_board.PULLING, now)
        free = self._sender.awaited, seq - BUFFERS
        return self._puller.pull_when(free, self._replicas[0], self.versions)

    def _wait_and_read(self, seq: int, before: float) -> float:
        """Wait until the buffer of push `seq` may be written, and read.

        Returns:
            The time when the read began, by `time.perf_counter`.
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
        """Clip the step's gradient, rows of tables included, to norm `most`."""
        rows, squares = self._rows, sum_squares(trained)
        if rows is None:
            scale(trained, clip_factor(squares, most))
            return
        factor = clip_factor(squares + rows.sum_squares(), most)
        scale(trained, factor)
        rows.scale(factor)

    def _into(self, seq: int) -> np.ndarray:
        """Return the replica for push `seq`, whose buffer may be written."""
        if self._keeps:
            self._current = seq % 2
        return self._replicas[self._current]

    def _read(self, seq: int) -> None:
        """Read the replica for push `seq`, and set `versions`."""
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
    """Step whose read waits for other workers' pushes; see `mpips.ps.consistency`."""

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
    """Step with shards of other nodes, which the worker requests one step early.

    A read may still be under way when its step begins. With ``prefetch`` there are two replicas,
    and a read into the unused one is always under way.
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
        """Push, and request the shards of the next step.

        The worker first waits until the push before this one has left, so a replica lacks at most
        one of the worker's own pushes. The order of messages keeps both directions of a link busy.
        The versions are requested before the push, because its body would delay them. The shards
        are requested right after the push's announcement, so that the server accepts the body
        before it sends the shards.
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
    """Make the step of a mode that pushes gradients."""
    if half.puller.controller is not None:
        return BoundedSteps(job, half, half.puller.controller)
    return AheadSteps(job, half) if half.puller.looks_ahead else GradientSteps(job, half)
