"""Collective operations of workers within a program's loop."""

import functools
import math
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint.files import write_durably
from mpips.checkpoint.run_folder import DONE, EVALUATION, is_early
from mpips.errors import UserError, unknown
from mpips.launch.terminal import find_terminal
from mpips.library.epochs import Passes
from mpips.mpi.collectives import gather_polled
from mpips.mpi.start import Comm, Request
from mpips.mpi.world import Cluster
from mpips.planning.job import Job

PATIENCE_S = 60.0  # for a worker that does not come to a call between two batches
OPERATIONS: dict[str, Callable[..., Any]] = {
    "mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min,
}  # fmt: skip
END = "the end of its function"
AFTER = "after the loop"
ERASE_LINE = "\r\x1b[K"  # erases a line of a terminal, where a progress bar may be


class Collectives(Passes):
    """Operations that the workers of a run do together, or one worker does for all."""

    def once(self) -> bool:
        """Return whether this worker prints and saves for all: the first one that has not died.

        Collective: no. Blocks: no.
        """
        ranks = self._start.ranks
        return ranks.rank == next(r for r in ranks.roles.workers if r not in ranks.failures.lost)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, in the order of workers, the same list on each.

        Every worker calls it at the same place: before the loop over the batches, after the loop,
        or after a pass of `epochs`, but not in mode ssp or with backup workers. In mode sync a
        worker may also call it between two batches, if all workers do so in the same step. In mode
        async workers are at different batches. So after a pass each waits until the others have
        ended theirs, and a call between two batches is refused.

        Args:
            value: Any object that can be pickled. Tensors are copied to the host.

        Raises:
            UserError: If a worker makes another call, or has ended without this one; if between two
                batches a worker does not come for a minute; if workers cannot wait for each other
                at this place.

        Collective: over the workers. Blocks: until all workers have called it. If the job makes no
        progress, it ends after the option `timeout`.
        """
        return self._gather_values("gather()", value)

    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        """Return the mean, sum, maximum or minimum of the workers' values, the same on each worker.

        Arrays are reduced element by element, in the order of workers. Every worker calls it at the
        same place, as in `gather`.

        Args:
            value: A number, an array or a tensor, of the same shape on all workers; or a mapping of
                names to such values.
            op: ``mean``, ``sum``, ``max`` or ``min``.

        Returns:
            A value of the type of `value`; a tensor is on the device of the given one.

        Raises:
            UserError: As `gather`; if shapes or names differ; if the value is of another type.

        Collective: over the workers. Blocks: as `gather`.
        """
        if op not in OPERATIONS:
            raise unknown("op of all_reduce()", op, OPERATIONS)
        values = self._gather_values(f"all_reduce() of {_described(value)} by {op}", value)
        if not isinstance(value, Mapping):
            return self._reduce(value, values, op)
        return {
            name: self._reduce(like, [each[name] for each in values], op)
            for name, like in value.items()
        }

    def barrier(self) -> None:
        """Wait for all workers, at the same place, as in `gather`.

        Raises:
            UserError: As `gather`.

        Collective: over the workers. Blocks: as `gather`.
        """
        self._gather_values("barrier()", None)

    def print(self, *values: object, sep: str = " ") -> None:
        """Print a line on one worker, as `once` selects it, without damage to a progress bar.

        Args:
            *values: Values, as in Python's ``print``.
            sep: Separator of the values.

        Collective: no. Blocks: no.
        """
        if self.once():
            text = sep.join(map(str, values))
            bar = "" if self._start.config.quiet else _bar_above()
            if "tqdm" in sys.modules:  # hides the program's own bars during the write
                sys.modules["tqdm"].tqdm.write(f"{bar}{text}\n", end="")
            else:
                sys.stdout.write(f"{bar}{text}\n")
            sys.stdout.flush()

    def save(self, obj: Any, name: str) -> Path:
        """Save an object to a file of the run's folder, on one worker, as `once` selects it.

        The file appears only when it is complete, also if the job or the machine fails. It replaces
        a file of the same name.

        Args:
            obj: An array, saved as ``.npy``, or a mapping of names to arrays, as ``.npz``. In
                `mpips.torch` any object that ``torch.save`` takes; its tensors are saved as on the
                host.
            name: Name of the file, such as ``best.npz``.

        Returns:
            The path of the file. On other workers it may not exist yet.

        Raises:
            UserError: Before the loop over the batches; if the name is not a plain file name, or is
                one of the run's own files; if the object cannot be saved in this format, or the
                file cannot be written.

        Collective: no. Blocks: on that worker, until the file is on disk.
        """
        if self._tasks is None:
            raise UserError("save() before the loop over the batches", "a call in it, or after")
        if not name or Path(name).name != name or is_early(name) or name in (DONE, EVALUATION):
            got = f"save() to {name!r}"
            raise UserError(got, "a file's name, which is none of the run's own files")
        path = self._start.out / name
        if self.once():
            write_durably(path, functools.partial(self._write, obj))
        return path

    def _write(self, obj: Any, path: Path) -> None:
        """Write an array or a mapping of arrays to a file."""
        named = obj if isinstance(obj, Mapping) else {"": obj}
        arrays = {str(key): np.asarray(value) for key, value in named.items()}
        if not arrays or any(array.dtype.hasobject for array in arrays.values()):
            got = f"save() of {type(obj).__name__}"
            raise UserError(got, "an array, or a mapping of names to arrays")
        if not isinstance(obj, Mapping):
            with open(path, "wb") as file:
                np.save(file, arrays[""])
            return
        with zipfile.ZipFile(path, "w") as archive:  # np.savez has arguments, which are no names
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    def _outgoing(self, value: Any) -> Any:
        """Return the form of a value that is sent to other workers."""
        return value

    def _reduce(self, like: Any, values: Sequence[Any], op: str) -> Any:
        """Return the reduction of values of the same shape, as a value of the type of `like`."""
        # Python's integers may be larger than NumPy's. The choice is the same on all workers.
        kind = object if all(isinstance(value, int) for value in values) else None
        result = OPERATIONS[op](np.stack([np.asarray(value, kind) for value in values]), axis=0)
        return result if np.ndim(like) or not hasattr(result, "item") else result.item()

    def _gather_values(self, call: str, value: Any) -> list[Any]:
        """Return the workers' values of a call, in the order of workers.

        Raises:
            UserError: If workers cannot wait for each other here, or one has died; as `_meet`.
        """
        where, between = self._place_of_call(call)
        _check_whole(self._start.ranks, call)
        with self._without_row_reads():
            return self._meet(call, where, self._outgoing(value), between, may_leave=True)

    def _without_row_reads(self) -> AbstractContextManager[None]:
        """Within a block, keep the thread that answers remote reads of rows out of MPI."""
        rows = None if self._tasks is None or self.ended else self._start.job.rows
        return nullcontext() if rows is None else rows.alone()

    def _place_of_call(self, call: str) -> tuple[str, bool]:
        """Return this worker's place in its function, and whether it is between two batches.

        Raises:
            UserError: If the workers cannot wait for each other at this place.
        """
        if self._tasks is None:
            return "before the loop", False
        job = self._start.job
        mode, in_rounds = job.config.mode, job.config.in_rounds
        if job.stopping and not in_rounds:  # other workers wait until this one has ended
            self._drain()
        if self.ended is not None and self._epoch is None:
            return AFTER, False
        if job.config.reads_wait:
            got = f"{call} in the loop of mode {mode}"
            got += " with backup workers" if job.config.backup_workers else ""
            remedy = "others may wait for the push of the batch that this worker has"
            raise UserError(got, "a call before the loop or after it", remedy)
        if self._epoch is not None and (self._passed or job.stopping):
            if in_rounds and not self._passed:
                got = f"{call} in a pass that was left after stop()"
                raise UserError(got, "a pass to its end", "it comes with the next push")
            if self.ended is None and not in_rounds and self.workers > 1:
                _check_batches(job, self.workers, call)
            return f"behind epoch {self._epoch}", False
        if not self._in_step or job.few:
            kind = f"between two batches in mode {mode}"
            if self._in_step:
                kind = "in a round with more batches for some of them"
            remedy = "here workers have different numbers of batches"
            expected = "a call behind a pass of worker.epochs(), or before or after the loop"
            raise UserError(f"{call} {kind}", expected, remedy)
        return f"in step {self._start.step}", True

    @property
    def _in_step(self) -> bool:
        """Whether all workers have the same complete parameters between two rounds."""
        config = self._start.job.config
        return config.mode in ("sync", "hybrid") and config.in_rounds

    @property
    def _was_stopped(self) -> bool:
        """Whether the run ends before its last batch, so that workers may leave their loops."""
        if self.ended is None:
            return self._tasks is not None and self._start.job.stopping
        return self.ended.summary["stop_reason"] not in ("epochs", "steps")

    def _meet(
        self,
        call: str,
        where: str = "",
        value: Any = None,
        between: bool = False,
        may_leave: bool = False,
    ) -> list[Any]:
        """Wait for all workers at a call, or at the end of the function (`END`).

        Args:
            call: Name of the call.
            where: Place of the call in the function.
            value: This worker's value.
            between: Whether the place is between two batches. No worker does anything else there,
                so others must come within a minute.
            may_leave: Whether other workers may have ended if the run was stopped.

        Returns:
            The values of the workers that came to this call, in the order of workers.

        Raises:
            UserError: If a worker came to another call, or not in time; never at `END`.

        Collective: over the workers. Blocks: until all workers have come, or the time is over.
        """
        ends = time.monotonic() + (PATIENCE_S if between else math.inf)

        def come(request: Request) -> bool:
            if request.Test():
                return True
            if self._tasks is not None and self.ended is None and self._start.job.heard_stop():
                self._drain()
            if time.monotonic() > ends:
                got = f"{call} in the loop, to which not all have come for {PATIENCE_S:.0f} s"
                remedy = "in mode sync the workers wait for each other: let none be an exception"
                raise UserError(got, "a call on every worker, between the same two steps", remedy)
            _check_whole(self._start.ranks, call)
            return False

        args = self._start.ranks, self._start.workers, call
        mine = call, where, self._was_stopped, value
        brought = _gathered(*args, mine, come)
        was_stopped = any(each[2] for each in brought)
        if where == AFTER and was_stopped:  # others may still make calls in their loops
            while any(theirs != END and there != AFTER for theirs, there, *_ in brought):
                brought = _gathered(*args, mine, come)
        stopped = may_leave and was_stopped
        if stopped and where != AFTER:
            brought = [each if each[1] != AFTER else (END, "", True, None) for each in brought]
        for worker, (theirs, there, *_) in enumerate(brought):
            agrees = theirs == call and (there == where or stopped)
            if call != END and not agrees and not (theirs == END and stopped):
                got = f"{call} {where}".rstrip() + f", and on worker {worker} {theirs} {there}"
                raise UserError(got.rstrip(), "the same calls on every worker")
        return [value for theirs, *_, value in brought if theirs == call]


def _check_whole(ranks: Cluster, call: str) -> None:
    """Check that no worker that a call waits for has died.

    Raises:
        UserError: If this worker knows of a dead one.
    """
    if lost := sorted(ranks.failures.lost & set(ranks.roles.workers)):
        dead = ", ".join(f"{ranks.roles.workers.index(rank)} (rank {rank})" for rank in lost)
        got = f"{call} without worker {dead}, which has died"
        raise UserError(got, "all workers of the run", "it goes on by --resume")


def _gathered(
    ranks: Cluster, workers: Comm, call: str, value: Any, come: Callable[[Request], bool]
) -> list[Any]:
    """Gather the workers' values of a call.

    Raises:
        UserError: If one of them has died.

    Collective: over the workers. Blocks: until all workers have come.
    """

    def wait(request: Request) -> float:
        return ranks.wait(lambda: come(request))

    values = ranks.failures.attempt(gather_polled, workers, value, wait)
    if values is None:
        _check_whole(ranks, call)
        raise ranks.failures.needed()
    return values


def _check_batches(job: Job, workers: int, call: str) -> None:
    """Check that no worker can wait for batches which workers hold that wait for it.

    Raises:
        UserError: If an epoch has too few steps for that.
    """
    from mpips.problems.accumulate import units_ahead
    from mpips.ps.dispatch import AHEAD

    held = (workers - 1) * (1 + AHEAD + units_ahead(job))
    units = -(-job.info.n_train // job.config.unit_size)
    if units <= held or job.config.steps:
        steps = " with steps=" if job.config.steps else ""
        got = f"{call} behind a pass of {units} steps in mode {job.config.mode}{steps}"
        expected = f"more than {held} steps in an epoch, and no steps="
        raise UserError(got, expected, "else all may wait for one that gets no batch more")


def _described(value: Any, nests: bool = True) -> str:
    """Return a description of a value's shape.

    Args:
        value: Value to be reduced.
        nests: Whether the value may be a mapping.

    Raises:
        UserError: If the value cannot be reduced.
    """
    if isinstance(value, Mapping) and nests:
        items = sorted(value.items(), key=lambda item: str(item[0]))  # a set has any order
        return ", ".join(f"{name}, {_described(each, False)}" for name, each in items)
    shape = () if isinstance(value, (bool, int, float)) else getattr(value, "shape", None)
    kind = value.dtype.kind if isinstance(value, (np.ndarray, np.generic)) else "f"
    if shape is None or kind not in "biuf":
        got = f"all_reduce() of {type(value).__name__}"
        expected = "a number, an array or a tensor, or a mapping of names to such"
        raise UserError(got, expected, "worker.gather() takes anything")
    return f"shape {tuple(shape)}" if shape else "a number"


@functools.cache
def _bar_above() -> str:
    """Return the text that erases the run's progress bar; empty if no bar is on this terminal."""
    terminal, lines = find_terminal()
    if terminal is not None:
        terminal.close()
    return "" if terminal is None or lines else ERASE_LINE
