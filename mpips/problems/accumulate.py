"""Gradient tasks: the gradient of a step, batch by batch.

The training loops of all modes are generators of tasks. A loop yields a task, and continues when
its gradient is computed. A problem computes it (`follow`), or a loop in the user's program
(`mpips.library`).
"""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from mpips.config.delay import linger
from mpips.datasets.ledger import Range, pieces
from mpips.datasets.loader import Loader, augment_of
from mpips.datasets.order import Order
from mpips.errors import UserError
from mpips.kernels.vectors import add_scaled
from mpips.problems.base import Problem
from mpips.problems.evaluation import Arrays, check_written, checked_loss, try_evaluation
from mpips.problems.rows import Rows, uses_rows, wanted_rows

if TYPE_CHECKING:
    from mpips.datasets import Batch
    from mpips.planning.job import Job

T = TypeVar("T")


class BatchNotPushed(UserError):
    """Raised if the user's program took a batch, but did not push its gradient.

    In asynchronous modes, only the loop of this worker ends. In modes of rounds it is an error.
    """

    def __init__(self) -> None:
        got = "a batch that was taken and not pushed, in a mode of rounds"
        remedy = "go on to the end of the loop, which comes soon after worker.stop()"
        super().__init__(got, "a push", remedy)


@dataclass(slots=True, eq=False)
class Task:
    """Request for the gradient of a batch. The caller writes `out`, sets `loss`, and continues.

    Attributes:
        params: The parameters, by name; not written.
        batch: The samples; not written.
        out: Arrays shaped as `params`; each is overwritten with the gradient of the mean loss.
        rows: Reads and pushes rows of tables; None without tables.
        loss: The mean loss over the batch; set by the caller.
        left: Whether the user's program took the batch, but did not push; set by the caller.
        last: Whether it is the last batch of its step.
        taken: Time when the user's program returned to its loop and took the batch, by
            `time.perf_counter`; 0 for a problem.
    """

    params: Arrays
    batch: "Batch"
    out: Arrays
    rows: Rows | None = None
    loss: Any = None
    left: bool = False
    last: bool = True
    taken: float = 0.0


# Yields the tasks, and None after each step that was pushed.
Tasks: TypeAlias = Generator[Task | None, None, T]


def follow(problem: Problem | None, tasks: Tasks[T]) -> T:
    """Compute all tasks by a problem.

    Args:
        problem: The problem; None on servers, which compute no gradient.
        tasks: The tasks.

    Returns:
        The result of `tasks`.
    """
    computes: Any = problem
    by_rows = uses_rows(problem)
    while True:
        try:
            task = next(tasks)
        except StopIteration as end:
            return end.value
        if task is None:
            continue
        if by_rows:
            task.loss = computes.loss_and_grad_rows(task.params, task.rows, task.batch, task.out)
        else:
            task.loss = computes.loss_and_grad(task.params, task.batch, task.out)


class Accumulator:
    """Computes the gradient of a step, the mean over the samples of all its batches.

    Equation: ``g = sum_i (n_i / n) g_i``, which is the gradient of one batch of all n samples. From
    the first step with several batches on, it uses one more vector of the model's size.

    Attributes:
        compute_s: Seconds of computing and adding gradients. Reading does not count, nor the time
            before the user's program returned to its loop, such as after an epoch.
    """

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._other, self._views = np.zeros(0, job.dtype), dict[str, np.ndarray]()
        self._checked = False
        self.compute_s = 0.0

    def gradient(
        self, params: Arrays, batches: "Iterable[Batch]", samples: int, out: Arrays,
        flat: np.ndarray,
    ) -> Tasks[float]:  # fmt: skip
        """Compute the gradient of a step. A worker of ``--inject-delay`` waits after each batch.

        Args:
            params: The parameters that the gradient is computed from.
            batches: The step's batches; one is in memory at a time.
            samples: Number of samples in all batches.
            out: Gets the gradient; views of `flat`.
            flat: The gradient as a vector, shape (n_params,).

        Returns:
            The mean loss over the samples; not finite if the loss of any batch is not.

        Raises:
            UserError: If a batch cannot be read, a loss is not a number, or the first gradient is
                not written completely.
            BatchNotPushed: If the user's program took a batch, but did not push its gradient.
        """
        mean, keep, left = 0.0, 0.0, samples
        for batch in batches:
            start = time.perf_counter()
            count = len(batch)
            weight = count / samples
            if keep:
                self._make_room()
            elif not self._checked:
                try_evaluation(self._job, params)
                flat.fill(np.nan)
            if self._job.rows is not None:
                self._job.rows.weight = weight
            task = Task(params, batch, self._views if keep else out, self._job.rows)
            left -= count
            task.last = not left
            yield task
            if task.taken > start:
                start = task.taken
            if task.left:
                raise BatchNotPushed
            loss = checked_loss(task.loss)
            if not self._checked:
                check_written(self._job.layout, flat, loss)
                self._checked = True
            if self._job.delay > 1:
                spent_s = time.perf_counter() - start
                linger((self._job.delay - 1) * spent_s, self._job.cluster.progress)
            if keep:
                add_scaled(flat, keep, self._other, weight)
            keep = 1.0 if keep else weight  # scales the first gradient when the second is added
            mean += weight * loss
            self.compute_s += time.perf_counter() - start
            self._job.begun = True
        return mean

    def _make_room(self) -> None:
        layout = self._job.layout
        if self._other.size < layout.size:
            self._other = np.zeros(layout.size, self._job.dtype)
            self._views = layout.views(self._other)


def units_ahead(job: "Job") -> int:
    """Return the number of units of the dispatch that a worker's reader reads ahead."""
    assert job.dataset is not None, "servers read no data"
    return -(-job.dataset.train.ahead * job.config.batch_size // job.config.unit_size)


def make_loader(job: "Job") -> Loader:
    """Return the reader of a worker's batches, in the run's order."""
    assert job.dataset is not None, "servers read no data"
    c, source = job.config, job.dataset.train
    order = Order(source.n, job.block, c.seed, shuffle=c.shuffle)
    return Loader(source, order, job.dtype, augment=augment_of(c, job.info))


def submit(job: "Job", loader: Loader, step: Range) -> None:
    """Request the batches of a step from the reader. Blocks: no."""
    for piece in pieces(step, job.config.batch_size):
        loader.submit(*piece)


def taken(job: "Job", loader: Loader, step: Range) -> "Iterator[Batch]":
    """Yield the batches of a step that was submitted. Blocks: until each batch is read.

    Before it yields a batch, it requests the remote rows that the next batch needs. If the next
    batch is not read yet, it requests them after this batch is computed.
    """
    for _ in pieces(step, job.config.batch_size):
        batch = loader.take()
        wants = job.rows is not None and job.rows.reads_ahead
        asked = not wants or _ask(job, loader, (batch,))
        yield batch
        if not asked:
            _ask(job, loader)


def ask_early(job: "Job", loader: Loader) -> bool:
    """Request the remote rows of the next batch early, if the job does so.

    Returns:
        Whether they are requested, or need not be; False if the batch is not read yet.
    """
    wants = job.rows is not None and job.rows.reads_early
    return not wants or _ask(job, loader)


def _ask(job: "Job", loader: Loader, before: "Sequence[Batch]" = ()) -> bool:
    """Request the remote rows of the next batch, after those of the batches `before`.

    Returns:
        Whether the next batch is read; if not, nothing is requested.
    """
    following = loader.peek()
    if following is None:
        return False
    assert job.rows is not None, "a job without tables reads no rows"
    job.rows.ask_in_turn(wanted_rows(job.problem, each) for each in (*before, following))
    return True
