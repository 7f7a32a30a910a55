"""Epochs of a training loop: a worker's passes over its batches."""

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpips.datasets import Batch
from mpips.datasets.ledger import epochs_over, part
from mpips.errors import UserError
from mpips.library.data import Samples
from mpips.problems.accumulate import Task, Tasks

if TYPE_CHECKING:
    from mpips.library.start import Start
    from mpips.session.training import Ended

T = TypeVar("T")


class Loader(Generic[T]):
    """A worker's batches: an iterable with a length, as a DataLoader of PyTorch.

    Within `Passes.epochs` a pass yields this worker's batches of one epoch. Without `epochs` there
    is a single pass, over this worker's batches of the whole run.

    Args:
        passes: Worker whose passes are made over this loader.
        make: Returns the samples.
        count: Returns the number of samples.
        view: Converts a batch to the object that the program's loop gets.
        batch_size: Samples in a batch; None for the run's option.
        epochs: Epochs of the run; None for the run's option.
        dataset: The program's data, as given.
    """

    def __init__(
        self,
        passes: "Passes",
        make: Callable[[], Samples],
        count: Callable[[], int],
        view: Callable[[Batch], T],
        batch_size: int | None,
        epochs: int | None,
        dataset: Any,
    ) -> None:
        self.make, self.batch_size, self.epochs = make, batch_size, epochs
        self.dataset = dataset
        self._passes, self._count, self._view = passes, count, view

    def __len__(self) -> int:
        """Return the number of this worker's batches in an epoch.

        It is exact in mode sync. In mode local_sgd a round may divide an epoch into more, smaller
        batches. In the other modes servers assign batches to workers on demand: it is this worker's
        share if all workers are equally fast.
        """
        return self._passes._batches_an_epoch(self._count(), self.batch_size)

    def __iter__(self) -> Iterator[T]:
        """Yield the batches of a pass.

        Raises:
            UserError: If this pass was made before; if a batch was not pushed.
        """
        return map(self._view, self._passes._batches(self))


class Passes:
    """A worker's passes over its batches. The worker pushes each batch before it takes the next.

    Args:
        start: The run before its first step.

    Attributes:
        id: This worker's number, from 0.
        workers: Number of workers.
        ended: End of the run; None before.
        batches_by: Name of the method that makes the loader, for messages.
        unpushed: Remedy in the message about a batch that was not pushed.
    """

    batches_by = "worker.batches"
    unpushed = "for steps of k batches give the run accumulate=k, and push each of them"

    def __init__(self, start: "Start") -> None:
        roles = start.ranks.roles
        self._start, self.workers = start, len(roles.workers)
        self.id = roles.workers.index(start.ranks.rank)
        self.ended: Ended | None = None
        self._run_loader: Loader[Any] | None = None
        self._tasks: Tasks[Ended] | None = None
        self._task: Task | None = None  # the batch that the program has taken, and not pushed yet
        self._next: Task | None = None  # the batch after it, which has arrived already
        self._last: Task | None = None  # the batch that was taken last
        self._loop_ended = False  # whether the loop has found no batch left
        self._epoch: int | None = None  # the epoch that `epochs` has yielded
        self._passed = True  # whether the pass of that epoch has ended

    @property
    def epoch(self) -> int:
        """Epoch of the pass of `epochs`, or else of the batch that was taken last, from 0.

        Raises:
            UserError: Before the loop over the batches, and after it.
        """
        if self._epoch is not None:
            return self._epoch
        if self._last is None:
            raise UserError("epoch outside the loop over the batches", "its use in it")
        return self._last.batch.epoch

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the run's epochs, each for one pass over the loader.

            batches = worker.batches(data, batch_size=64)  # worker.loader() in PyTorch
            for epoch in worker.epochs(20):
                for batch in batches:
                    ...
                print(epoch, worker.evaluate(metrics, test))

        A resumed run begins in the epoch in which it was stopped, with the rest of its batches. The
        code after the pass runs on every worker once an epoch. It runs even if other workers have
        computed all batches of the epoch, and also in an epoch in which the run is stopped. The
        parameters there are those of this worker's next step. In mode ssp, do not wait for other
        workers there: this worker already holds a batch, and they may wait for its push.

        Args:
            count: Epochs of the run, with those before a resume; by default those of the loader,
                or else the option ``epochs``.

        Yields:
            Numbers of epochs, from 0.

        Raises:
            UserError: If no loader was made, or it has another number of epochs; if the loop has
                begun; if an epoch ends before its pass.

        Collective: over the workers, in its first step. Blocks: until a batch arrives.
        """
        if self._run_loader is None:
            remedy = f"write loader = {self.batches_by}(...) before it"
            raise UserError(
                "epochs() without a loader", "one that its passes are made over", remedy
            )
        of_loader = self._run_loader.epochs
        if None not in (count, of_loader) and count != of_loader:
            got = f"epochs({count}) over a loader with epochs={of_loader}"
            raise UserError(got, "one number of epochs", f"leave it out of {self.batches_by}")
        self._begin(self._run_loader, of_loader if count is None else count)
        self._fetch()
        job = self._start.job
        epoch = epochs_over(job.allocator())
        try:
            while self._continues(epoch):
                self._epoch, self._passed = epoch, False
                yield epoch
                if not job.stopping and not self.passed:
                    got = f"epoch {epoch} that ended before all of its batches were taken"
                    remedy = "iterate the loader to its end, or call worker.stop() to end the run"
                    raise UserError(got, "one whole pass over the loader in each epoch", remedy)
                epoch += 1
        finally:
            self._epoch = None
        if job.stopping and not job.config.in_rounds:  # the loops of other workers end too
            self._drain()
        self._loop_ended = self.ended is not None

    @property
    def passed(self) -> bool:
        """Whether the current pass of `epochs` has no batch left for this worker.

        Blocks: between a push and the next batch, until that batch arrives.
        """
        if self._passed or self._task is not None or self._epoch is None:
            return self._passed
        task = self._fetch()
        return task is None or task.batch.epoch > self._epoch

    def _continues(self, epoch: int) -> bool:
        """Return whether this worker's loop continues; a stop in rounds needs one more push."""
        if self._start.job.stopping and not self._start.config.in_rounds:
            return False
        return self.ended is None or epoch < math.ceil(self.ended.summary["epochs"])

    def _use(self, loader: Loader[T]) -> Loader[T]:
        """Make a loader the one that the run's passes are made over, and return it.

        Raises:
            UserError: If the run has another loader.
        """
        if self._run_loader is not None:
            raise _second_loop(self.batches_by)
        self._run_loader = loader
        return loader

    def _batches_an_epoch(self, samples: int, batch_size: int | None) -> int:
        config = self._start.config
        size = batch_size or config.batch_size
        if not config.in_rounds:
            return math.ceil(samples / size / self.workers)
        round_size = size * config.accumulate * self.workers
        rounds, rest = divmod(samples, round_size)
        _, begin, end = part((0, 0, rest), self.id, self.workers)
        return rounds * config.accumulate + math.ceil((end - begin) / size)

    def _begin(self, loader: Loader[Any], epochs: int | None) -> None:
        """Begin the training with the samples of a loader.

        Raises:
            UserError: If the training has begun.
        """
        if self._tasks is not None:
            raise _second_loop(self.batches_by)
        self._tasks = self._start.tasks(loader.make, loader.batch_size, epochs)
        self._start.board.callback(self._tasks.close)  # an exception of the program leaves it open

    def _batches(self, loader: Loader[Any]) -> Iterator[Batch]:
        """Yield this worker's batches of the current epoch, or without `epochs` of the run.

        Raises:
            UserError: If the data or a number is invalid; if the pass was made before; if a batch
                was not pushed.

        Collective: over the workers, in its first step.
        """
        epoch = self._epoch
        if epoch is None:
            self._begin(loader, loader.epochs)
        elif self._passed or loader is not self._run_loader:
            got = f"a second pass in epoch {epoch}, which would count its batches twice"
            raise UserError(got, "one pass over one loader in each epoch")
        if self._next is not None:  # the time of the code after the last pass is not computing time
            self._next.taken = time.perf_counter()
        while (task := self._take(epoch)) is not None:
            yield task.batch
        self._passed = True

    def _current_task(self, what: str) -> Task:
        if self._task is None:
            expected = "a batch in work: from when it is taken until it is pushed"
            remedy = f"take batches from {self.batches_by}, and push each of them once"
            raise UserError(f"{what} without a batch", expected, remedy)
        return self._task

    def _take(self, epoch: int | None = None) -> Task | None:
        """Take the next batch and return it; None at the end of the run, or of an epoch.

        Raises:
            UserError: If the last batch was not pushed, and this worker has not called `stop`.
        """
        if self._task is not None:
            if not self._start.job.stopping:
                got = f"a batch of {len(self._task.batch)} samples that was taken and not pushed"
                raise UserError(got, "a push of each batch before the next is taken", self.unpushed)
            self._task.left, self._task = True, None
        task = self._fetch()
        if task is not None and epoch is not None and task.batch.epoch > epoch:
            return None
        self._task = self._last = task  # None at the end, which frees the memory of its arrays
        self._next, self._loop_ended = None, task is None and epoch is None
        return task

    def _fetch(self) -> Task | None:
        """Wait for the next batch and return it, without taking it; None at the end of the run."""
        while self._next is None and self.ended is None:
            self._next = self._advance()
        return self._next

    def _drain(self) -> None:
        """Go to the end of a stopped run, without computing this worker's remaining batches."""
        self._next, self._task = self._task or self._next, None
        while self.ended is None:
            if self._next is not None:
                self._skip(self._next)
            self._next = self._advance()

    def _skip(self, task: Task) -> None:
        """Leave a batch uncomputed; the resumed run computes it."""
        task.left = True

    def _advance(self) -> Task | None:
        """Continue to the next batch and return it; None after a pushed step, or at the end."""
        assert self._tasks is not None, "the loop has begun"
        try:
            return next(self._tasks)
        except StopIteration as end:
            self.ended = end.value
            return None


def _second_loop(batches_by: str) -> UserError:
    remedy = f"make one pass in each epoch of worker.epochs() over one {batches_by}"
    return UserError("a second loop over batches", "one in a run", remedy)
