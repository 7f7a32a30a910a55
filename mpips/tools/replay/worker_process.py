"""Workers of a replay, and replacements for ranks and windows.

Each rank of a run has its own variables and random generators of the program. So a replay forks a
process for each worker when the program calls `mpips.run`. This process runs the program's loop.
It receives one batch at a time from the replay, and sends the gradient back. Only one process
computes at a time.
"""

import contextlib
import math
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from mpips.datasets.ledger import Range, part
from mpips.datasets.loader import Loader
from mpips.errors import Failure, UserError
from mpips.kernels.vectors import scale, sum_squares
from mpips.launch.mpirun import when_orphaned
from mpips.layout.roles import Roles
from mpips.mpi.collectives import Arrays
from mpips.mpi.pages import shared_zeros
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.optim import Ranges, clip_factor
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.problems.accumulate import Accumulator, Tasks, follow, make_loader, submit, taken
from mpips.tables.step_rows import StepRows
from mpips.tools.replay.record import Part
from mpips.transport.rows import Section, Sections


class Computed(NamedTuple):
    """Results of a computed gradient, beside the gradient itself.

    Attributes:
        loss: Mean loss over the batch.
        factor: Factor of the learning rate that the program has set.
        frozen: Ranges of parameters that the program has frozen.
        rows: Gradients of table rows, by server and table.
    """

    loss: float
    factor: float = 1.0
    frozen: Ranges = ()
    rows: tuple[tuple[Section, ...], ...] = ()


class Computer:
    """Computation of a worker's gradients.

    Args:
        job: Job of the worker's rank.
        loader: Loader of the job's data, which workers of one process may share.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._job, self._loader, self._accumulator = job, loader, Accumulator(job)

    def gradient(
        self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray
    ) -> Tasks[float]:
        """Compute the clipped gradient of a step, and return the mean loss.

        Args:
            number: Number of the push, 1 for the worker's first.
            batch: The samples; in rounds, those of all workers.
            replica: Parameters from which to compute, shape (n_params,).
            grad: Gets the gradient, shape (n_params,).
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


class InProcess:
    """Computation of a worker's gradients in this process.

    Args:
        job: Job of the worker's rank.
        loader: Loader of the job's data.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self._problem, self._computer = job.problem, Computer(job, loader)
        self._generators = _generators()
        self._args: tuple[Any, ...] = ()

    def begin(self, *args: Any) -> None:
        """Set the arguments of the next gradient; see `Computer.gradient`."""
        self._args = args

    def advance(self, read: Callable[[int], bool]) -> Computed | None:
        """Compute the gradient, with the states of this worker's random generators."""
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
    """Return the states of `random`, of NumPy's legacy generator and of torch's generator."""
    torch = sys.modules.get("torch")
    of_torch = torch.get_rng_state() if torch is not None else None
    return random.getstate(), np.random.get_state(), of_torch


def _set_generators(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if of_torch is not None:
        sys.modules["torch"].set_rng_state(of_torch)


class JobRanks(Cluster):
    """The ranks of a recorded job, as one rank sees them, without communication.

    Args:
        part: Record of the job.
        rank: The rank.
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
    """Messages of arrays without any other rank."""

    def __init__(self) -> None:
        """Have no communicator."""

    def begin_receives(self, tag: int) -> Iterator[Any]:
        """Return an iterator without messages."""
        return iter(())


class Memory(Window):
    """Window fields of all ranks, in memory that forked processes share.

    Args:
        fields: Fields by rank.
    """

    def __init__(self, fields: Mapping[int, tuple[Field, ...]]) -> None:
        self._arrays = {
            (rank, field.name): shared_zeros(field.dtype, field.shape)
            for rank, each in fields.items()
            for field in each
        }

    def view(self, rank: int, name: str) -> np.ndarray:
        """Return the array of a rank's field."""
        return self._arrays[rank, name]


class ReplayEnded(BaseException):
    """End of a replay, raised to leave the program in this process."""


class ReplayLink:
    """Link from a worker's process to the replay: a pipe and shared vectors.

    Args:
        pipe: The worker's end of the pipe.
        job: Job of the worker's rank.
        part: Record of the job.
        memory: Window fields of servers and workers, for tables.

    Attributes:
        replica: Parameters from which to compute a gradient, shape (n_params,).
        grad: The gradient, shape (n_params,).
    """

    in_step = False

    def __init__(self, pipe: Connection, job: Job, part: Part, memory: Memory) -> None:
        self.pipe, self._part, self._memory = pipe, part, memory
        self.replica, self.grad = shared_zeros(job.dtype.str, (2, job.layout.size))

    def tasks(self, job: Job) -> Tasks[None]:
        """Compute a gradient for each batch that the replay sends.

        Raises:
            ReplayEnded: At the end of the replay.
        """
        if tables := tables_of(job):
            ranks = JobRanks(self._part, job.cluster.rank)
            ranks.node_of = [0] * ranks.world  # so that workers read all rows in shared memory
            job.rows = StepRows(ranks, self._memory, tables, held=self)
        with make_loader(job) as loader:
            computer = Computer(job, loader)
            while True:
                number, batch = self.receive()
                loss = yield from computer.gradient(number, batch, self.replica, self.grad)
                self.send("computed", Computed(loss, job.rate_factor, job.frozen))
                yield None

    def each(self, servers: Iterable[int], kind: int) -> Iterator[int]:
        """Yield servers, each when it has reached the version at which its rows were read."""
        if wanted := list(servers):
            self.send("reads", wanted)
        for _ in wanted:
            yield self.receive()
            self.send("read")

    def receive(self) -> Any:
        """Receive a message of the replay. Blocks: until there is one.

        Raises:
            ReplayEnded: At the end of the replay.
        """
        message = self.pipe.recv()
        if message is None:
            raise ReplayEnded
        return message

    def send(self, kind: str, payload: Any = None) -> None:
        """Send a message to the replay."""
        with contextlib.suppress(BrokenPipeError):  # the replay has ended with an error
            self.pipe.send((kind, payload))


def _work(link: ReplayLink, work: Callable[[ReplayLink], object]) -> None:
    """Call `work` in the process of a worker, and report its end to the replay."""
    when_orphaned(signal.SIGKILL)()
    with contextlib.suppress(ReplayEnded):
        try:
            work(link)
            link.send("left")
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else traceback.format_exc()
            link.send("failed", text)


class WorkerProcess:
    """Computation of a worker's gradients in a forked process.

    Args:
        job: Job of the worker's rank.
        part: Record of the job.
        memory: Window fields of servers and workers, for tables.
        work: Function that the forked process calls; it returns when the worker's loop has ended.
    """

    def __init__(
        self, job: Job, part: Part, memory: Memory, work: Callable[[ReplayLink], object]
    ) -> None:
        assert job.worker_id is not None, "a server computes no gradient"
        self._worker, self._servers = job.worker_id, len(job.cluster.roles.servers)
        rank = job.cluster.rank
        self._sections = [Sections(memory, rank, table.name) for table in tables_of(job)]
        self._wants: list[int] = []  # servers whose rows the worker must still read
        self._pipe, other_end = Pipe()
        self._link = ReplayLink(other_end, job, part, memory)
        self._number, self._grad = 0, self._link.grad
        self._process = get_context("fork").Process(target=_work, args=(self._link, work))
        self._process.start()
        other_end.close()

    def begin(self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray) -> None:
        """Request a gradient; see `Computer.gradient`."""
        np.copyto(self._link.replica, replica)
        self._number, self._grad = number, grad
        self._send((number, batch))

    def advance(self, read: Callable[[int], bool]) -> Computed | None:
        """Continue the gradient; returns None if the worker must read rows at a later version.

        Args:
            read: Function that returns whether the worker reads a server's rows at the server's
                current version.

        Raises:
            UserError: If the program behaves differently than in the run (exit code 1).
        """
        while True:
            for server in [k for k in self._wants if read(k)]:
                self._send(server)
                self._receive("read")
                self._wants.remove(server)
            if self._wants:
                return None
            kind, payload = self._receive("reads", "computed")
            if kind == "computed":
                np.copyto(self._grad, self._link.grad)
                return payload._replace(rows=self._rows())
            self._wants = payload

    def _rows(self) -> tuple[tuple[Section, ...], ...]:
        """Return copies of the push's gradients of table rows, by server and table."""
        return tuple(
            tuple(Section(*map(np.copy, each.of(self._number, k))) for each in self._sections)
            for k in range(self._servers)
        )

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_receive` then finds the reason
            self._pipe.send(message)

    def _receive(self, *expected: str) -> tuple[str, Any]:
        kind, payload = "ended", None
        with contextlib.suppress(EOFError, ConnectionResetError):
            kind, payload = self._pipe.recv()
        if kind not in expected:
            raise self._differing(kind, payload)
        return kind, payload

    def _differing(self, kind: str, text: str | None) -> UserError:
        reasons = {"left": "has left its loop", "ended": "has ended its process"}
        return Failure(
            f"worker {self._worker} of the replay {reasons.get(kind, f'failed: {text}')}",
            "one more push, as in the run",
            "give the program the words and files that it had, and look for what else may differ",
        )

    def end(self) -> None:
        """End the forked process. Blocks: until it has ended."""
        self._send(None)
        self._process.join()
