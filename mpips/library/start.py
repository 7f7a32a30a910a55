"""Start of a program's run on every rank: options, ranks, job."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mpips.config import OPTIONS, Config
from mpips.config.command_line import CommandLine, in_python
from mpips.config.groups import text_of
from mpips.config.names import ROUND_MODES
from mpips.config.option import meant
from mpips.datasets import DataInfo, Dataset
from mpips.errors import UserError, reworded
from mpips.launch import heartbeat
from mpips.library.data import Samples, dataset, info_of
from mpips.library.initial import notes_of, share_changes
from mpips.library.optimizers import Optimizer, example
from mpips.library.program import Program
from mpips.mpi.collective_errors import (
    CollectiveError,
    layouts_alike,
    on_root,
    raise_on_all,
    told_once,
)
from mpips.mpi.collectives import PIECE, cluster_subset, free, gather_all
from mpips.mpi.evaluator_link import Link, agreed
from mpips.mpi.start import Comm, check_world, whole_world
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.problems.accumulate import Tasks
from mpips.problems.base import Arrays
from mpips.session import folder
from mpips.session.evaluator import Evaluator, checked_samples
from mpips.session.setup import assign_roles, held_run, make_job, shown, tell_ranks, traced
from mpips.session.training import Ended, train

# The only options of models and data that a program has; its arguments replace the others.
OPTIONS_TOO = ("dtype", "batch_size", "accumulate", "shuffle")
NOT_OPTIONS = {"eval_only"} | {
    name for name, o in OPTIONS.items() if o.group in ("model", "data") and name not in OPTIONS_TOO
}
ARGUMENTS = ("held_out", "evaluate", "callbacks", "tables", "comm")  # arguments, but no options
DATASET = "given"

T = TypeVar("T")


@contextlib.contextmanager
def of_program(comm: Comm) -> Iterator[None]:
    """Within the block, word errors for a program, and have rank 0 print them once."""
    with reworded(in_python), told_once(comm):
        yield


def checked(options: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Any]:
    """Return options of a program as the configuration has them, with those of the optimizer.

    Raises:
        UserError: If a name is not an option of programs, or a value is invalid.
    """
    settings = dict(options)
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            kind = optimizer if isinstance(optimizer, type) else type(optimizer)
            shown = repr(optimizer) if kind is str else f"{kind.__module__}.{kind.__qualname__}"
            raise UserError(f"optimizer {shown}", "an mpips optimizer", f"such as {example(kind)}")
        for name in sorted(optimizer.options().keys() & settings.keys()):
            got = f"{name}={settings[name]!r} beside optimizer={optimizer!r}"
            raise UserError(got, f"one {name}", f"leave out {name}={settings[name]!r}")
        settings |= optimizer.options()
    for name, value in settings.items():
        if name not in OPTIONS or name in NOT_OPTIONS:
            legal = [known for known in OPTIONS if known not in NOT_OPTIONS]
            expected = "one of those that python -m mpips guide options lists"
            if name in NOT_OPTIONS:
                expected += ", but for those of models and data: a program has its own"
            raise UserError(f"option {name!r}", expected, meant(name, [*legal, *ARGUMENTS]))
        if isinstance(value, (Path, np.generic)):  # such as a rate that NumPy has computed
            value = str(value) if isinstance(value, Path) else value.item()
        if name == "groups" and isinstance(value, (list, tuple)):
            value = text_of(value)
        if name == "resume" and isinstance(value, bool):
            value = "yes" if value else ""
        settings[name] = OPTIONS[name].check(value)
    return settings


def limit_of(options: Mapping[str, Any]) -> float:
    """Return the supervisor's timeout in seconds, or that of options that are not checked yet."""
    given = options.get("timeout")
    own = given if isinstance(given, int | float) else OPTIONS["timeout"].default
    return heartbeat.timeout_s() or max(0.0, own)


class Start:
    """A program's run from its roles to its end; before the data is known, it has no job yet.

    Args:
        comm: The ranks.
        program: The program.
        options: As `checked` returns them, the same on every rank; of `out` rank 0's is used.
        started: Time when the run began, by `time.perf_counter`.

    Attributes:
        comm: The communicator, as given, like `program`.
        ranks: The ranks that train, or, on an evaluator, the evaluators; freed at the end.
        workers: The communicator of the workers.
        config: The configuration, as far as it is known before the loop over the batches.
        trains: Whether this rank trains; else it is an evaluator.
        job: The job, on a rank that trains, once the loop has begun.
        out: The run's folder, on every rank, once the loop has begun.
        board: Open while this rank is on the status board; closes what the loop holds, too.

    Collective: yes.
    """

    def __init__(
        self, comm: Comm, program: Program, options: dict[str, Any], started: float
    ) -> None:
        self.comm, self.program, self._started = comm, program, started
        options = {"dtype": program.dtype, **options}
        _alike(self.comm, options)
        self._options = {**options, "problem": program.name, "dataset": DATASET}
        self.config: Config = on_root(self.comm, self._first_look)
        layouts_alike(self.comm, program.layout)
        _alike(self.comm, program.same, "load it on every rank, or seed its random numbers")
        count = self.config.evaluators
        self._link = Link(self.comm, count) if count else None
        self.trains = self._link is None or not self._link.evaluates
        everyone = self._link or comm
        self.ranks: Cluster = agreed(self._link, lambda: assign_roles(everyone, self.config))
        self.board = contextlib.ExitStack()
        self._where = self.board.enter_context(shown(self.ranks, self.config, self._link))
        self.workers = cluster_subset(self.ranks, self.ranks.roles.workers)
        self._evaluator: Evaluator | None = None
        self.job: Job
        self.out: Path

    def _first_look(self) -> Config:
        check_world(whole_world())
        config = folder.find_config(self._line({}))[0]  # a resumed run has its own mode
        if self.comm.size == 1 and config.mode not in ROUND_MODES:
            remedy = 'start several by mpirun, or give mode="sync"'
            raise UserError(f"mode {config.mode!r} on one rank", "a server and a worker", remedy)
        return config

    def _line(self, more: Mapping[str, Any]) -> CommandLine:
        return CommandLine(None, {**self._options, **more}, frozenset())

    def tasks(
        self, make: Callable[[], Samples] | None, batch_size: int | None, epochs: int | None
    ) -> Tasks[Ended]:
        """Train: yield the gradient tasks of this rank, and return the end of the run.

        Args:
            make: Returns the samples, on workers; None on servers.
            batch_size: Samples in a batch, the same on every worker; None for the option.
            epochs: Passes over the data, the same on every worker; None for the option.

        Raises:
            CollectiveError: On every rank, if the run cannot begin.
        """
        comm = self.comm
        given = {"batch_size": batch_size, "epochs": epochs}
        own = {name: value for name, value in given.items() if value is not None}
        arguments = raise_on_all(comm, lambda: checked(own, None))
        more = _alike(comm, arguments if make is not None else None)  # only workers have any
        changed = share_changes(self)
        with held_run(comm, lambda: _find_run(self._line(more))) as run:
            self.out = run.out
            run.notes += notes_of(self.program, changed, run.resumed)
            ended = (yield from self._train(run, make)) if self.trains else self._follow(run)
        if self._link is not None:
            ended.summary = self.share(ended.summary)
            for begin in range(0, ended.params.size, PIECE):
                piece = ended.params[begin : begin + PIECE]
                piece[:] = self.share(piece)
        return ended

    def _train(self, run: folder.Run, make: Callable[[], Samples] | None) -> Tasks[Ended]:
        if run.config.on_death == "shrink":
            got, remedy = "on_death 'shrink' in a program", "leave it out: the launcher restarts it"
            raise CollectiveError(str(UserError(got, "'restart'", remedy)))
        tell_ranks(self.ranks, run, self._where, self._link)
        program = self.program
        more = self._started, partial(self._open, make), lambda _, *given: program.of_job(*given)
        self.job = agreed(self._link, lambda: make_job(run, self.ranks, *more))
        if self._link is not None:
            _alike(self.comm, {"held-out samples": self.job.info.n_test})
        self.job.sets_rate = program.sets_rate
        return (yield from train(self.job, run, True, program.callbacks.event, self._link))

    def _follow(self, run: folder.Run) -> Ended:
        """Evaluate until the run has ended, on an evaluator."""
        assert self._link is not None, "this rank is an evaluator"
        config, link, program = run.config, self._link, self.program

        def make() -> Evaluator:
            samples = checked_samples(program.held_out(), config, "give held_out and evaluate")
            problem = program.of_job(info_of(DATASET, 0, samples.n), config)
            return Evaluator(link, self.ranks, samples, problem, config)

        self._evaluator = agreed(link, lambda: raise_on_all(self.ranks.comm, make))
        _alike(self.comm, {"held-out samples": self._evaluator.samples})
        params = np.empty(program.layout.size, config.dtype)
        with traced(config, self.ranks, run.out, link):
            return Ended(self._evaluator.serve(), params)

    def pull_saved(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Return rows of the checkpoint that this evaluator evaluates."""
        assert self._evaluator is not None, "this rank is an evaluator"
        return self._evaluator.pull(table, ids)

    def _open(
        self, make: Callable[[], Samples] | None, run: folder.Run, ranks: Cluster
    ) -> tuple[DataInfo, Dataset | None]:
        """Make the data on workers; returns its description on all ranks. Collective: yes."""

        def build() -> Dataset | None:
            return dataset(DATASET, make(), self.program.held_out()) if make is not None else None

        data = raise_on_all(ranks.comm, build)
        counts = None
        if data is not None:
            counts = {"samples": data.info.n_train, "held-out samples": data.info.n_test}
        remedy = "give every worker all of the data: batches are shared"
        n, held_out = _alike(ranks.comm, counts, remedy).values()
        raise_on_all(ranks.comm, lambda: _check_data(run.config, n, held_out))
        return info_of(DATASET, n, held_out), data

    @property
    def step(self) -> int | None:
        """Number of updates in this worker's parameters; None before the loop has begun."""
        return int(self.job.versions[0]) if hasattr(self, "job") else None

    def final_params(self, ended: Ended) -> Arrays:
        """Return the final parameters of a run by name."""
        return self.program.layout.views(ended.params)

    @property
    def works(self) -> bool:
        """Whether this rank is a worker."""
        return self.trains and self.ranks.rank in self.ranks.roles.workers

    def share(self, value: T) -> T:
        """Return a value of the training ranks on all ranks. Collective: over all ranks."""
        return value if self._link is None else self._link.share(value)

    def part(self, code: int) -> None:
        """End together with evaluators, with the job's exit code. Collective: over all ranks."""
        if self._link is not None:
            self._link.part(code, self.ranks.failures.lost)

    def free(self) -> None:
        """Free the communicators, unless ranks are missing. Collective: yes."""
        self.board.close()
        if self._link is not None and self._link.missing:
            return
        if not self.ranks.failures.lost:  # freeing would wait for the dead ranks
            free(self.workers)
        self.ranks.free()
        if self._link is not None:
            self._link.free()


def _alike(comm: Comm, values: Mapping[str, Any] | None, remedy: str = "") -> Mapping[str, Any]:
    """Return the mapping that all ranks have alike, except for `out`.

    Args:
        comm: The ranks.
        values: This rank's mapping; None if it has none.
        remedy: Remedy in the error.

    Raises:
        CollectiveError: On every rank, if the mappings differ.
    """
    by_rank = {rank: mine for rank, mine in enumerate(gather_all(comm, values)) if mine is not None}
    first, expected = next(iter(by_rank.items()))

    def check() -> None:
        for rank, mine in by_rank.items():
            for name in sorted({*mine, *expected} - {"out"}):
                if mine.get(name) != expected.get(name):
                    each = [repr(o[name]) if name in o else "not given" for o in (mine, expected)]
                    got = f"{name} {each[0]} on rank {rank}"
                    raise UserError(got, f"{each[1]}, as on rank {first}", remedy)

    raise_on_all(comm, check)
    return expected


def _find_run(line: CommandLine) -> folder.Run:
    """Find a run, and note its number of epochs if the program does not give its length."""
    run = folder.find_run(line)
    if not run.resumed and not {"epochs", "steps"} & line.options.keys():
        run.notes.append(f"the loop takes {run.config.epochs} epochs: epochs= was not given")
    return run


def _check_data(config: Config, samples: int, held_out: int) -> None:
    if config.batch_size > samples:
        got = f"batch_size {config.batch_size}"
        raise UserError(got, f"at most {samples}, the samples of the data")
    if config.target_accuracy and not held_out:
        got = f"target_accuracy {config.target_accuracy} without held-out samples"
        remedy = "give held_out and evaluate, or target_accuracy=0"
        raise UserError(got, "samples that it is measured on", remedy)
