"""Workers of a replay, and stand-ins for ranks and memory.

A program has variables and generators that each rank of the run had for itself. So a replay makes a
copy of its process for each worker, by fork(2), where the program comes to its run. The copy calls
the program's function with a worker that knows no ranks: what its loop asks for comes from the
replay, a batch at a time, and what it computes goes there. One process computes at a time.
"""

import contextlib
import math
import mmap
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from mpips.datasets.ledger import Range, part
from mpips.datasets.loader import Loader
from mpips.errors import Failure, UserError
from mpips.kernels.vectors import scale, sum_squares
from mpips.layout.roles import Roles
from mpips.mpi.collectives import Arrays
from mpips.mpi.pages import MAP_NORESERVE
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.optim import Ranges, clip_factor
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.problems.accumulate import Accumulator, Tasks, follow, make_loader, submit, taken
from mpips.tables.step_rows import RowsAtWork
from mpips.tools.replay.record import Part
from mpips.transport.rows import Section, Sections


class Computed(NamedTuple):
    """What is known of a gradient that has been computed.

    Attributes:
        loss: Mean loss over its samples.
        factor: Of the learning rate, as a program has set it.
        frozen: Arrays that a program has frozen, by their ranges.
        rows: What is pushed of tables, by server and table.
    """

    loss: float
    factor: float = 1.0
    frozen: Ranges = ()
    rows: tuple[tuple[Section, ...], ...] = ()


class Computer:
    """Computes a worker's gradients, clipped, from what is handed to it.

    Args:
        job: Of the worker's rank.
        loader: Of the job's data; all workers of a process may have the same one.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._job, self._loader, self._accumulator = job, loader, Accumulator(job)

    def gradient(
        self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray
    ) -> Tasks[float]:
        """Have the gradient of a step computed; returns the mean loss.

        Args:
            number: Of the push, 1 for the worker's first.
            batch: The samples; in rounds those of all workers.
            replica: What it is computed from, shape (n_params,).
            grad: Where it goes, likewise.
        """
        job, rows, whole = self._job, self._job.rows, batch
        if job.config.in_rounds:
            assert job.worker_id is not None, "a server computes no gradient"
            batch = part(batch, job.worker_id, len(job.cluster.roles.workers))
            job.versions[0] = job.base_step + number - 1
        if rows is not None:
            rows.begin(number)
        submit(job, self._loader, batch)
        params = job.layout.views(replica, writable=False)
        batches, samples = taken(job, self._loader, batch), batch[2] - batch[1]
        args = params, batches, samples, job.layout.views(grad), grad
        loss = yield from self._accumulator.gradient(*args)
        if job.config.clip:
            trained = grad[: job.trained]
            squares = sum_squares(trained) + (rows.sum_squares() if rows is not None else 0.0)
            factor = clip_factor(squares, job.config.clip)
            scale(trained, factor)
            if rows is not None:
                rows.scale(factor)
        if rows is not None and job.config.in_rounds and not math.isfinite(loss):
            rows.begin(number)
        elif rows is not None and batch != whole:
            rows.scale((batch[2] - batch[1]) / (whole[2] - whole[1]))
        return loss


class Here:
    """Computes a worker's gradients in this process.

    Args:
        job: Of the worker's rank.
        loader: Of the job's data.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._problem, self._computer = job.problem, Computer(job, loader)
        self._generators = _generators()
        self._args: tuple[Any, ...] = ()

    def begin(self, *args: Any) -> None:
        """Begin to compute a gradient; see `Computer.gradient`."""
        self._args = args

    def advance(self, read: Callable[[int], bool]) -> Computed | None:
        """Compute it, with the random generators of this worker's rank."""
        before = _generators()
        _set_generators(self._generators)
        try:
            return Computed(follow(self._problem, self._computer.gradient(*self._args)))
        finally:
            self._generators = _generators()
            _set_generators(before)

    def end(self) -> None:
        """Do nothing."""


def _generators() -> tuple[Any, ...]:
    """Return the states of `random`, of NumPy's legacy generator and of torch's."""
    torch = sys.modules.get("torch")
    theirs = torch.get_rng_state() if torch is not None else None
    return random.getstate(), np.random.get_state(), theirs


def _set_generators(states: tuple[Any, ...]) -> None:
    ours, legacy, theirs = states
    random.setstate(ours)
    np.random.set_state(legacy)
    if theirs is not None:
        sys.modules["torch"].set_rng_state(theirs)


class Ranks(Cluster):
    """The ranks of a recorded job, as one of them sees them. Nobody else is there.

    Args:
        part: The job.
        rank: Which one.
    """

    def __init__(self, part: Part, rank: int) -> None:
        world, about = part.about["world"], part.about
        self.rank, self.world = rank, int(world["ranks"])
        self.node_of = [int(node) for node in world["node_of"]]
        self.hosts = [f"node{node}" for node in self.node_of]
        self.roles = Roles(tuple(world["servers"]), tuple(about["workers"]), int(about["spares"]))
        self.threads, self.cores_a_rank = int(world["threads"]), 1.0
        self.arrays = _NoMessages()

    def progress(self) -> None:
        """Do nothing."""

    def send(self, dest: int | Iterable[int], kind: str, payload: Any = None) -> None:
        """Do nothing."""


class _NoMessages(Arrays):
    """Messages of arrays, where nobody sends any."""

    def __init__(self) -> None:
        """There is no communicator."""

    def begin_receives(self, tag: int) -> Iterator[Any]:
        """Yield none."""
        return iter(())


class Memory(Window):
    """The fields of ranks, shared with processes that are copies of this one.

    Args:
        fields: By rank.
    """

    def __init__(self, fields: Mapping[int, tuple[Field, ...]]) -> None:
        self._arrays = {
            (rank, field.name): _zeros(field) for rank, each in fields.items() for field in each
        }

    def view(self, rank: int, name: str) -> np.ndarray:
        """Return a field, as it lies in a segment."""
        return self._arrays[rank, name]


def _zeros(field: Field) -> np.ndarray:
    """Return an array in memory that costs what is written of it."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(1, field.nbytes), flags=flags)
    return np.frombuffer(
        memory, field.dtype, field.nbytes // np.dtype(field.dtype).itemsize
    ).reshape(field.shape)


class Over(BaseException):
    """A replay is over, and nothing else of the program is to be done in this process.

    Args:
        code: Exit code.
        copied: Whether the process is a copy, whose end its maker waits for.
    """

    def __init__(self, code: int, copied: bool) -> None:
        super().__init__(code)
        self.code, self.copied = code, copied


class Asked:
    """What a copy of the process shares with the replay, and its end of the pipe between them.

    Args:
        pipe: To the replay.
        job: Of the worker's rank.
        part: Its record.
        memory: Of servers and workers, where there are tables.

    Attributes:
        replica: What a gradient is computed from, shape (size,).
        grad: The gradient, likewise.
    """

    in_step = False

    def __init__(self, pipe: Connection, job: Job, part: Part, memory: Memory) -> None:
        self.pipe, self._part, self._memory = pipe, part, memory
        size, dtype = job.layout.size, job.dtype
        pages = mmap.mmap(-1, max(1, 2 * size * dtype.itemsize))
        self.replica, self.grad = np.frombuffer(pages, dtype, 2 * size).reshape(2, size)

    def tasks(self, job: Job) -> Tasks[None]:
        """Have gradients computed, one for each batch that comes, as long as any do.

        Raises:
            Over: If none will come.
        """
        if tables := tables_of(job):
            ranks = Ranks(self._part, job.cluster.rank)
            ranks.node_of = [0] * ranks.world  # a replay has all memory at hand
            job.rows = RowsAtWork(ranks, self._memory, tables, held=self)
        with make_loader(job) as loader:
            computer = Computer(job, loader)
            while True:
                number, batch = self._heard()
                loss = yield from computer.gradient(number, batch, self.replica, self.grad)
                self.tell("computed", Computed(loss, job.rate_factor, job.frozen))
                yield None

    def each(self, servers: Iterable[int], kind: int) -> Iterator[int]:
        """Yield servers as they come to the versions at which their rows were read."""
        if wanted := list(servers):
            self.tell("reads", wanted)
        for _ in wanted:
            yield self._heard()
            self.tell("read")

    def _heard(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise Over(0, copied=True) from None

    def tell(self, kind: str, what: Any = None) -> None:
        """Tell the replay something."""
        with contextlib.suppress(BrokenPipeError):  # it has ended with an error
            self.pipe.send((kind, what))


class WorkerProcess:
    """Computes a worker's gradients in a copy of this process.

    Args:
        job: Of the worker's rank.
        part: Its record.
        memory: Of servers and workers, where there are tables.
        work: What the copy does; it returns where the worker's loop is over.

    Raises:
        Over: In the copy, when all is done.
    """

    _living: "list[WorkerProcess]" = []  # noqa: RUF012  a copy closes its ends of the others' pipes

    def __init__(
        self, job: Job, part: Part, memory: Memory, work: Callable[[Asked], object]
    ) -> None:
        assert job.worker_id is not None, "a server computes no gradient"
        self._worker, self._servers = job.worker_id, len(job.cluster.roles.servers)
        rank = job.cluster.rank
        self._sections = [Sections(memory, rank, table.name) for table in tables_of(job)]
        self._wants: list[int] = []  # servers whose rows are to be read
        self._pipe, theirs = Pipe()
        self._asked = Asked(theirs, job, part, memory)
        self._number, self._grad = 0, self._asked.grad
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if not self._process:
            self._copied(work)
        theirs.close()
        self._living.append(self)

    def _copied(self, work: Callable[[Asked], object]) -> None:
        asked = self._asked
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

    def begin(self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray) -> None:
        """Begin to have a gradient computed; see `Computer.gradient`."""
        np.copyto(self._asked.replica, replica)
        self._number, self._grad = number, grad
        self._say((number, batch))

    def advance(self, read: Callable[[int], bool]) -> Computed | None:
        """Get on with it; None where it has to read rows of a server of another version.

        Args:
            read: Whether the worker reads a server's rows at the version that it has, now.

        Raises:
            UserError: If the program goes another way than in the run, with exit code 1.
        """
        while True:
            for server in [k for k in self._wants if read(k)]:
                self._say(server)
                self._hear("read")
                self._wants.remove(server)
            if self._wants:
                return None
            kind, what = self._hear("reads", "computed")
            if kind == "computed":
                np.copyto(self._grad, self._asked.grad)
                return what._replace(rows=self._rows())
            self._wants = what

    def _rows(self) -> tuple[tuple[Section, ...], ...]:
        """Return copies of what the push has of tables."""
        return tuple(
            tuple(Section(*map(np.copy, each.of(self._number, k))) for each in self._sections)
            for k in range(self._servers)
        )

    def _say(self, what: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it has said last tells why
            self._pipe.send(what)

    def _hear(self, *expected: str) -> tuple[str, Any]:
        kind, what = "ended", None
        with contextlib.suppress(EOFError, ConnectionResetError):
            kind, what = self._pipe.recv()
        if kind not in expected:
            raise self._differing(kind, what)
        return kind, what

    def _differing(self, kind: str, what: str | None) -> UserError:
        told = {"left": "has left its loop", "ended": "has ended its process"}
        return Failure(
            f"worker {self._worker} of the replay {told.get(kind, f'failed: {what}')}",
            "one more push, as in the run",
            "give the program the words and files that it had, and look for what else may differ",
        )

    def end(self) -> None:
        """Let the copy end. Blocks: until it has."""
        if self in self._living:
            self._living.remove(self)
            self._pipe.close()
            os.waitpid(self._process, 0)
