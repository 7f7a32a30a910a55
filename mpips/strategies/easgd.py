"""Elastic averaging SGD: replicas that train by themselves, drawn to a centre at the servers.

Each worker makes tau steps on its own replica x with the job's rule, and then exchanges: it pulls
the centre c, computes ``d = a (x - c)`` from the old values of both, goes back by it, ``x -= d``,
and pushes it; the servers add it, ``c += d``. So replicas may differ, as far as the elastic rate
a lets them, and explore; the model that is evaluated and saved is the centre. With p workers the
paper takes ``a = 0.9 / p``, the default. With a momentum rule on the replicas it is EAMSGD.

It runs on the machinery of `async_sgd`: nobody waits for another, a push is the exchange of one
worker, versions and staleness count exchanges, the rate of a local step is that of the centre's
next version. A worker pulls after its own last push was applied where servers are near, or has
left where they are far. The gradient after an exchange is taken at the new x (the paper's
algorithm takes it at the x before). A replica and its slots are its worker's alone, and are saved;
in a run resumed by another number of workers they begin at the centre and at zero.

References: Zhang, Choromanska and LeCun, NeurIPS 2015, algorithm 1.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpips.cut.worker_state import replica_names, saved_numbers
from mpips.datasets import Batch
from mpips.datasets.ledger import Range, pieces
from mpips.kernels.update_rules import elastic
from mpips.optim import Sgd
from mpips.planning.job import Job
from mpips.ps.feed import Feed
from mpips.ps.store import Puller
from mpips.ps.worker import AsyncWorker
from mpips.strategies import Outcome, async_sgd
from mpips.strategies.replica import Replica
from mpips.transport.channel import Sender

if TYPE_CHECKING:
    from mpips.session.metrics import Log

BETA = 0.9  # of the paper: the elastic rates of all workers together


def run(job: Job, log: "Log") -> Outcome:
    """Train by elastic averaging. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    return async_sgd.run(job, log, (Sgd(), lambda version: -1.0), ElasticWorker)


class ElasticWorker(AsyncWorker):
    """Trains its own replica, and exchanges with the centre, which is its `replica` as pulled."""

    def __init__(
        self,
        job: Job,
        puller: Puller,
        sender: Sender,
        feed: Feed,
        replicas: Sequence[np.ndarray] = (),
    ) -> None:
        super().__init__(job, puller, sender, feed, replicas)
        vectors = [np.zeros(job.layout.size, job.dtype) for _ in range(1 + len(job.rule.slots))]
        self._own = Replica(job, vectors[0], tuple(vectors[1:]))
        given, workers = job.config.elastic_rate, len(job.cluster.roles.workers)
        self._elastic_rate = BETA / workers if given is None else given
        self._rate, saved = job.rate(), saved_numbers(job)
        self._number = saved.get("steps", 0)
        self._versions[:] = saved.get("version", 0)

    def _own_state(self) -> dict[str, list[tuple[int, np.ndarray]]]:
        vectors = (self._own.params, *self._own.slots)
        return {k: [(0, v)] for k, v in zip(replica_names(self._job), vectors, strict=True)}

    def _numbers(self) -> tuple[int, dict[str, int]]:
        saved = {"steps": self._number, "version": int(self._versions.max())}
        return self._sender.seq, saved

    def _steps(self, batch: Range) -> list[Range]:
        return pieces(batch, self._job.config.step_size)

    def step(self, batch: Range, data: Batch, rest: Iterable[Batch] = ()) -> None:
        """Make the local steps of what was handed out, and exchange once.

        Blocks: until the push before was applied by the near servers and has left to the others.
        """
        if not self._number:
            self._pull()
            np.copyto(self._own.params, self.replica)
        busy = self._own.busy_s
        if self._background is not None:  # neighbours' pushes may come to be carried
            with self._background:
                loss = self._train(batch, itertools.chain((data,), rest))
        else:
            loss = self._train(batch, itertools.chain((data,), rest))
        self.times.compute_s += self._own.busy_s - busy
        if math.isfinite(loss):
            self._exchange(batch, loss)
        else:
            self._fail(loss, self._versions)

    def _train(self, batch: Range, batches: Iterator[Batch]) -> float:
        """Make the local steps; returns the mean loss, not finite if that of any step is not."""
        total, lr = 0.0, self._rate(int(self._versions.max()) + 1)
        for step in self._steps(batch):
            count, samples = len(pieces(step, self._job.config.batch_size)), step[2] - step[1]
            self._number += 1
            loss = self._own.step(itertools.islice(batches, count), samples, self._number, lr)
            total += loss * samples
            self.times.steps += 1
            self.times.samples += samples
        return total / (batch[2] - batch[1])

    def _exchange(self, batch: Range, loss: float) -> None:
        """Move the replica and the centre towards each other."""
        times, seq = self.times, self._sender.seq + 1
        times.wait_s += self._cluster.wait(self._may_push)
        times.wait_s += self._cluster.wait(lambda: self._writable(seq + 1))
        self._pull()
        start = time.perf_counter()
        change = self._sender.buffer(seq)
        elastic(self._own.params, self.replica, change, self._elastic_rate)
        self._sender.push(batch, batch[2] - batch[1], loss, self._versions, self._batch_number)
        times.push_s += time.perf_counter() - start

    def _pull(self) -> None:
        start = time.perf_counter()
        self._versions[:] = self._puller.pull(self.replica)
        self.times.pull_s += time.perf_counter() - start
