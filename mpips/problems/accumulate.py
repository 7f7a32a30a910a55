"""Gradient tasks: a step's gradient, batch by batch.

Who computes a gradient is not known here: a problem does (`follow`), or a loop of the user's own
(`mpips.library`). The loops of all modes are generators of tasks, which go on when one is done.
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
from mpips.problems.rows import Rows, row_gradient, uses_rows, wanted_rows

if TYPE_CHECKING:
    from mpips.datasets import Batch
    from mpips.planning.job import Job

T = TypeVar("T")


class Left(UserError):
    """A batch was left, and nothing computed of it: the run is about to end.

    Where each worker goes by itself, that worker's loop ends; a round cannot do without it.
    """

    def __init__(self) -> None:
        got = "a batch that was taken and not pushed, in a mode of rounds"
        remedy = "go on to the end of the loop, which comes soon after worker.stop()"
        super().__init__(got, "a push", remedy)


@dataclass(slots=True, eq=False)
class Task:
    """A batch whose gradient is wanted. Whoever computes it sets `loss`, and goes on.

    Attributes:
        params: The parameters, by name; not written.
        batch: The samples; not written.
        rows: Reads and pushes rows of tables; None without any.
        out: Arrays shaped as `params`; each is overwritten with the gradient of the mean loss.
        loss: The mean loss over the batch.
        left: Whether the batch is left instead.
        last: Whether it is the last batch of its step.
        taken: When a program has come back to its loop for it, by `time.perf_counter`.
    """

    params: Arrays
    batch: "Batch"
    out: Arrays
    rows: Rows | None = None
    loss: Any = None
    left: bool = False
    last: bool = True
    taken: float = 0.0


# Yields what is to be computed, and None after each step that was pushed.
Tasks: TypeAlias = Generator[Task | None, None, T]


def follow(problem: Problem | None, tasks: Tasks[T]) -> T:
    """Have a problem compute all that is asked for; returns what `tasks` does.

    None will do where nothing is: on servers.
    """
    by_rows = uses_rows(problem)
    while True:
        try:
            task = next(tasks)
        except StopIteration as end:
            return end.value
        if task is None:
            continue
        assert problem is not None, "a server computes no gradient"
        if by_rows:
            task.loss = row_gradient(problem, task.params, task.rows, task.batch, task.out)
        else:
            task.loss = problem.loss_and_grad(task.params, task.batch, task.out)


class Accumulator:
    """Has the gradient of a step computed, the mean over the samples of all its batches.

    Equation: ``g = sum_i (n_i / n) g_i``, which is the gradient of one batch of all n samples.
    Takes one more vector of the model's size from the first step on that has several batches: in
    any mode this may be a step that is left from a run in rounds, which is resumed in another mode.

    Attributes:
        compute_s: Seconds in the problem and in adding, without those of reading, and those before
            a program came back to its loop, such as behind a pass.
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
        """Have the gradient of a step computed into `out`, views of `flat`.

        A worker of ``--inject-delay`` takes so many times as long.

        Args:
            params: The parameters that it is computed from.
            batches: The step's batches; one is held at a time.
            samples: Samples in all of them.
            out: Where the gradient goes.
            flat: The vector behind `out`, shape (n_params,).

        Returns:
            The mean loss over the samples; not finite if that of any batch is not.

        Raises:
            UserError: If a batch cannot be read, a loss is no number, or the first gradient is
                not wholly written.
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
                raise Left
            loss = checked_loss(task.loss)
            if not self._checked:
                check_written(self._job.layout, flat, loss)
                self._checked = True
            if self._job.delay > 1:
                spent_s = time.perf_counter() - start
                linger((self._job.delay - 1) * spent_s, self._job.cluster.progress)
            if keep:
                add_scaled(flat, keep, self._other, weight)
            keep = 1.0 if keep else weight  # applied with the second, which saves a pass
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
    """Return how many units of the dispatch a worker's reader wants beside the one in work."""
    assert job.dataset is not None, "servers read no data"
    return -(-job.dataset.train.ahead * job.config.batch_size // job.config.unit_size)


def make_loader(job: "Job") -> Loader:
    """Return the reader of a worker's batches, in the run's order."""
    assert job.dataset is not None, "servers read no data"
    c, source = job.config, job.dataset.train
    size = 1 if job.block else c.batch_size
    order = Order(source.n, size, job.block, c.seed, shuffle=c.shuffle)
    return Loader(source, order, job.dtype, augment=augment_of(c, job.info))


def submit(job: "Job", loader: Loader, step: Range) -> None:
    """Ask for the batches of a step. Blocks: no."""
    for piece in pieces(step, job.config.batch_size):
        loader.submit(*piece)


def taken(job: "Job", loader: Loader, step: Range) -> "Iterator[Batch]":
    """Yield the batches of a step that was submitted; waits for each when it is asked for.

    Remote rows that the one after it needs are asked for then, or where that is not here yet as
    soon as this one is computed.
    """
    for _ in pieces(step, job.config.batch_size):
        batch = loader.take()
        wants = job.rows is not None and job.rows.reads_ahead
        asked = not wants or _ask(job, loader, (batch,))
        yield batch
        if not asked:
            _ask(job, loader)


def ask_early(job: "Job", loader: Loader) -> bool:
    """Ask for the remote rows of the next batch once its step is read.

    Returns whether it is here.
    """
    wants = job.rows is not None and job.rows.reads_early
    return not wants or _ask(job, loader)


def _ask(job: "Job", loader: Loader, before: "Sequence[Batch]" = ()) -> bool:
    """Ask for the remote rows of the next batch, behind those before.

    Returns whether it is here.
    """
    following = loader.peek()
    if following is None:
        return False
    assert job.rows is not None, "a job without tables reads no rows"
    job.rows.ask_in_turn(wanted_rows(job.problem, each) for each in (*before, following))
    return True
