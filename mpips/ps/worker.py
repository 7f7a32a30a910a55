"""Loop of an asynchronous worker.

The worker takes a batch from its queue and makes a step with it. While it waits, it handles
messages and signals, and advances its pushes and reads.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable

from mpips.datasets import Batch
from mpips.datasets.ledger import Range
from mpips.datasets.loader import Loader
from mpips.health import status_board
from mpips.mpi import signals
from mpips.mpi.collectives import Handler
from mpips.mpi.world import Cluster
from mpips.optim import Ranges
from mpips.planning.job import STOPPED, Job
from mpips.problems.accumulate import (
    BatchNotPushed,
    Tasks,
    ask_early,
    make_loader,
    submit,
    taken,
    units_ahead,
)
from mpips.problems.evaluation import evaluate, next_evaluation
from mpips.ps.assemble import WorkerHalf
from mpips.ps.dispatch import Grant
from mpips.ps.steps import Steps
from mpips.snapshot.worker_state import keeper_of


class AsyncWorker:
    """Worker that makes steps until the data is exhausted or the coordinator ends the run.

    If the mode has worker state, a resumed run loads this state from the checkpoint.

    Args:
        job: The run.
        half: This worker's half of the store.
        steps: The mode's step.

    Raises:
        UserError: If the checkpoint cannot be read.
    """

    def __init__(self, job: Job, half: WorkerHalf, steps: Steps) -> None:
        assert job.worker_id is not None, "a server does not work"
        self._job, self._cluster, self._half, self._steps = job, job.cluster, half, steps
        self._batch_queue = half.batch_queue
        self._queue: deque[Range] = deque()
        self._reported_signal = self._stopping = False
        self._failed = ""  # message about a loss that is not finite
        self._freezing = Freezing(job.cluster)
        self._evaluation: _Evaluation | None = None  # on the first worker that has not died
        self.times, job.versions = steps.times, steps.versions
        job.heard_stop = self._heard_stop
        self.reason: str | None = None
        # Saves the state of this worker; None if the mode has no worker state.
        self._keeper = keeper_of(job, steps.state(), half.sender.push_sender.hold, steps.numbers)
        self._on: dict[str, Handler] = {
            "grant": self._granted,
            "stop": self._stopped,
            "end": self._ended,
            "noted": self._freezing.noted,
            **half.handlers,
        }
        if self._keeper is not None:
            self._on |= self._keeper.handlers
        if job.cluster.failures.on:
            self._on["lost"] = self._lose

    def work(self) -> Tasks[str]:
        """Make steps until the run ends; return the reason.

        Raises:
            UserError: If a batch cannot be read, or if a rank dies that the run needs.
        """
        if self._cluster.failures.on:
            from mpips.failover.policy import groups, survivable

            self._cluster.failures.spare(survivable(self._job), groups(self._job))
        if self._half.handlers:  # a server that this rank waits for may wait for its resending
            self._cluster.serving = self._attend
        self._take_evaluation()
        bounded = self._half.puller.controller is not None
        # With a staleness bound, a batch counts as taken only after its step.
        self._batch_queue.open(units_ahead(self._job) + bounded)
        with contextlib.ExitStack() as over:
            loader = over.enter_context(make_loader(self._job))
            if self._steps.background is not None:
                over.callback(self._steps.background.end)
            while self._has_batch(loader):
                batch = self._queue.popleft()
                number = self._batch_queue.numbers[0] if bounded else self._batch_queue.take()
                steps = self._steps.local(batch)
                status_board.set_phase(status_board.READING, time.perf_counter())
                batches = itertools.chain(*(taken(self._job, loader, step) for step in steps))
                yield from self.step(batch, next(batches), batches, number)
                if bounded:  # earlier, batches behind a slow step would delay other workers
                    self._batch_queue.take()
                if self._evaluation is not None:
                    self._evaluation.make_when_due(batch)
        self._finish()
        self._cluster.serving = None
        self._on.clear()  # its bound methods keep this object alive
        self._job.heard_stop = bool
        return self.reason or "end"

    def _take_evaluation(self) -> None:
        """Evaluate from now on, if the job evaluates and this is the first worker alive."""
        c, ranks = self._job.config, self._cluster
        first = next(r for r in ranks.roles.workers if r not in ranks.failures.lost)
        evaluates = c.eval_every and self._job.info.n_test and not c.evaluators
        if evaluates and ranks.rank == first and self._evaluation is None:
            self._evaluation = _Evaluation(self._job, self._steps)

    def step(
        self, batch: Range, data: Batch, rest: Iterable[Batch] = (), number: int = 0
    ) -> Tasks[None]:
        """Make one step: pull, compute, push.

        Args:
            batch: Samples of the step.
            data: First batch of data, which is read before the parameters are pulled.
            rest: The further batches of data.
            number: Number of the batch, in the order in which batches are assigned.
        """
        try:
            loss = yield from self._steps.compute(batch, itertools.chain((data,), rest))
        except BatchNotPushed:
            self._stopping = True  # a resumed run assigns the batch again
            return
        if not math.isfinite(loss):
            self._fail(loss)
            return
        if self._keeper is not None:
            self.times.wait_s += self._keeper.wait_to_push(self._advance_others)
        if self._steps.told and self._job.frozen != self._freezing.frozen:
            seq = self._half.sender.seq + 1
            self.times.wait_s += self._freezing.tell(seq, self._job.frozen, self._advance_others)
        self._steps.push(batch, loss, number)
        status_board.report(status_board.CLOCK, self._half.sender.seq)
        status_board.set_phase(status_board.BETWEEN, time.perf_counter())
        yield None

    def _attend(self) -> None:
        """Handle messages and signals that have arrived. Blocks: no."""
        for source, kind, payload in self._cluster.poll():
            self._on[kind](source, payload)
        self._stopping |= self._job.stopping
        name = signals.received() or (STOPPED if self._job.stopping else None)
        if name is not None and not self._reported_signal:
            self._reported_signal = True
            self._cluster.send(self._cluster.roles.coordinator, "stop", name)
        if self._keeper is not None:
            self._keeper.poll()

    def _heard_stop(self) -> bool:
        """See `mpips.planning.job.Job`."""
        thread = self._steps.background
        with contextlib.nullcontext() if thread is None else thread.paused():
            self._attend()
        return self._stopping

    def _granted(self, source: int, grant: Grant) -> None:
        # The successor of a dead coordinator assigns again the batches that were on their way.
        if source == self._cluster.roles.coordinator:
            self._batch_queue.granted(grant)

    def _stopped(self, _: int, __: None) -> None:
        self._stopping = True

    def _ended(self, source: int, payload: tuple[str, list[int]]) -> None:
        self.reason, lost = payload
        self._cluster.failures.leave_out(lost)
        self._cluster.roles = dataclasses.replace(self._cluster.roles, successor=source)

    def _lose(self, rank: int, _: None) -> None:
        """Continue without a rank that has died.

        If it was the coordinator, repeat messages to its successor that may have been lost.
        """
        self._freezing.noted(rank)
        self._take_evaluation()
        if rank == self._cluster.roles.coordinator:
            from mpips.failover.policy import follow_successor

            successor = follow_successor(self._job)
            self._reported_signal = False
            self._batch_queue.follow(successor)
            if self._failed:
                self._cluster.send(successor, "diverged", self._failed)

    def _may_begin(self) -> bool:
        """Return whether no snapshot waits for this worker's state between two steps."""
        if self._keeper is None or self._keeper.between(sound=not self._failed):
            return True
        if self._half.puller.reading:  # another worker of the node may wait for this read
            self._half.puller.advance()
        return False

    def _advance_others(self) -> None:
        """Advance messages, pushes and reads, while no step is made. Blocks: no."""
        self._attend()
        self._half.sender.push_sender.resting()
        if self._half.puller.reading:
            self._half.puller.advance()

    def _has_batch(self, loader: Loader) -> bool:
        """Wait for the next batch; return False if no step is to be made any more."""
        steps, batch_queue, asked = self._steps, self._batch_queue, False
        bounded = self._half.puller.controller is not None

        def ready() -> bool:
            nonlocal asked
            self._attend()
            self._half.sender.push_sender.resting()
            for batch in batch_queue.news():
                for step in steps.local(batch):
                    submit(self._job, loader, step)
                self._queue.append(batch)
            if not self._may_begin():
                return False
            if self._stopping or bool(self._failed):
                return True
            if not self._queue:
                return batch_queue.exhausted
            if not bounded:
                return True
            status_board.waits_for(status_board.CLOCKS)
            if steps.may_read():
                return True
            asked = asked or ask_early(self._job, loader)
            return False

        pulled_s = self.times.pull_s
        waited_s = self._cluster.wait(ready, status_board.BATCH) - (self.times.pull_s - pulled_s)
        self.times.wait_s += max(0.0, waited_s)  # the time of a pull counts as pulling
        return bool(self._queue) and not self._stopping and not self._failed

    def _fail(self, loss: float) -> None:
        """Report a loss that is not finite to the coordinator; its gradient is not pushed."""
        where = f"worker {self._job.worker_id}, its step {self._half.sender.seq + 1}"
        self._failed = f"loss {loss} at step {int(self._steps.versions[0])} ({where})"
        self._cluster.send(self._cluster.roles.coordinator, "diverged", self._failed)

    def _finish(self) -> None:
        """Tell all servers the number of pushes, and wait for the end of the run."""
        self._half.abandon()
        self._cluster.send(self._cluster.roles.servers, "fin", self._half.sender.seq)

        def ended() -> bool:
            self._attend()
            self._may_begin()
            # Called in any case: a node aggregator sends for other workers too.
            sent = self._half.sender.push_sender.sent()
            return sent and self.reason is not None

        self.times.wait_s += self._cluster.wait(ended, status_board.END)


class Freezing:
    """Announcement of frozen arrays to the servers. Collective: no.

    A server must not update the arrays that the worker's program has frozen, and a push does not
    list them. When they change, the worker sends them to every server, with the number of the
    first push to which they apply. It announces this push after all servers have answered. A
    server answers at any time, so the worker waits for no other worker.

    Args:
        cluster: The job's ranks.

    Attributes:
        frozen: Ranges of the arrays that were announced last.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.frozen: Ranges = ()
        self._missing: set[int] = set()  # servers that have not answered yet

    def tell(self, first: int, frozen: Ranges, advance: Callable[[], object]) -> float:
        """Send the frozen arrays to every server.

        Args:
            first: Number of the first push to which they apply.
            frozen: Ranges of the arrays.
            advance: Function that advances messages, pushes and reads, called repeatedly.

        Returns:
            Seconds waited.

        Blocks: until all servers have answered.
        """
        self.frozen = frozen
        self._missing = set(self._cluster.roles.servers) - self._cluster.failures.lost
        self._cluster.send(self._missing, "frozen", (first, frozen))

        def told() -> bool:
            advance()
            return not self._missing

        return self._cluster.wait(told)

    def noted(self, source: int, _: None = None) -> None:
        """Note that a server has answered, or has died."""
        self._missing.discard(source)


class _Evaluation:
    """Evaluation of the last replica pulled, every ``eval_every`` epochs."""

    def __init__(self, job: Job, steps: Steps) -> None:
        self._job, self._steps = job, steps
        self._next: float | None = None  # next epoch to evaluate at; the first batch sets it

    def make_when_due(self, batch: Range) -> None:
        """Evaluate after the step of a batch if due, and send the means to the coordinator."""
        job, every, info = self._job, self._job.config.eval_every, self._job.info
        epoch = batch[0] + batch[2] / info.n_train
        if self._next is None:
            self._next = next_evaluation(batch[0] + batch[1] / info.n_train, every)
        if epoch < self._next:
            return
        self._next = next_evaluation(epoch, every)
        status_board.set_phase(status_board.EVALUATING, time.perf_counter())
        self._steps.read_whole()
        sums = evaluate(job, job.layout.views(self._steps.replica, writable=False), 0, info.n_test)
        means = {name: value / info.n_test for name, value in sums.items()}
        payload = {"step": int(self._steps.versions[0]), "epoch": round(epoch, 4), **means}
        job.cluster.send(job.cluster.roles.coordinator, "eval", payload)
