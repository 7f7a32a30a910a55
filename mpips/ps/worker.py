"""The loop of an asynchronous worker: take a batch, pull, compute, push."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpips.cluster import signals
from mpips.cluster.world import Background
from mpips.cut.worker_state import SUMS, Keeper, keeper_of
from mpips.datasets import Batch
from mpips.datasets.ledger import Range
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.kernels.vectors import scale, sum_squares
from mpips.optim import clip_factor
from mpips.planning.job import Job
from mpips.problems.accumulate import Accumulator, submit, taken
from mpips.problems.evaluation import evaluate, next_evaluation
from mpips.ps.feed import Feed
from mpips.ps.store import Puller
from mpips.transport.channel import Sender

LONG_S = 1e-3  # a computation that is worth waking a thread for


@dataclass
class Times:
    """Where a worker's time went, in seconds, and what it did."""

    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    pull_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0


class AsyncWorker:
    """Computes gradients until the data is exhausted or the chief says stop.

    Args:
        replicas: Where the parameters go: one vector, two with ``prefetch`` and where servers
            need what a gradient was computed from; by default its own.
    """

    def __init__(
        self,
        job: Job,
        puller: Puller,
        sender: Sender,
        feed: Feed,
        replicas: Sequence[np.ndarray] = (),
    ) -> None:
        self._job, self._cluster = job, job.cluster
        self._puller, self._sender, self._feed = puller, sender, feed
        assert job.worker_id is not None, "a server does not work"
        self._worker: int = job.worker_id
        self._ahead = puller.looks_ahead and job.config.prefetch
        self._replicas = replicas or [
            np.zeros(job.layout.size, job.dtype) for _ in range(1 + self._ahead)
        ]
        self._params = [job.layout.views(r, writable=False) for r in self._replicas]
        self._keeps = job.staleness.origins  # replica seq % 2 stays as long as the push
        self._current = 0  # the replica in use
        self._ready = False  # whether it is whole before it is due
        self._background = Background(self._advance) if puller.looks_ahead else None
        self._versions = puller.versions.copy()
        self._grads = [job.layout.views(sender.buffer(k)) for k in range(2)]
        self._accumulator = Accumulator(job)
        self._queue: deque[Range] = deque()
        self._told_signal = self._stopping = self._failed = self._long = False
        self._next_eval: float | None = None
        self._batch_number = 0
        self.times = Times()
        self.reason: str | None = None
        self._keeper: Keeper | None = None  # of what is this worker's alone, if anything is

    def keep_state(self) -> None:
        """Go on with the state saved, where this worker has any of its own, and have it saved.

        Raises:
            UserError: If the checkpoint cannot be read.
        """
        self._keeper = keeper_of(self._job, self._own_state(), self._sender.hold, self._numbers)

    def _own_state(self) -> dict[str, list[tuple[int, np.ndarray]]]:
        """Return what is this worker's alone: pieces (begin, view) of vectors, by name."""
        return self._sender.state

    def _numbers(self) -> tuple[int, dict[str, int]]:
        """Return the number of pushes, and the numbers that go with its own state."""
        return self._sender.seq, {"packed": self._sender.packed, SUMS: 1}

    def work(self) -> str:
        """Step until there is nothing to do; returns why the run ended.

        Raises:
            UserError: If a batch cannot be read.
        """
        self._feed.open()
        with contextlib.ExitStack() as over:
            loader = over.enter_context(make_loader(self._job))
            if self._background is not None:
                over.callback(self._background.end)
            while self._has_batch(loader):
                batch = self._queue.popleft()
                bounded = self._puller.gate is not None
                self._batch_number = self._feed.numbers[0] if bounded else self._feed.take()
                steps = self._steps(batch)
                batches = itertools.chain(*(taken(self._job, loader, step) for step in steps))
                self.step(batch, next(batches), batches)
                if bounded:  # what waits behind a slow step would hold the others up
                    self._feed.take()
                if self._worker == 0:
                    self._evaluate_when_due(batch)
        self._finish()
        return self.reason or "end"

    def _attend(self) -> None:
        """Act on what has come: messages, signals."""
        for _, kind, payload in self._cluster.poll():
            self._handle(kind, payload)
        if not self._told_signal and (name := signals.received()):
            self._told_signal = True
            self._cluster.send(self._cluster.roles.chief, "stop", name)
        if self._keeper is not None:
            self._keeper.poll()

    def _handle(self, kind: str, payload: Any) -> None:
        if kind == "grant":
            self._feed.granted(payload)
        elif kind == "stop":
            self._stopping = True
        elif kind == "end":
            self.reason = payload
        elif self._keeper is None or not self._keeper.handle(kind, payload):
            raise AssertionError(f"unknown message {kind!r} to a worker")

    def _may_begin(self) -> bool:
        """Whether the next step may begin: no cut waits for this worker's state."""
        if self._keeper is None or self._keeper.between(sound=not self._failed):
            return True
        if self._puller.reading:  # a neighbour may wait for it
            self._puller.advance()
        return False

    def _may_push(self) -> bool:
        """Whether a push may be announced: no cut is under way. Gets on with all else."""
        if self._keeper is None or not self._keeper.holding:
            return True
        self._attend()
        self._sender.resting()
        if self._puller.reading:
            self._puller.advance()
        return not self._keeper.holding

    def _has_batch(self, loader: Loader) -> bool:
        """Wait until a batch is here (True) or none will come (False)."""

        def ready() -> bool:
            self._attend()
            self._sender.resting()
            for batch in self._feed.news():
                for step in self._steps(batch):
                    submit(self._job, loader, step)
                self._queue.append(batch)
            if not self._may_begin():
                return False
            if self._stopping or self._failed:
                return True
            return self._may_read() if self._queue else self._feed.exhausted

        pulled_s = self.times.pull_s
        waited_s = self._cluster.wait(ready) - (self.times.pull_s - pulled_s)
        self.times.wait_s += max(0.0, waited_s)  # a pull at once is no wait
        return bool(self._queue) and not self._stopping and not self._failed

    def _may_read(self) -> bool:
        """Whether the next read is here, or waits for nobody. Blocks: for near copies."""
        puller = self._puller
        if puller.gate is None or self._ready:
            return True
        if not puller.reading:
            if not self._writable(self._sender.seq + 1):
                return False
            self._begin(self._sender.seq + 1)
            puller.fetch()
        if not puller.ready():
            return False
        start = time.perf_counter()
        self._versions[:] = puller.finish()
        self.times.pull_s += time.perf_counter() - start
        self._ready = puller.usable
        return self._ready

    def _steps(self, batch: Range) -> list[Range]:
        """Return the local steps that are made of what is handed out at once."""
        return [batch]

    def step(self, batch: Range, data: Batch, rest: Iterable[Batch] = ()) -> None:
        """Pull, compute and push once. Blocks: until two pushes ago was applied everywhere.

        Args:
            batch: The samples of the step.
            data: The first of its batches, read before the parameters are pulled.
            rest: The others.
        """
        times, seq = self.times, self._sender.seq + 1
        times.wait_s += self._cluster.wait(lambda: self._writable(seq))
        start = time.perf_counter()
        self._read()
        pulled = time.perf_counter()
        loss = self._compute(seq, batch, itertools.chain((data,), rest))
        computed = time.perf_counter()
        times.compute_s += computed - pulled
        times.pull_s += pulled - start
        if not math.isfinite(loss):
            self._fail(loss, self._versions)
            return
        samples = batch[2] - batch[1]
        self._push(seq, batch, samples, loss)
        times.steps += 1
        times.samples += samples

    @property
    def replica(self) -> np.ndarray:
        """The newest replica, shape (n_params,)."""
        return self._replicas[self._current]

    def _read(self) -> None:
        """Have the replica in use whole, and `_versions` those that it holds."""
        puller = self._puller
        if self._ready:
            self._ready = False
            return
        if not puller.reading:
            self._begin(self._sender.seq + 1)
            puller.fetch()
        self._versions[:] = puller.finish()
        if self._ahead:
            puller.begin(self._replicas[1 - self._current])
            puller.fetch()

    def _begin(self, seq: int) -> None:
        """Begin to read what push `seq` will be computed from; its buffer is writable."""
        if self._keeps:
            self._current = seq % 2
        self._puller.begin(self.replica)

    def _compute(self, seq: int, batch: Range, batches: Iterator[Batch]) -> float:
        grad, params = self._sender.buffer(seq), self._params[self._current]
        args = params, batches, batch[2] - batch[1], self._grads[seq % 2], grad
        start = time.perf_counter()
        if self._background is not None and self._long and self._under_way():
            with self._background:
                loss = self._accumulator.gradient(*args)
        else:
            loss = self._accumulator.gradient(*args)
        self._long = time.perf_counter() - start > LONG_S
        if self._job.config.clip:
            scale(grad, clip_factor(sum_squares(grad), self._job.config.clip))
        return loss

    def _writable(self, seq: int) -> bool:
        """Whether the buffer of push `seq` may be written; a read gets on meanwhile."""
        if self._puller.reading:
            self._puller.advance()
        return self._sender.writable(seq)

    def _under_way(self) -> bool:
        """Whether anything is on its way from or to another node."""
        return not self._sender.resting() or self._puller.reading

    def _advance(self) -> None:
        """Get on with what is under way; called by a thread while the gradient is computed."""
        if self._puller.reading:
            self._puller.advance()
        self._sender.sent()

    def _push(self, seq: int, batch: Range, samples: int, loss: float) -> None:
        """Push, and where shards are far ask for those of the next step.

        They are asked for when the push before this one has left, so that a replica lacks one of
        this worker's own pushes at most, and in an order that keeps both directions of a link
        full: the versions before the push, whose body would be in the way, and the shards right
        behind its announcement, so that the body is let in before their bulk comes.
        """
        puller, times, versions = self._puller, self.times, self._versions.copy()
        times.wait_s += self._cluster.wait(self._may_push)
        ahead = puller.looks_ahead and puller.gate is None  # else the next batch is not known
        if ahead:
            times.wait_s += self._cluster.wait(lambda: self._writable(seq + 1))
            start = time.perf_counter()
            if self._ahead:
                self._versions[:] = puller.finish()
                self._ready = True
            self._begin(seq + 1)
            times.pull_s += time.perf_counter() - start
        start = time.perf_counter()
        self._sender.push(batch, samples, loss, versions, self._batch_number)
        times.push_s += time.perf_counter() - start
        if ahead:
            puller.fetch()
        if self._ahead:
            self._current = 1 - self._current

    def _fail(self, loss: float, versions: np.ndarray) -> None:
        """Report a loss that is not finite; its gradient is not pushed."""
        self._failed = True
        where = f"worker {self._worker}, its step {self._sender.seq + 1}"
        text = f"loss {loss} at step {int(versions[0])} ({where})"
        self._cluster.send(self._cluster.roles.chief, "diverged", text)

    def _evaluate_when_due(self, batch: Range) -> None:
        """Evaluate the last replica pulled, each time that `eval_every` epochs have gone by."""
        every, info = self._job.config.eval_every, self._job.info
        epoch = batch[0] + batch[2] / info.n_train
        if self._next_eval is None:  # the first batch says where a resumed run is
            self._next_eval = next_evaluation(batch[0] + batch[1] / info.n_train, every)
        if not info.n_test or epoch < self._next_eval:
            return
        self._next_eval = next_evaluation(epoch, every)
        if self._puller.reading and not self._ready:
            self._cluster.wait(self._may_read)
        if self._puller.reading and not self._ready:
            self._read()
            self._ready = True
        sums = evaluate(self._job, self._params[self._current], 0, info.n_test)
        means = {name: value / info.n_test for name, value in sums.items()}
        step = int(self._versions[0])
        payload = {"step": step, "epoch": round(epoch, 4), **means}
        self._cluster.send(self._cluster.roles.chief, "eval", payload)

    def _finish(self) -> None:
        """Say how many pushes were sent, and wait until all are applied and the run is saved."""
        self._puller.abandon()
        for rank in self._cluster.roles.servers:
            self._cluster.send(rank, "fin", self._sender.seq)

        def ended() -> bool:
            self._attend()
            self._may_begin()
            sent = self._sender.sent()  # of its neighbours too, so that it gets on in any case
            return sent and self.reason is not None

        self.times.wait_s += self._cluster.wait(ended)


def make_loader(job: Job) -> Loader:
    """Return the reader of a worker's batches, in the run's order."""
    assert job.dataset is not None, "servers read no data"
    c, source = job.config, job.dataset.train
    size = 1 if job.block else c.batch_size
    order = Order(source.n, size, job.block, c.seed, shuffle=c.shuffle)
    return Loader(source, order, job.dtype)
