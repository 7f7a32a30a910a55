"""How a program's loops are made again: each worker in a process of its own, which takes its turn.

A program has variables and generators that each rank of the run had for itself. So a replay makes a
copy of its process for each worker, by fork(2), where the program comes to its run. The copy calls
the program's function with a worker that knows no ranks: what its loop asks for comes from the
replay, a batch at a time, and what it computes goes there. One process computes at a time.
"""

import contextlib
import mmap
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mpips.datasets.ledger import Range
from mpips.errors import UserError
from mpips.planning.job import Job
from mpips.problems.accumulate import Tasks
from mpips.ps.worker import make_loader
from mpips.replay.computing import Computed, Computer


class Over(BaseException):
    """A replay is over, and nothing else of the program is to be done in this process.

    Args:
        code: Exit code.
        copied: Whether the process is a copy, whose end its maker waits for.
    """

    def __init__(self, code: int, copied: bool) -> None:
        super().__init__(code)
        self.code, self.copied = code, copied


class Area:
    """Memory that a replay and the copy for a worker share.

    Args:
        size: Number of parameters.
        dtype: Of them.

    Attributes:
        replica: What a gradient is computed from, shape (size,).
        grad: The gradient, likewise.
    """

    def __init__(self, size: int, dtype: np.dtype) -> None:
        memory = mmap.mmap(-1, max(1, 2 * size * dtype.itemsize))
        vectors = np.frombuffer(memory, dtype, 2 * size)
        self.replica, self.grad = vectors[:size], vectors[size:]


class Asked:
    """A copy's end: what it is to compute, and what it has found.

    Args:
        pipe: To the replay.
        area: Where vectors are.
    """

    def __init__(self, pipe: Connection, area: Area) -> None:
        self._pipe, self._area = pipe, area

    def tasks(self, job: Job) -> Tasks[None]:
        """Have gradients computed, one for each batch that comes, as long as any do.

        Raises:
            Over: If none will come.
        """
        area = self._area
        with make_loader(job) as loader:
            computer = Computer(job, loader)
            while True:
                batch = self._next()
                loss = yield from computer.gradient(batch, area.replica, area.grad)
                self.tell("computed", Computed(loss, job.rate_factor, job.frozen))
                yield None

    def _next(self) -> Range:
        try:
            batch: Range = self._pipe.recv()
        except EOFError:
            raise Over(0, copied=True) from None
        return batch

    def tell(self, kind: str, what: Any = None) -> None:
        """Tell the replay something."""
        with contextlib.suppress(BrokenPipeError):  # it has ended with an error
            self._pipe.send((kind, what))


class Apart:
    """Computes a worker's gradients in a copy of this process.

    Args:
        job: Of the worker's rank.
        work: What the copy does; it returns where the worker's loop is over.

    Raises:
        Over: In the copy, when all is done.
    """

    _living: "list[Apart]" = []  # noqa: RUF012  a copy closes its ends of the others' pipes

    def __init__(self, job: Job, work: Callable[[Asked], object]) -> None:
        assert job.worker_id is not None, "a server computes no gradient"
        self._worker, self._area = job.worker_id, Area(job.layout.size, job.dtype)
        self._pipe, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if not self._process:
            self._copied(Asked(theirs, self._area), work)
        theirs.close()
        self._living.append(self)

    def _copied(self, asked: Asked, work: Callable[[Asked], object]) -> None:
        for other in (*self._living, self):
            other._pipe.close()
        self._living.clear()
        try:
            work(asked)
            asked.tell("left")
        except Exception as error:
            told = str(error) if isinstance(error, UserError) else traceback.format_exc()
            asked.tell("failed", told)
            raise Over(1, copied=True) from None
        raise Over(0, copied=True)

    def compute(self, batch: Range, replica: np.ndarray, grad: np.ndarray) -> Computed:
        """Have a gradient computed; see `Computer.gradient`.

        Raises:
            UserError: If the program goes another way than in the run, with exit code 1.
        """
        np.copyto(self._area.replica, replica)
        kind, what = "ended", None
        with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):
            self._pipe.send(batch)
            kind, what = self._pipe.recv()
        if kind != "computed":
            raise self._differing(kind, what)
        np.copyto(grad, self._area.grad)
        assert isinstance(what, Computed), "so it says"
        return what

    def _differing(self, kind: str, what: str | None) -> UserError:
        told = {"left": "has left its loop", "ended": "has ended its process"}
        error = UserError(
            f"worker {self._worker} of the replay {told.get(kind, f'failed: {what}')}",
            "one more push, as in the run",
            "give the program the words and files that it had, and look for what else may differ",
        )
        error.code = 1
        return error

    def end(self) -> None:
        """Let the copy end. Blocks: until it has."""
        if self in self._living:
            self._living.remove(self)
            self._pipe.close()
            os.waitpid(self._process, 0)
