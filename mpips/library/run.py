"""`mpips.run`: one run of a program's own training function."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from mpips.checkpoint import need_whole
from mpips.checkpoint.run_folder import METRICS
from mpips.errors import Exit, UserError
from mpips.layout.tables import Table
from mpips.library.callbacks import Callback
from mpips.library.loop import Note
from mpips.library.optimizers import Optimizer
from mpips.library.program import Evaluate, Program
from mpips.library.start import Start, checked, limit_of, of_program
from mpips.library.worker import Worker
from mpips.mpi import abort, excepthook, signals
from mpips.mpi.collective_errors import CollectiveError, await_ranks, raise_on_all
from mpips.mpi.start import Comm, ranks_of
from mpips.problems.accumulate import follow
from mpips.session.metrics import Log
from mpips.session.training import Ended
from mpips.tables.saved_rows import find_rows

ProgramT = TypeVar("ProgramT", bound=Program)


@dataclass(frozen=True)
class Result:
    """Result of a run, on every rank.

    Attributes:
        params: The final parameters, by name; copies of this rank, of the given shapes and the
            option `dtype`.
        summary: Contents of ``summary.json`` in the run's folder; see ``mpips guide summary``.
        reason: Reason of the end: ``epochs``, ``steps``, ``target``, ``patience``, ``stopped`` (by
            `Worker.stop`), ``diverged``, or the name of the signal that asked for a saved end.
        code: Exit code, as the command line returns it: 0 when done, 85 when saved at a signal and
            not finished, 1 otherwise. End with ``sys.exit(result.code)``, which tells the job
            script. A program that never reads a code other than 0 is warned.
        out: The run's folder.
    """

    params: Mapping[str, np.ndarray]
    summary: Mapping[str, Any]
    reason: str
    code: int
    out: Path

    def __getattribute__(self, name: str) -> Any:
        if name == "code":
            excepthook.heed()
        return super().__getattribute__(name)

    def rows(self, table: str, ids: Any) -> np.ndarray:
        """Return rows of a table from the run's newest checkpoint; every run ends with one.

        Args:
            table: Name of the table.
            ids: See `Worker.pull_rows`.

        Returns:
            The rows, shape (*ids.shape, dim), of the run's dtype.

        Raises:
            UserError: If there is no such table or checkpoint, or the table has no row of an id.

        Collective: no. Blocks: while it reads all changed rows of the table.
        """
        return find_rows(need_whole(self.out)[0], table, ids)

    @property
    def average(self) -> dict[str, np.ndarray]:
        """Average of the parameters by the option `ema`, by name, read from the newest checkpoint.

        Raises:
            UserError: If there is no checkpoint, or no average in it.

        Collective: no. Blocks: while it reads the checkpoint.
        """
        saved, _ = need_whole(self.out)
        return saved.layout.views(saved.read_model(average=True))


def run(
    train: Callable[[Worker], object],
    params: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    *,
    comm: Comm | None = None,
    evaluate: Evaluate | None = None,
    held_out: Any = None,
    callbacks: Sequence[Callback] = (),
    tables: Mapping[str, Table] | None = None,
    **options: Any,
) -> Result:
    """Train: each worker calls `train`, and servers serve until all workers are done.

    Start the program by mpirun, as ``mpirun -n 4 python my_program.py``. A single rank suffices for
    ``mode="sync"``.

    Args:
        train: Function that each worker calls with its `Worker`. An exception in it ends the whole
            job, with its traceback, as on the command line. In a world of one rank it propagates.
        params: Initial parameters: names to arrays of real numbers, of the same shapes on every
            rank. They form one vector of the option `dtype`; its default is float64 if all arrays
            are float64, else float32. Each shard starts with the values of the rank that owns it.
            In a new run `train` may change these arrays before its loop, alike on every worker.
            None (``{}``) is allowed with tables.
        optimizer: The update rule, such as ``mpips.Adam(1e-3)``; by default the option's.
        comm: The ranks, an mpi4py communicator; by default all ranks that were started.
        evaluate: ``evaluate(params, batch)`` returns means over a batch of held-out samples:
            ``loss``, and ``accuracy`` for the option `target_accuracy`.
        held_out: Samples that are evaluated at intervals of the option `eval_every`, and at the
            end; as in `Worker.batches`, or a function that returns them. Only workers and
            evaluators call it.
        callbacks: Callbacks on steps, epochs, evaluations and checkpoints.
        tables: Tables of rows beside the parameters, by name; see `Worker.pull_rows`. The same on
            every rank. Modes async, ssp, sync and hybrid support tables.
        **options: Options of the command line, with ``_`` for ``-``: ``mode="ssp"``, ``servers=2``,
            ``out="runs/mine"``, ``resume="auto"``; ``mpips guide options`` lists them. Options of
            built-in models and data files are not allowed. Values are the same on every rank, but
            `out` may differ: that of rank 0 is used. `init_from` may be a mapping of names to
            arrays.

    Returns:
        The result, on every rank.

    Raises:
        UserError: If an option, the parameters, the data or the run's folder is invalid: on every
            rank, and before anything has started. If it is not caught, rank 0 prints it.

    Collective: yes, over `comm`. Blocks: until the run has ended.
    """
    given = train, params, optimizer, options, evaluate, held_out, callbacks, tables
    return run_program(partial(Program, *given), comm, limit_of(options))[0]


# If set, it is called with the program in place of a run, and does not return.
instead: Callable[[Program], NoReturn] | None = None


def run_program(
    make: Callable[[], ProgramT], comm: Comm | None, limit_s: float
) -> tuple[Result, ProgramT]:
    """Run a program, made by `make` on every rank when all ranks are present; see `run`.

    Collective: yes. Blocks: for the other ranks, up to `limit_s` seconds without a warning.
    """
    with running(make, comm, limit_s) as under_way:
        if under_way.worker is not None:
            under_way.program.train(under_way.worker)
    return under_way.result, under_way.program


class Running(Generic[ProgramT]):
    """A run in progress, on this rank.

    Attributes:
        program: The program.
        start: The run before its first step, with its ranks.
        worker: The argument of the training function on a worker; None on other ranks.
        result: Result of the run, set when the block of `running` has ended.
    """

    def __init__(self, program: ProgramT, start: Start) -> None:
        self.program, self.start = program, start
        self.worker = program.make_worker(start) if start.works else None
        if self.worker is not None:
            program.mark()
        self.result: Result

    def to_the_end(self) -> tuple[Ended, list[Note]]:
        """Go to the end of the run: after the loop on a worker, by serving on a server.

        Returns the end, and the logged lines that were too late to be sent.
        """
        if self.worker is None:
            return follow(None, self.start.tasks(None, None, None)), []
        self.worker.leave()
        assert self.worker.ended is not None, "the worker has left its loop"
        return self.worker.ended, self.worker.notes


@contextlib.contextmanager
def running(
    make: Callable[[], ProgramT], comm: Comm | None, limit_s: float
) -> Iterator[Running[ProgramT]]:
    """Run a program whose workers train within the block; servers serve when the block ends.

    Args:
        make: Makes the program, on every rank when all ranks are present.
        comm: See `run`.
        limit_s: Seconds to wait for the other ranks without a warning.

    Collective: yes. Blocks: for the other ranks, and at the end of the block until the run ends.
    """
    started = time.perf_counter()
    if abort.any_died():
        got = "a run after one in which a worker has died"
        raise UserError(got, "a world of ranks that all live", "start the program again")
    if instead is not None:
        with contextlib.closing(make()) as program:
            instead(program)
    world = ranks_of(comm)
    with of_program(world):
        with signals.noted():
            await_ranks(world, limit_s)
        program = raise_on_all(world, make)
    with of_program(world), signals.noted(), contextlib.closing(program):
        excepthook.disarm()
        checked_ones = raise_on_all(world, lambda: checked(program.options, program.optimizer))
        start = Start(world, program, checked_ones, started)
        program.begin(start)
        try:
            under_way = Running(program, start)
            yield under_way
            ended, late = under_way.to_the_end()
            program.finish(start)
        except CollectiveError:
            start.free()
            raise
        except BaseException as error:
            _end(start, error)
            raise
        result = under_way.result = _result(start, ended, late)
        start.part(ended.code)
        start.free()
    excepthook.expect_code(_unheeded(result) if world.rank == 0 and result.code else "")


def _end(start: Start, error: BaseException) -> None:
    """End the job after an error of this rank alone, since other ranks wait for this one."""
    if isinstance(error, UserError) and hasattr(start, "job") and start.job.begun:
        error.code = Exit.FAILED
    if start.comm.size > 1:
        abort.abort(abort.raised(error), abort.code_of(error))
    start.board.close()


def _unheeded(result: Result) -> str:
    """Return the warning for a program that ends with code 0 although its run did not finish."""
    outcome = "was saved, and is not finished" if result.code == Exit.SAVED else "failed"
    return f"the run in {result.out} {outcome} ({result.reason}): end with sys.exit(result.code)"


def _result(start: Start, ended: Ended, late: list[Note]) -> Result:
    ranks, summary = start.ranks, ended.summary
    brought = ranks.gather(late) if start.trains else None
    if notes := list(itertools.chain(*filter(None, brought or ()))):
        path, began = start.out / METRICS, start.job.started
        with contextlib.suppress(OSError), Log(path, began) as log:
            log.heard("log", notes)
    return Result(start.final_params(ended), summary, summary["stop_reason"], ended.code, start.out)
