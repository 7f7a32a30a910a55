"""Worker of a program: batches, and parameters as named arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpips.datasets import Batch
from mpips.library.data import Samples
from mpips.library.epochs import Loader
from mpips.library.loop import Loop
from mpips.problems.base import Arrays

Gradient = Callable[[Arrays, Batch, Arrays], float]


class Worker(Loop):
    """A worker of a run, the argument of the function that is given to `mpips.run`.

    Only one thread may use it. `batches` begins the training, on all ranks together. Push each
    batch before you take the next.

    Attributes:
        id: This worker's number, from 0.
        workers: Number of workers.
        rank: This process's MPI rank in the run's communicator.
    """

    def batches(
        self, data: Any, *, batch_size: int | None = None, epochs: int | None = None
    ) -> Loader[Batch]:
        """Return this worker's batches: in an epoch each sample goes to one of the workers, once.

        This also holds if the run is resumed. In the modes without rounds a slow worker gets fewer
        batches. Iterate over them once for the whole run, or once in each epoch of `epochs`.

        Args:
            data: The samples, the same on every worker: an array whose rows are samples, a tuple
                (x, y) of two such arrays, a mapping of names to such arrays, any object with a
                length that returns sample k by ``data[k]``, or the number of samples.
            batch_size: Samples in a batch; by default the option of that name.
            epochs: Passes over the data, with those before a resume; by default the option of that
                name. It may be given to `epochs` instead.

        Returns:
            An iterable of batches. Its length is the number of this worker's batches in an epoch:
            exact in mode sync, else its share. `Batch.ids` are the numbers of the samples,
            `Batch.x` and `Batch.y` the samples themselves. Of a mapping `Batch.x` is a mapping, of
            a sequence a list. `Batch.epoch` counts from 0.

        Raises:
            UserError: If the data or a number is invalid; if a batch was not pushed.

        Collective: over the workers, in its first step. Blocks: until a batch and its parameters
        have arrived.
        """

        def make() -> Samples:
            return Samples(data)

        return self._use(
            Loader(self, make, lambda: make().n, lambda batch: batch, batch_size, epochs, data)
        )

    def pull(self) -> Arrays:
        """Return the parameters by name, read-only views of this worker's replica.

        The worker has read them when it took the current batch, and they hold until its push. After
        the end of a run they may be kept. After a pass of `epochs` they are those of the next
        batch.

        Returns:
            Arrays of the shapes that `run` was given, of the option `dtype`.

        Raises:
            UserError: Before the first batch, and between a push and the next batch.

        Collective: no. Blocks: no.
        """
        if self.ended is not None:
            return self._start.final_params(self.ended)
        if self._epoch is not None and self._passed and self._next is not None:
            return self._next.params
        return self._current_task("pull").params

    @property
    def grads(self) -> Arrays:
        """Buffer of the current batch's gradient, by name; `push` sends it.

        Overwrite every element with the gradient of the mean loss over the batch. Shapes and dtype
        are those of `pull`.

        Raises:
            UserError: If there is no current batch.

        Collective: no. Blocks: no.
        """
        return self._current_task("grads").out

    def push(self, loss: float) -> None:
        """Push the gradient in `grads`.

        With the option `accumulate` it is added to the gradients of the step's other batches. The
        push of the last batch sends their mean over all samples.

        Args:
            loss: The mean loss over the batch. If it is not finite, the run ends and is saved as it
                was before.

        Raises:
            UserError: If there is no current batch, or the loss is not a number; at the first push
                also if `grads` was not overwritten completely.

        Collective: no; in modes with rounds the round is. Blocks: until the buffer of the last step
        is free; in rounds until the round has ended.
        """
        self._push(loss)

    def pull_rows(self, table: str, ids: Any) -> np.ndarray:
        """Return the rows of a table that its servers hold now.

        Unlike `pull`, each call reads anew. A local row that is read during an update may be torn:
        it is counted (`torn` in the run's summary) and used, like a torn read of parameters. Remote
        rows are never torn. In mode sync rows change only between rounds.

        Args:
            table: Name of the table.
            ids: Numbers of rows, integers of any shape, duplicates allowed. If the table hashes its
                ids, any integers, or words (str).

        Returns:
            The rows, shape (*ids.shape, dim), the run's dtype; a new array.

        Raises:
            UserError: Before the loop over the batches and after it; if there is no such table, or
                the table has no row of an id.

        Collective: no. Blocks: until remote servers have answered, which do not wait for updates;
        not if all rows are local.
        """
        return self._tables("pull_rows").pull(table, ids)

    def ask_rows(self, table: str, ids: Any) -> None:
        """Request remote rows ahead, for a later `pull_rows` of the same ids.

        The rows travel while the worker computes the batch. They have the values of the time when
        their server answers, which may be before this worker's push of the batch. Local rows are
        read by `pull_rows`. Pull rows in the order of their requests: a pull discards all requests
        before its own. In mode ssp the rows travel while the worker waits for the next batch's
        parameters, and they satisfy the staleness bound: request only rows of that batch. In mode
        sync, and if all rows are local, the call does nothing. If more than 64 requests are not
        pulled, the oldest one is discarded.

        Args:
            table: Name of the table.
            ids: As in `pull_rows`.

        Raises:
            UserError: As `pull_rows`.

        Collective: no. Blocks: only to discard a request.
        """
        self._tables("ask_rows").ask(table, ids)

    def push_rows(self, table: str, ids: Any, grads: Any) -> None:
        """Add gradients of rows to the push of the current batch; `push` sends them.

        The gradients of a row are summed, within a call and over all calls of a step, and its
        update rule is applied once. They are copied.

        Args:
            table: Name of the table.
            ids: As in `pull_rows`.
            grads: Gradients of the mean loss, one a row, shape (*ids.shape, dim).

        Raises:
            UserError: If there is no current batch; if there is no such table, or the table has no
                row of an id; if the gradients are of another shape or not finite; if the push has
                more rows than a worker's buffer.

        Collective: no. Blocks: no.
        """
        self._current_task("push_rows")
        self._tables("push_rows").push(table, ids, grads)

    def step(self, gradient: Gradient, batch: Batch) -> float:
        """Make one step: pull, ``loss = gradient(params, batch, grads)``, push.

        Args:
            gradient: Writes the gradient of the mean loss into `grads`, and returns the loss.
            batch: The current batch.

        Returns:
            The loss.

        Raises:
            UserError: As `push`.

        Collective and blocking: as `push`.
        """
        loss = gradient(self.pull(), batch, self.grads)
        self.push(loss)
        return loss

    def evaluate(
        self, metrics: Callable[[Arrays, Any], Mapping[str, float]], data: Any
    ) -> dict[str, float]:
        """Return the means over held-out samples.

        Workers share the samples after the loop, and in mode sync also in the loop. There, every
        worker that has a batch calls it between the same two steps. In an epoch's last round, each
        evaluates all samples if some have fewer batches than others. In the loop of another mode a
        worker evaluates all samples by itself, with its own parameters: those of its current batch,
        or else of its next one. No other worker waits for it or has to call it.

        Args:
            metrics: ``metrics(params, batch)`` returns means over a batch, ``loss`` among them.
            data: The samples, as in `batches`.

        Returns:
            Means by name over all samples; if workers share them, the same on every worker.

        Raises:
            UserError: Before the loop; if workers return different metrics; if workers share the
                samples, and one has ended without the call or, in the loop, does not come for a
                minute.

        Collective: over the workers, if they share the samples. Blocks: then, until all have come.
        """
        return self._evaluate(metrics, Samples(data))
