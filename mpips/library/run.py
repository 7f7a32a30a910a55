"""`mpips.run`: one run of a program's own training function."""

import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpips.checkpoint import newest_whole
from mpips.cluster import ending, failures, signals, uncaught
from mpips.cluster.agreement import Agreed, await_ranks, everywhere
from mpips.cluster.start import Comm, ranks_of
from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.library.callbacks import Callback, Callbacks
from mpips.library.data import Samples
from mpips.library.loop import Loop
from mpips.library.model import Evaluate, MakeState, Parameters
from mpips.library.notes import Note, write_late
from mpips.library.optimizers import Optimizer
from mpips.library.start import Given, Start, checked, limit_of, of_program
from mpips.library.worker import Worker
from mpips.problems.accumulate import follow
from mpips.ps.saved_rows import find_rows
from mpips.session.training import Ended

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What a run leaves, on every rank.

    Attributes:
        params: The parameters at the end, by name; this rank's own copies.
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
            uncaught.heed()
        return super().__getattribute__(name)

    def rows(self, table: str, ids: Any) -> np.ndarray:
        """Return rows of a table from the run's newest checkpoint, which a run that is over has.

        Args:
            table: Its name.
            ids: As for `Worker.pull_rows`.

        Returns:
            The rows, shape (*ids.shape, dim).

        Raises:
            UserError: If there is no such table or checkpoint, or an id is none of its rows.

        Collective: no. Blocks: while it reads all that was changed of the table.
        """
        found, complaints = newest_whole(self.out)
        if found is None:
            raise UserError(f"no whole checkpoint in {self.out}: {'; '.join(complaints)}", "one")
        return find_rows(found, table, np.asarray(ids))


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
            that, else float32; a shard begins with the values of the rank that owns it.
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
            that of rank 0 counts.

    Returns:
        The result, on every rank.

    Raises:
        UserError: If an option, the parameters, the data or the run's folder cannot be: the same
            on every rank, and nothing was started. One that is not caught is told by rank 0.

    Collective: yes, over `comm`. Blocks: until the run is over.
    """
    program = Program(
        train, evaluate=evaluate, held_out=held_out, callbacks=callbacks, tables=tables or {}
    )
    return run_program(program, params, optimizer, comm, options)


@dataclass(frozen=True)
class Program:
    """What a program gives a run, and how its workers take it.

    Attributes:
        train: Called with a worker on each worker.
        make_worker: Makes it.
        begin: Called on every rank that has its share of the cores. Collective: no.
        finish: Called on every rank at the end, while its communicators are there. Collective.
        evaluate: See `run`; `held_out` likewise.
        samples: Makes held-out samples of what is given.
        callbacks: See `run`.
        sets_rate: Whether its workers may set a factor of the learning rate.
        statistics: Names of parameters that are none; see `Problem`.
        make_state: See `Parameters`.
        tables: See `run`.
    """

    train: Callable[[Any], object]
    make_worker: Callable[[Start], Loop] = Worker
    begin: Callable[[Start], None] = lambda start: None
    finish: Callable[[Start], None] = lambda start: None
    evaluate: Evaluate | None = None
    held_out: Any = None
    samples: Callable[[Any], Samples] = Samples
    callbacks: Sequence[Callback] = ()
    sets_rate: bool = False
    statistics: Sequence[str] = ()
    make_state: MakeState | None = None
    tables: Mapping[str, Table] = field(default_factory=dict)


# Called with a program, what it gives and its name, in place of a run; it does not return.
instead: Callable[[Program, Given, str], NoReturn] | None = None


def agreed(comm: Comm | None, make: Callable[[], T], options: Mapping[str, Any]) -> T:
    """Call `make` on every rank before a run begins; an error on any is raised on all.

    Args:
        comm: The ranks.
        make: Makes what all need.
        options: Of the run.

    Collective: yes, over `comm`, but where another process makes a run of the program again.
    """
    if instead is not None:
        return make()
    world = ranks_of(comm)
    with of_program(world):
        await_ranks(world, limit_of(options))
        return everywhere(world, make)


def run_program(
    program: Program,
    params: Mapping[str, Any],
    optimizer: Optimizer | None,
    comm: Comm | None,
    options: Mapping[str, Any],
) -> Result:
    """Run a program; see `run`. Collective: yes."""
    started = time.perf_counter()
    if failures.any_seen():
        got = "a run after one in which a worker has died"
        raise UserError(got, "a world of ranks that all live", "start the program again")
    if instead is not None:
        instead(program, *_given(program, params, started))
    world = ranks_of(comm)
    with of_program(world), signals.noted():
        await_ranks(world, limit_of(options))
        given, name = everywhere(world, lambda: _given(program, params, started))
        uncaught.disarm()
        start = Start(world, name, everywhere(world, lambda: checked(options, optimizer)), given)
        program.begin(start)
        try:
            ended, late = _train(program, start)
            program.finish(start)
        except Agreed:
            start.free()
            raise
        except BaseException as error:  # this rank's alone: the others wait for it
            if isinstance(error, UserError) and hasattr(start, "job") and start.job.begun:
                error.code = 1
            if world.size == 1:
                start.hide()
                raise
            code = error.code if isinstance(error, UserError) else 1
            ending.abort(ending.raised(error), code)
        result = _result(start, ended, late)
        start.part(ended.code)
        start.free()
    uncaught.expect_code(_unheeded(result) if world.rank == 0 and result.code else "")
    return result


def _unheeded(result: Result) -> str:
    """Return the warning for a program that would end as if its run had come to its end."""
    how = "was saved, and is not finished" if result.code == signals.EXIT_SAVED else "failed"
    return f"the run in {result.out} {how} ({result.reason}): end with sys.exit(result.code)"


def _given(program: Program, params: Mapping[str, Any], started: float) -> tuple[Given, str]:
    """Return what a program gives a run, and the run's name.

    Raises:
        UserError: If it cannot be.
    """
    held_out, callbacks = _held_out_of(program), Callbacks(program.callbacks)
    initial = Parameters(params, program.statistics, program.make_state, program.tables)
    given = Given(initial, program.evaluate, held_out, callbacks, program.sets_rate, started)
    return given, _name(program.train)


def _train(program: Program, start: Start) -> tuple[Ended, list[Note]]:
    """Run this rank's half; returns how it ended, and what was logged too late to be sent."""
    if not start.works:
        return follow(None, start.tasks(None, None, None)), []
    worker = program.make_worker(start)
    program.train(worker)
    worker.leave()
    assert worker.ended is not None, "it has left"
    return worker.ended, worker.notes.kept


def _result(start: Start, ended: Ended, late: list[Note]) -> Result:
    ranks, summary = start.ranks, ended.summary
    brought = ranks.gather(late) if start.trains else None
    if brought is not None:
        write_late(start.job, list(itertools.chain(*filter(None, brought))))
    assert summary is not None, "kept on every rank"
    return Result(start.final_params(ended), summary, summary["stop_reason"], ended.code, start.out)


def _held_out_of(program: Program) -> Callable[[], Samples | None]:
    """Return what makes the held-out samples on a worker.

    Raises:
        UserError: If they are given without what evaluates them, or the other way round.
    """
    held_out = program.held_out
    if (held_out is None) != (program.evaluate is None):
        given, lacks = ("evaluate", "held_out") if held_out is None else ("held_out", "evaluate")
        raise UserError(f"{given} without {lacks}", "both or neither")
    if held_out is None:
        return lambda: None
    return lambda: program.samples(held_out() if callable(held_out) else held_out)


def _name(train: Callable[[Any], object]) -> str:
    """Return what a run is called after: ``program.py:function``."""
    if not callable(train):
        got = f"train of type {type(train).__name__}"
        raise UserError(got, "a function that takes an mpips.Worker")
    function = inspect.unwrap(train)
    with contextlib.suppress(ValueError):  # of what is built in there may be no signature
        try:
            inspect.signature(train, follow_wrapped=False).bind(None)
        except TypeError as problem:
            got, expected = f"train that takes other arguments ({problem})", "a worker alone"
            raise UserError(got, expected, "write def train(worker):") from None
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    file = Path(code.co_filename).name if code is not None else ""
    file = file if file.endswith(".py") else "program.py"
    return f"{file}:{name if name.isidentifier() else 'train'}"
