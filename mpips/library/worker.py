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
    """A worker of a run, as the function sees it that was given to `mpips.run`.

    It is used by one thread. `batches` begins the training, on all ranks together; each of its
    batches is to be pushed before the next is taken.

    Attributes:
        id: This worker's number, from 0.
        workers: Number of workers.
        rank: This process's MPI rank among the run's.
    """

    def batches(
        self, data: Any, *, batch_size: int | None = None, epochs: int | None = None
    ) -> Loader[Batch]:
        """Return this worker's batches: each sample once an epoch on one of the workers.

        That holds over resumes too. In the modes without rounds a slow worker has fewer of them.
        Iterate them once for the whole run, or once in each epoch of `epochs`.

        Args:
            data: The samples, the same on every worker: an array whose rows are samples, a tuple
                (x, y) of two such, a mapping of names to such, anything with a length that gives
                sample k by ``data[k]``, or just the number of samples.
            batch_size: Samples in a batch; by default the option of that name.
            epochs: Passes over the data, of resumed runs together; likewise. `epochs` may
                say it instead.

        Returns:
            An iterable of batches, with a length: this worker's batches in an epoch, exact in mode
            sync, else its share. `Batch.ids` are the samples' numbers, `Batch.x` and
            `Batch.y` what the data holds under them; of a mapping `Batch.x` is one, of a sequence a
            list. `Batch.epoch` counts from 0.

        Raises:
            UserError: If the data or a number cannot be; if a batch was not pushed.

        Collective: over the workers, the first step of it. Blocks: until a batch is there, and
        the parameters that it is to be computed from.
        """

        def make() -> Samples:
            return Samples(data)

        return self._use(
            Loader(self, make, lambda: make().n, lambda batch: batch, batch_size, epochs, data)
        )

    def pull(self) -> Arrays:
        """Return the parameters by name, read-only views of this worker's replica.

        They are those that the batch in work is to be computed from: they were read when it was
        taken. They hold until it is pushed; those of a run that is over may be kept. Behind a pass
        in `epochs` they are those of the next batch.

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
        return self._in_work("pull").params

    @property
    def grads(self) -> Arrays:
        """Where the gradient of the batch in work goes, by name: the memory it is pushed from.

        Every element is to be overwritten with the gradient of the mean loss over the batch. Shapes
        and dtype are those of `pull`.

        Raises:
            UserError: If no batch is in work.

        Collective: no. Blocks: no.
        """
        return self._in_work("grads").out

    def push(self, loss: float) -> None:
        """Push the gradient that is in `grads`.

        With the option `accumulate` it is added to those of the step's other batches, and the step
        is pushed with its last one.

        Args:
            loss: The mean loss over the batch; one that is not finite ends the run, saved as it
                was before.

        Raises:
            UserError: If no batch is in work, or the loss is no number; with the first one, if
                `grads` was not written whole.

        Collective: no; in modes with rounds the round is. Blocks: until the buffer of the step
        before is free; in rounds until the round is over.
        """
        self._push(loss)

    def pull_rows(self, table: str, ids: Any) -> np.ndarray:
        """Return rows of a table, as its servers hold them now.

        Unlike `pull`, each call reads anew. A row of this node that is read while it is updated may
        be torn; it is counted (`torn` in the run's summary) and used, like a torn read of
        parameters. Rows of other nodes are whole. In mode sync rows change between rounds alone.

        Args:
            table: Its name.
            ids: Numbers of rows, integers of any shape, duplicates allowed; of a table whose ids
                are hashed any integers, or words (str).

        Returns:
            The rows, shape (*ids.shape, dim), the run's dtype; a new array.

        Raises:
            UserError: Before the loop over the batches and after it; if there is no such table, or
                an id is none of its rows.

        Collective: no. Blocks: until servers of other nodes have answered, for none of their
        updates; where there are none, no.
        """
        return self._tables("pull_rows").pull(table, ids)

    def ask_rows(self, table: str, ids: Any) -> None:
        """Ask servers of other nodes for rows that a later `pull_rows` of the same ids returns.

        So they are on their way while this batch is computed. They are as their servers held them
        when they answered, which may be before this worker's push of the batch in work; rows of
        this node are read when they are pulled. Rows are pulled in the order in which they were
        asked for: what was asked for before other rows that are pulled is thrown away. In mode ssp
        they are on their way while the next batch's parameters are waited for, and hold what the
        bound promises: ask for rows of that batch alone. In mode sync, and where all rows are on
        this node, it does nothing. Of more than 64 calls that nobody has pulled the oldest is
        thrown away.

        Args:
            table: Its name.
            ids: As for `pull_rows`.

        Raises:
            UserError: As `pull_rows`.

        Collective: no. Blocks: no, but for a call that is thrown away.
        """
        self._tables("ask_rows").ask(table, ids)

    def push_rows(self, table: str, ids: Any, grads: Any) -> None:
        """Add gradients of rows to the push of the batch in work, before `push` makes it.

        The gradients of a row are summed, within a call and over all calls of a step, and its
        update rule is applied once. They are copied.

        Args:
            table: Its name.
            ids: As for `pull_rows`.
            grads: Of the mean loss, by row, shape (*ids.shape, dim).

        Raises:
            UserError: If no batch is in work; if there is no such table, an id is none of its rows,
                the gradients are of another shape or not finite, or there are more rows in the
                push than a worker has room for.

        Collective: no. Blocks: no.
        """
        self._in_work("push_rows")
        self._tables("push_rows").push(table, ids, grads)

    def step(self, gradient: Gradient, batch: Batch) -> float:
        """Make one step: pull, ``loss = gradient(params, batch, grads)``, push.

        Args:
            gradient: Writes the gradient of the mean loss into `grads`, and returns that loss.
            batch: The batch in work.

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

        After the loop the workers share the samples, and in mode sync in the loop as well: there
        every worker that has a batch calls it, between the same two steps; where a last batch of an
        epoch does not go round, each of them evaluates all samples. In the loop of another mode a
        worker has parameters of its own, those of its batch in work or else of its next one: it
        evaluates all samples by itself, and nobody waits for it or has to call it.

        Args:
            metrics: ``metrics(params, batch)`` returns means over a batch, ``loss`` among them.
            data: The samples, as in `batches`.

        Returns:
            Means by name over all samples; where they are shared, the same on every worker.

        Raises:
            UserError: Before the loop; if a metric is some workers' only; where samples are shared,
                if a worker has ended without the call, or in the loop has not come for a minute.

        Collective: over the workers, where they share. Blocks: until all have come then.
        """
        return self._evaluate(metrics, Samples(data))
