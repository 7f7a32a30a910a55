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
    """What a run leaves, on every rank.

    Attributes:
        params: The parameters at the end, by name; this rank's own copies, of the shapes that were
            given and the option `dtype`.
        summary: What ``summary.json`` in the run's folder holds; see ``mpips guide summary``.
        reason: Why it ended: ``epochs``, ``steps``, ``target``, ``patience``, ``stopped`` (by
            `Worker.stop`), ``diverged``, or the name of the signal that asked to save and end.
        code: Exit code that the command line would end with: 0 when done, 85 when saved at a
            signal and not finished, 1 otherwise. End with ``sys.exit(result.code)``, which tells
            the job script: a program that has not looked at a code that is not 0 is warned.
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
        """Return rows of a table from the run's newest checkpoint, which a run that is over has.

        Args:
            table: Its name.
            ids: As for `Worker.pull_rows`.

        Returns:
            The rows, shape (*ids.shape, dim), of the run's dtype.

        Raises:
            UserError: If there is no such table or checkpoint, or an id is none of its rows.

        Collective: no. Blocks: while it reads all that was changed of the table.
        """
        return find_rows(need_whole(self.out)[0], table, np.asarray(ids))

    @property
    def average(self) -> dict[str, np.ndarray]:
        """The average of the parameters that the option `ema` keeps, by name, from the checkpoint.

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
    """Train: `train` runs on every worker, and servers serve until all workers are done.

    A program that calls it is started by mpirun, as ``mpirun -n 4 python my_program.py``; on one
    rank alone ``mode="sync"`` does.

    Args:
        train: Called with a `Worker` on each worker. An exception in it ends the whole job, with
            its traceback, as on the command line; in a world of one rank it is raised as it is.
        params: Initial parameters: names to arrays of real numbers, of the same shapes on every
            rank. They are kept as one vector of the option `dtype`, by default float64 if all are
            that, else float32; a shard begins with the values of the rank that owns it. What every
            worker's `train` changes in these arrays before its loop counts, in a new run.
            None (``{}``) will do where there are tables.
        optimizer: The update rule, such as ``mpips.Adam(1e-3)``; by default the option's.
        comm: The ranks, an mpi4py communicator; by default all that were started.
        evaluate: ``evaluate(params, batch)`` returns means over a batch of held-out samples,
            ``loss`` among them, and ``accuracy``, which `target_accuracy` looks at.
        held_out: Samples that are evaluated as the option `eval_every` says, and at the end; as
            `Worker.batches` takes them, or a function that returns such: it is called on workers
            alone, and on evaluators.
        callbacks: Told of steps, epochs, evaluations and checkpoints.
        tables: Tables of rows beside the parameters, by name; see `Worker.pull_rows`. The same on
            every rank. Modes async, ssp and sync have them.
        **options: Those of the command line, with ``_`` for ``-``: ``mode="ssp"``, ``servers=2``,
            ``out="runs/mine"``, ``resume="auto"``; ``mpips guide options`` lists them. What names
            a built-in model or a data file is left out. They are the same on every rank; of `out`
            that of rank 0 counts. `init_from` may be a mapping of names to arrays.

    Returns:
        The result, on every rank.

    Raises:
        UserError: If an option, the parameters, the data or the run's folder cannot be: the same
            on every rank, and nothing was started. One that is not caught is told by rank 0.

    Collective: yes, over `comm`. Blocks: until the run is over.
    """
    given = train, params, optimizer, options, evaluate, held_out, callbacks, tables
    return run_program(partial(Program, *given), comm, limit_of(options))[0]


# Called with a program in place of a run; it does not return.
instead: Callable[[Program], NoReturn] | None = None


def run_program(
    make: Callable[[], ProgramT], comm: Comm | None, limit_s: float
) -> tuple[Result, ProgramT]:
    """Run a program, which `make` makes on every rank once all have come; see `run`.

    Collective: yes. Blocks: for the other ranks, for so many seconds.
    """
    with running(make, comm, limit_s) as under_way:
        if under_way.worker is not None:
            under_way.program.train(under_way.worker)
    return under_way.result, under_way.program


class Running(Generic[ProgramT]):
    """A run under way, on this rank.

    Attributes:
        program: What the program gives it.
        start: The run, as far as it is known.
        worker: What drives it on a worker; None elsewhere.
        result: What it leaves, once the block of `running` is over.
    """

    def __init__(self, program: ProgramT, start: Start) -> None:
        self.program, self.start = program, start
        self.worker = program.make_worker(start) if start.works else None
        if self.worker is not None:
            program.mark()
        self.result: Result

    def to_the_end(self) -> tuple[Ended, list[Note]]:
        """Go to the end: on a worker whose loop is over, and on a server, which serves.

        Returns how it ended, and what was logged too late to be sent.
        """
        if self.worker is None:
            return follow(None, self.start.tasks(None, None, None)), []
        self.worker.leave()
        assert self.worker.ended is not None, "it has left"
        return self.worker.ended, self.worker.notes


@contextlib.contextmanager
def running(
    make: Callable[[], ProgramT], comm: Comm | None, limit_s: float
) -> Iterator[Running[ProgramT]]:
    """Run a program whose workers train within the block; servers serve when the block is left.

    Args:
        make: Makes the program on every rank, once all have come.
        comm: As in `run`.
        limit_s: How long to wait for the other ranks without a warning.

    Collective: yes. Blocks: for the other ranks, and when the block is left until the run is over.
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
    """End the job at what this rank alone has raised: the others wait for it, if there are any."""
    if isinstance(error, UserError) and hasattr(start, "job") and start.job.begun:
        error.code = Exit.FAILED
    if start.comm.size > 1:
        code = error.code if isinstance(error, UserError) else Exit.FAILED
        abort.abort(abort.raised(error), code)
    start.hide()


def _unheeded(result: Result) -> str:
    """Return the warning for a program that would end as if its run had come to its end."""
    how = "was saved, and is not finished" if result.code == Exit.SAVED else "failed"
    return f"the run in {result.out} {how} ({result.reason}): end with sys.exit(result.code)"


def _result(start: Start, ended: Ended, late: list[Note]) -> Result:
    ranks, summary = start.ranks, ended.summary
    brought = ranks.gather(late) if start.trains else None
    if notes := list(itertools.chain(*filter(None, brought or ()))):
        path, began = start.out / METRICS, start.job.started
        with contextlib.suppress(OSError), Log(path, began) as log:
            log.heard("log", notes)
    return Result(start.final_params(ended), summary, summary["stop_reason"], ended.code, start.out)
