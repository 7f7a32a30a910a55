"""Training loop of a worker, for every kind of model."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.datasets import iterate
from mpips.errors import UserError
from mpips.library.collectives import AFTER, END, Collectives
from mpips.library.data import Samples
from mpips.mpi.collectives import gather_polled
from mpips.problems.accumulate import Task
from mpips.problems.base import Arrays
from mpips.problems.evaluation import CHUNK, add_up, metric_sums, share

if TYPE_CHECKING:
    from mpips.library.start import Start
    from mpips.mpi.world import Cluster
    from mpips.tables.step_rows import StepRows

TEXT_MAX = 200  # letters of a logged text
OWN = ("kind", "time_s", "step", "worker")  # keys that every line of a worker has
Note = dict[str, Any]  # a line that a worker logs


class Loop(Collectives):
    """A worker's loop: its batches, and its logging, stopping and evaluation.

    Args:
        start: The run before its first step.

    Attributes:
        rank: This process's MPI rank in the run's communicator.
        notes: Logged lines that are not sent yet.
    """

    def __init__(self, start: "Start") -> None:
        super().__init__(start)
        self.rank, self.notes = start.ranks.rank, list[Note]()
        self._callbacks = start.program.callbacks

    @property
    def updates(self) -> int:
        """Number of updates in this worker's parameters, by all workers together.

        In modes with rounds this is the number of rounds, also with accumulation.
        """
        return self._start.step or 0

    def log(self, /, **values: Any) -> None:
        """Write numbers or short texts to the run's ``metrics.jsonl``, as a line of kind ``log``.

        The line also has the worker's number, and the step of its parameters. A line that is logged
        after the end of the run comes after the line of the end.

        Args:
            **values: Values by name: ``worker.log(norm=norm, temperature=0.5)``. Numbers of NumPy,
                JAX and PyTorch are allowed.

        Raises:
            UserError: If a value is neither a number nor a short text, or a name is one that every
                line has: kind, time_s, step, worker.

        Collective: no. Blocks: no.
        """
        self.notes.append(note(self.id, self._start.step, values))
        between = self._tasks is not None and self._task is None and self._next is None
        if between and self.ended is None:
            _send_notes(self, self._start.ranks)

    def stop(self, reason: str = "") -> None:
        """Ask for a saved end of the run: the loop of every worker ends.

        In modes without rounds, this worker's loop ends after the step of the current batch, or at
        once if it has none, except for a batch that `evaluate` has begun. The program may leave the
        loop at once; the resumed run then computes the batch. The coordinator tells the other
        workers, which may push a few batches more. In modes with rounds the request is part of the
        round of the next push, and all loops end after that round.

        Args:
            reason: A short text for ``metrics.jsonl``; `log` writes it under ``stop``.

        Raises:
            UserError: Before the loop over the batches.

        Collective: no. Blocks: no.
        """
        if self._tasks is None:
            raise UserError("stop() before the loop over the batches", "a call in it")
        if reason:
            self.log(stop=reason)
        self._start.job.stopping = True

    def leave(self) -> None:
        """Go to the end of the run, after the program has left its loop.

        Raises:
            UserError: If it left the loop without a call of `stop`, or never began it.

        Collective: over the workers. Blocks: until all workers have come to the end.
        """
        if self._tasks is None:
            raise UserError(
                f"{self._start.program.name} without a loop", "a loop over the worker's batches"
            )
        if self.ended is None and not self._start.job.stopping:
            remedy = "call worker.stop(), and go on to the end of the loop, which comes soon"
            got = f"{self._start.program.name} that left its loop"
            raise UserError(got, "a loop to its end", remedy)
        self._drain()
        if not self._start.ranks.failures.left_out:
            while len(self._meet(END)) < self.workers:
                continue  # other workers may still meet at calls, without this one

    def _push(self, loss: Any) -> None:
        """Push the gradient of the current batch, and continue until the next batch or event."""
        task = self._current_task("push")
        task.loss, self._task = loss, None
        self._next = self._advance()
        self._callbacks.step(self, loss)

    def _evaluate(
        self, metrics: Callable[[Arrays, Any], Mapping[str, float]], samples: Samples
    ) -> dict[str, float]:
        """Return the means over samples, computed by all workers together if they share parameters.

        Workers have the same parameters after the loop and in mode sync. An exception is a round
        with fewer batches for some workers, which may have begun the next round.
        """
        if self._tasks is None:
            raise UserError("evaluate() before the loop over the batches", "a call in it, or after")
        job = self._start.job
        shared = self._loop_ended or (self._in_step and not job.few)
        params = self._whole_params()
        shared = shared and not self._start.ranks.failures.left_out  # else each evaluates all
        begin, end = 0, samples.n
        if shared:
            where = AFTER if self._loop_ended else ""
            call = f"evaluate() of {samples.n} samples"
            with self._without_row_reads():
                self._meet(call, where, between=not self._loop_ended)
            begin, end = share(samples.n, self.id, self.workers)
        batches = iterate(samples, begin, end, CHUNK, job.dtype)
        sums = metric_sums(batches, functools.partial(metrics, params))
        if shared:
            with self._without_row_reads():
                all_sums = gather_polled(self._start.workers, sums, self._start.ranks.wait_request)
            sums = add_up(dict(enumerate(all_sums)), "worker", "the same metrics on every worker")
        return {name: value / samples.n for name, value in sums.items()}

    def _whole_params(self) -> Arrays:
        """Return the parameters of the current batch, of the next batch, or of the end.

        Blocks: until a batch arrives, if there is no current one, except in mode sync: between two
        batches a read of the parameters may be in progress.
        """
        if self._in_step and self.ended is None and self._last is not None:
            return self._last.params
        while self._task is None and self._next is None and self.ended is None:
            self._next = self._advance()
        task = self._task or self._next
        if task is not None:
            return task.params
        assert self.ended is not None, "there is no batch left"
        return self._start.final_params(self.ended)

    def _tables(self, what: str) -> "StepRows":
        """Return the reader and writer of rows, for the method `what`.

        Raises:
            UserError: Before the loop over the batches and after it, and without tables.
        """
        if self._tasks is None or self.ended is not None:
            when, remedy = "before", f"rows are there from the first batch of {self.batches_by} on"
            if self.ended is not None:
                when, remedy = "after", "result.rows(table, ids) reads them when the run is over"
            raise UserError(f"{what}() {when} the loop over the batches", "a call in it", remedy)
        rows = self._start.job.rows
        if rows is None:
            raise UserError(f"{what}() in a run without tables", "tables given to mpips.run")
        return rows

    def _take(self, epoch: int | None = None) -> Task | None:
        task = super()._take(epoch)
        following = task or self._next
        self._callbacks.batch(self, None if following is None else following.batch.epoch)
        return task

    def _advance(self) -> Task | None:
        task = super()._advance()
        if task is None and self.ended is None and self.notes:
            _send_notes(self, self._start.ranks)
        return task


def _send_notes(loop: Loop, ranks: "Cluster") -> None:
    """Send logged lines to the coordinator, between two steps: no other thread uses MPI then."""
    notes, loop.notes = loop.notes, []
    ranks.send(ranks.roles.coordinator, "log", notes)


def note(worker: int, step: int | None, values: Mapping[str, Any]) -> Note:
    """Return the line of a worker's log.

    Args:
        worker: Number of the worker.
        step: Number of updates in its parameters.
        values: Numbers and short texts by name.

    Raises:
        UserError: If a value is of another type, or a name is one that every line has.
    """
    if not values:
        raise UserError("log() of nothing", "numbers by name, such as log(norm=0.5)")
    logged = {name: _logged(name, value) for name, value in values.items()}
    return {"step": step, "worker": worker, **logged}


def _logged(name: str, value: Any) -> float | str:
    if name in OWN:
        raise UserError(f"log({name}=...)", "another name: every line has this one")
    if not isinstance(value, str) and np.ndim(value) == 0 and hasattr(value, "item"):
        value = value.item()  # a number of NumPy, JAX or PyTorch
    if isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= TEXT_MAX):
        return value
    got = f"{len(value)} letters" if isinstance(value, str) else type(value).__name__
    expected = f"a number, or a text of at most {TEXT_MAX} letters"
    raise UserError(f"log({name}=...) of {got}", expected)
