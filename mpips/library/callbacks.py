"""Callbacks of a program during its run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpips.errors import UserError

if TYPE_CHECKING:
    from mpips.library.loop import Loop


class Callback:
    """Base of callbacks on steps, epochs, evaluations and checkpoints; override what you need.

        class Best(mpips.Callback):
            def on_evaluation(self, step, metrics):
                print(step, metrics["loss"])

        mpips.run(train, params, callbacks=[Best()])

    Each rank calls its own instances. A method should return soon, since the rank does nothing else
    meanwhile. An exception in a method ends the job, as one in the training function does. No
    method is collective: ranks call them at different times.
    """

    def on_step(self, worker: "Loop", loss: float) -> None:
        """Act after a push, on the worker that pushed.

        Args:
            worker: The worker.
            loss: Loss that the worker pushed.
        """

    def on_epoch(self, worker: "Loop", epoch: int) -> None:
        """Act after a worker's last batch of an epoch, or of the run, on this worker.

        In modes without rounds workers end an epoch at different times.

        Args:
            worker: The worker.
            epoch: Number of the epoch, from 0.
        """

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Act after an evaluation of held-out samples during the run, on the coordinator.

        The coordinator is a server, or rank 0 in a mode without servers.

        Args:
            step: Number of updates in the evaluated parameters.
            metrics: Means by name, and ``epoch``.
        """

    def on_checkpoint(self, step: int) -> None:
        """Act after a checkpoint was committed, on the coordinator.

        Args:
            step: Number of updates in the checkpoint.
        """


class Callbacks:
    """A sequence of callbacks, called in order.

    Args:
        callbacks: The callbacks of a program.

    Raises:
        UserError: If one is not a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        if not isinstance(callbacks, Sequence) or not all(
            isinstance(callback, Callback) for callback in callbacks
        ):
            got, remedy = f"callbacks {callbacks!r}", "derive a class from mpips.Callback"
            raise UserError(got, "a list of instances of mpips.Callback", remedy)
        self._callbacks = tuple(callbacks)
        self._epoch: int | None = None

    def step(self, worker: "Loop", loss: float) -> None:
        """Call `Callback.on_step` after a push."""
        for callback in self._callbacks:
            callback.on_step(worker, loss)

    def batch(self, worker: "Loop", epoch: int | None) -> None:
        """Call `Callback.on_epoch` if the next batch is of another epoch, or None."""
        if self._epoch is not None and epoch != self._epoch:
            for callback in self._callbacks:
                callback.on_epoch(worker, self._epoch)
        self._epoch = epoch

    def event(self, kind: str, step: int | None, fields: Mapping[str, Any]) -> None:
        """Call the method for a line of the coordinator's log: an evaluation or a checkpoint."""
        for callback in self._callbacks:
            if kind == "eval":
                callback.on_evaluation(step or 0, fields)
            elif kind == "checkpoint":
                callback.on_checkpoint(step or 0)
