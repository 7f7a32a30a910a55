"""Callbacks of a program during its run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpips.errors import UserError

if TYPE_CHECKING:
    from mpips.library.loop import Loop


class Callback:
    """Told of steps, epochs, evaluations and checkpoints; override what is wanted.

        class Best(mpips.Callback):
            def on_evaluation(self, step, metrics):
                print(step, metrics["loss"])

        mpips.run(train, params, callbacks=[Best()])

    Each rank has its own. A method should return soon: the rank does nothing else meanwhile. An
    exception in one ends the job, as one in the training function does. None is collective: ranks
    come to them at their own times.
    """

    def on_step(self, worker: "Loop", loss: float) -> None:
        """Act after a push, on that worker.

        Args:
            worker: It.
            loss: As it was pushed.
        """

    def on_epoch(self, worker: "Loop", epoch: int) -> None:
        """Act after a worker's last batch of an epoch, or of the run, on that worker.

        In modes without rounds each comes there at its own time.

        Args:
            worker: It.
            epoch: From 0.
        """

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Act after an evaluation of held-out samples during the run.

        On one rank, the coordinator.

        That is a server where there is one, else rank 0.

        Args:
            step: Updates that the evaluated parameters held.
            metrics: Means by name, and ``epoch``.
        """

    def on_checkpoint(self, step: int) -> None:
        """Act after a checkpoint was committed, on the coordinator.

        Args:
            step: The updates that it holds.
        """


class Callbacks:
    """Several of them, as one.

    Args:
        given: They.

    Raises:
        UserError: If one is none.
    """

    def __init__(self, given: Sequence[Callback]) -> None:
        if not isinstance(given, Sequence) or not all(isinstance(one, Callback) for one in given):
            got, remedy = f"callbacks {given!r}", "derive a class from mpips.Callback"
            raise UserError(got, "a list of instances of mpips.Callback", remedy)
        self._given = tuple(given)
        self._epoch: int | None = None

    def step(self, worker: "Loop", loss: float) -> None:
        """Tell of a push."""
        for callback in self._given:
            callback.on_step(worker, loss)

    def batch(self, worker: "Loop", epoch: int | None) -> None:
        """Tell of the end of an epoch, where a batch is of a later one, or there is none (None)."""
        if self._epoch is not None and epoch != self._epoch:
            for callback in self._given:
                callback.on_epoch(worker, self._epoch)
        self._epoch = epoch

    def event(self, kind: str, step: int | None, fields: Mapping[str, Any]) -> None:
        """Tell of what the coordinator's log has written."""
        for callback in self._given:
            if kind == "eval":
                callback.on_evaluation(step or 0, fields)
            elif kind == "checkpoint":
                callback.on_checkpoint(step or 0)
