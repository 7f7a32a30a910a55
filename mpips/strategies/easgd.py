"""Elastic averaging SGD: replicas of workers, pulled towards a centre.

The servers own the centre c, and each worker trains its own replica x. A worker makes tau steps
with the job's rule. Then it exchanges with the servers: it pulls c, computes ``d = a (x - c)``,
sets ``x -= d``, and pushes d; the servers set ``c += d``. The elastic rate a determines how far
replicas may differ. mpips evaluates and saves the centre. With p workers, the paper and the default
use ``a = 0.9 / p``. With a momentum rule on the replicas, it is EAMSGD.

It uses the servers and channels of `async_sgd`, so no worker waits for another. A push is the
exchange of one worker; versions and staleness count exchanges. A local step uses the learning rate
of the centre's next version. Before a worker pulls, local servers have applied its last push, and
the push to remote servers has been sent. The gradient after an exchange is computed at the new x;
in the paper, at the old x. Checkpoints contain each worker's replica and its slots. If a run is
resumed with another number of workers, replicas start at the centre, and slots at zero.

References: Zhang, Choromanska and LeCun, NeurIPS 2015, algorithm 1.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from mpips.checkpoint import Pieces
from mpips.datasets import Batch
from mpips.datasets.ledger import Range, pieces
from mpips.health import status_board
from mpips.kernels.rule_loops import dense
from mpips.kernels.update_rules import elastic
from mpips.layout import aligned_zeros
from mpips.optim import FrozenMask, Sgd, leaving_out
from mpips.planning.job import Job
from mpips.planning.outcome import Outcome, skipped_updates
from mpips.problems.accumulate import Tasks
from mpips.ps.assemble import WorkerHalf
from mpips.ps.steps import Steps
from mpips.snapshot.worker_state import replica_names, saved_numbers
from mpips.strategies import async_sgd
from mpips.strategies.replica import Replica

if TYPE_CHECKING:
    from mpips.session.metrics import Log

_elastic = dense(elastic)
BETA = 0.9  # beta of the paper: the sum of the elastic rates of all workers
SKIPPED = "skipped "  # and an array's name: saved number of a replica's updates that left it out


def run(job: Job, log: "Log") -> Tasks[Outcome]:
    """Train by elastic averaging. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    return async_sgd.run(job, log, (Sgd(), lambda version: -1.0), ElasticSteps)


class ElasticSteps(Steps):
    """Trains the worker's own replica, and exchanges it with the centre."""

    def __init__(self, job: Job, half: WorkerHalf) -> None:
        super().__init__(job, half)
        size, saved = job.layout.size, saved_numbers(job)
        self._skipped = {k[len(SKIPPED) :]: n for k, n in saved.items() if k.startswith(SKIPPED)}
        ranges = job.layout.slices()
        before = {ranges[name]: n for name, n in self._skipped.items()}
        job.leaving = FrozenMask(leaving_out(job.rule, (), before))
        self._centre = half.replicas[0] if half.replicas else np.zeros(size, job.dtype)
        vectors = [aligned_zeros(size, job.dtype) for _ in range(1 + len(job.rule.slots))]
        self._own = Replica(job, vectors[0], tuple(vectors[1:]))
        given, workers = job.config.elastic_rate, len(job.cluster.roles.workers)
        self._elastic_rate = BETA / workers if given is None else given
        self._rate = job.rate()
        self._number = saved.get("steps", 0)
        self.versions[:] = saved.get("version", 0)

    @property
    def replica(self) -> np.ndarray:
        """See `Steps.replica`: the centre of the last pull."""
        return self._centre

    def state(self) -> dict[str, Pieces]:
        """See `Steps.state`."""
        vectors = (self._own.params, *self._own.slots)
        return {k: [(0, v)] for k, v in zip(replica_names(self.job), vectors, strict=True)}

    def numbers(self) -> tuple[int, dict[str, int]]:
        """See `Steps.numbers`."""
        saved = {"steps": self._number, "version": int(self.versions.max())}
        now = skipped_updates(self.job, self.job.leaving.skipped)
        for name in {**self._skipped, **now}:
            saved[SKIPPED + name] = self._skipped.get(name, 0) + now.get(name, 0)
        return self.half.sender.seq, saved

    def local(self, batch: Range) -> list[Range]:
        """See `Steps.local`."""
        return pieces(batch, self.job.config.step_size)

    def compute(self, batch: Range, batches: Iterator[Batch]) -> Tasks[float]:
        """Make the local steps of an assigned range of samples; see `Steps.compute`.

        The mean loss is not finite if the loss of any step is not.
        """
        if not self._number:
            self._pull()
            np.copyto(self._own.params, self._centre)
        busy = self._own.busy_s
        status_board.set_phase(status_board.COMPUTING, time.perf_counter())
        with self.background or nullcontext():  # this rank may forward pushes of its node meanwhile
            loss = yield from self._train(batch, batches)
        self.times.compute_s += self._own.busy_s - busy
        return loss

    def _train(self, batch: Range, batches: Iterator[Batch]) -> Tasks[float]:
        total, lr = 0.0, self._rate(int(self.versions.max()) + 1)
        for step in self.local(batch):
            count, samples = len(pieces(step, self.job.config.batch_size)), step[2] - step[1]
            self._number += 1
            these = itertools.islice(batches, count)
            loss = yield from self._own.step(these, samples, self._number, lr)
            total += loss * samples
            self.times.steps += 1
            self.times.samples += samples
        return total / (batch[2] - batch[1])

    def push(self, batch: Range, loss: float, number: int) -> None:
        """Move the replica and the centre towards each other.

        Blocks: until local servers have applied the last push, and remote ones have been sent it.
        """
        times, half, sender = self.times, self.half, self.half.sender
        seq = sender.seq + 1
        times.wait_s += self.job.cluster.wait(lambda: half.writable(seq + 1), status_board.BUFFER)
        self._pull()
        start = time.perf_counter()
        status_board.set_phase(status_board.PUSHING, start)
        _elastic(self._own.params, self._centre, sender.buffer(seq), self._elastic_rate)
        sender.push(batch, batch[2] - batch[1], loss, self.versions, number)
        times.push_s += time.perf_counter() - start

    def _pull(self) -> None:
        start = time.perf_counter()
        status_board.set_phase(status_board.PULLING, start)
        self.versions[:] = self.half.puller.pull(self._centre)
        self.times.pull_s += time.perf_counter() - start
