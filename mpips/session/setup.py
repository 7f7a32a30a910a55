"""Setup of a job: roles, data, problem, checkpoint and compiled loops."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mpips import codecs
from mpips.checkpoint import Checkpoint, run_folder
from mpips.checkpoint.files import is_parameter_file
from mpips.checkpoint.reader import check_checkpoint, check_length, check_samples
from mpips.config import Config
from mpips.config.delay import check_delays
from mpips.datasets import DataInfo, Dataset
from mpips.datasets.loader import augment_of
from mpips.errors import Exit, UserError, write_line
from mpips.health import status_board
from mpips.health.hang_report import Deadline
from mpips.health.watchdog import watched
from mpips.kernels.cache import compiling
from mpips.launch import heartbeat
from mpips.layout import Layout
from mpips.layout.roles import Roles, roles_of
from mpips.mpi import signals
from mpips.mpi.collective_errors import (
    CollectiveError,
    call_on_all,
    layouts_alike,
    on_root,
    raise_on_all,
)
from mpips.mpi.collectives import begin_barrier, broadcast, gather_all
from mpips.mpi.evaluator_link import Link
from mpips.mpi.start import Comm
from mpips.mpi.world import Cluster
from mpips.optim import rule_of
from mpips.optim import warm as warm_rule
from mpips.planning.job import Job
from mpips.planning.needs import check_memory
from mpips.planning.tables import JobTable, check_job, tables_of
from mpips.problems import Problem, load_problem
from mpips.problems.rows import tables_of_problem
from mpips.session import folder
from mpips.session.data import open_data
from mpips.session.folder import Run
from mpips.transport.wire import pull_codec, push_codec

if TYPE_CHECKING:
    from mpips.checkpoint.exchange import ParameterFile

# Options that determine which loops `_load` loads.
KINDS = (
    *("in_rounds", "on_death", "optimizer", "dtype", "ema", "record", "codec", "pull_codec"),
    *("topk_momentum", "outer_step"),
)


def load_loops(ranks: Cluster, config: Config, tables: Sequence[JobTable] | None = None) -> None:
    """Load every loop that the job may need.

    If they are not in the cache, a rank of each host compiles them.

    Args:
        ranks: The job's ranks.
        config: The job.
        tables: Tables whose loops to load, without the job's other loops; None for the others.

    Raises:
        CollectiveError: If a signal stops any rank; on all ranks, with the exit code for it. Or if
            a user's rule cannot be compiled.

    Collective: yes. Blocks: for up to a minute while loops are compiled.
    """
    if tables is not None and not tables:
        return
    watch = _Watch(ranks, config.quiet)
    problem: UserError | None = None
    try:
        with compiling(watch.compiling, _kind(ranks, config, tables)):
            if tables is None:
                _load(config, ranks)
            else:
                _load_rows(config, ranks, tables)
    except _Stopped:
        watch.look()
    except UserError as refused:
        problem = refused
    barrier = begin_barrier(ranks.comm)

    def ready() -> bool:
        watch.look()
        return barrier.Test()

    ranks.wait(ready)
    call_on_all(ranks.comm, problem)
    stops = [name for name in gather_all(ranks.comm, watch.stop) if name]
    if stops:
        error = CollectiveError(
            f"{stops[0]} before training began, so there is nothing to save; run me again"
        )
        error.code = Exit.SAVED
        raise error


def _kind(ranks: Cluster, config: Config, tables: Sequence[JobTable] | None) -> str:
    """Return a key for the set of loops that a job loads."""
    values = [getattr(config, name) for name in KINDS]
    rows = [(t.rule.name, t.table.lazy, t.table.evict_after is None) for t in tables or ()]
    return str((*values, ranks.nodes > 1, ranks.failures.on, rows))


def _load_rows(config: Config, ranks: Cluster, tables: Sequence[JobTable]) -> None:
    from mpips.failover import undo_log
    from mpips.tables import load, shard
    from mpips.tables import rounds as round_tables
    from mpips.transport import rows

    load.warm()
    if config.in_rounds:
        round_tables.warm(config.dtype)
    if ranks.nodes > 1:
        rows.warm(config.dtype)
    for table in tables:
        table.rule.check(config.dtype)
        shard.warm(table.table, table.rule, config.dtype)
        if ranks.failures.on:
            undo_log.warm_rows(table.table, table.rule, config.dtype)


def _load(config: Config, ranks: Cluster) -> None:
    rules = [rule_of(config)]
    if config.outer_step:
        from mpips.rounds.averaging import SlowMomentum

        rules.append(SlowMomentum())
    for rule in rules:
        warm_rule(rule, config.dtype, config.in_rounds)
    if ranks.failures.on and not config.in_rounds and not rules[0].whole:
        from mpips.failover import undo_log

        undo_log.warm(rules[0], config.dtype)
    elif ranks.nodes == 1 and not config.in_rounds:
        from mpips.ps import local_pushes

        local_pushes.warm(rules[0], config.dtype)
    if config.on_death == "shrink":
        from mpips.rounds import survivable

        for rule in rules:
            if not rule.whole:
                survivable.warm(rule, config.dtype)
    for codec in _codecs(config):
        codecs.warm(codec, config.dtype)
    if config.record:
        from mpips.ps import replay_log

        replay_log.warm()
    if config.codec == "powersgd":
        from mpips.codecs.powersgd import warm_powersgd

        warm_powersgd(config.dtype)


def _codecs(config: Config) -> list[codecs.Codec | None]:
    """Return the codecs that the job may use."""
    if not codecs.is_open(config):
        return [push_codec(config), pull_codec(config)]
    from mpips.session.probe import possible

    pushes, pulls = possible(config)
    return [*pushes, *pulls]


class _Stopped(Exception):
    """A signal stops compiling."""


class _Watch:
    """Prints once that loops are compiled, and forwards a signal to all ranks.

    Attributes:
        stop: Name of a signal that some rank received, or None.
    """

    def __init__(self, ranks: Cluster, quiet: bool) -> None:
        self.stop: str | None = None
        self._ranks = ranks
        self._said = quiet or ranks.rank != 0

    def compiling(self) -> None:
        """Print once that loops are compiled, by this process or another, and check for signals."""
        if not self._said:
            write_line("compiling loops for this type of processor, this once ...")
            self._said = True
        self.look()
        if self.stop is not None:
            raise _Stopped

    def look(self) -> None:
        """Check for a signal, on this rank or reported by another."""
        if self.stop is not None:
            return
        self.stop = signals.received()
        if self.stop is None:
            self.stop = next((name for _, _, name in self._ranks.poll()), None)
        else:
            for rank in set(range(self._ranks.world)) - {self._ranks.rank}:
                self._ranks.send(rank, "stop", self.stop)


OpenData: TypeAlias = Callable[[Run, Cluster], tuple[DataInfo, Dataset | None]]
MakeProblem: TypeAlias = Callable[[str, DataInfo, Config], Problem]


@contextlib.contextmanager
def held_run(comm: Comm, find: Callable[[], Run]) -> Iterator[Run]:
    """Find a run on rank 0, and lock its folder. If the run is refused, remove its new files.

    Raises:
        CollectiveError: If there is none, or it cannot begin, on every rank.

    Collective: yes.
    """
    try:
        found = on_root(comm, find)
        try:
            yield found
        except CollectiveError:
            if comm.rank == 0 and not found.resumed and not found.config.eval_only:
                folder.forget(found.out)
            raise
    finally:
        run_folder.release()


def make_cluster(ranks: Comm | Link, config: Config) -> Cluster:
    """Return the job's ranks, or those on this side of a link, with the nodes that the job sees.

    Collective: yes, over all ranks.
    """
    side, everyone = (ranks.side, ranks.everyone) if isinstance(ranks, Link) else (ranks, ranks)
    return Cluster(side, 1 if config.window == "private" else config.node_size, everyone)


def shown(
    ranks: Cluster, config: Config, link: Link | None = None, saves: bool = True
) -> contextlib.AbstractContextManager[list[status_board.Address]]:
    """Publish the phase of each rank within a block, and end the job if it hangs.

    A supervisor may end the job instead. A job with `saves` saves before it ends. Collective: the
    start of the block is; with a link, over evaluators too.
    """
    outside_s = heartbeat.timeout_s()
    return watched(ranks, outside_s or config.timeout, link, ends_job=not outside_s, saves=saves)


def traced(
    config: Config, ranks: Cluster, out: Path, link: Link | None = None
) -> contextlib.AbstractContextManager[None]:
    """Trace this rank within a block, if the job asks for it (`mpips.session.tracing`).

    Collective: the start of the block is; with a link, over evaluators too.
    """
    if not config.trace:
        return contextlib.nullcontext()
    from mpips.session import tracing

    return tracing.traced(ranks, out, link)


def tell_ranks(
    ranks: Cluster, found: Run, where: list[status_board.Address], link: Link | None = None
) -> None:
    """Record the addresses of the ranks' status boards in the run's folder.

    The coordinator also uses them to detect evaluators that hang. Evaluators that are stopped are
    the supervisor's duty, if there is one.
    """
    if ranks.rank == 0:
        run_folder.write_ranks(found.out, where)
    if link is not None and ranks.is_coordinator:
        link.overdue = Deadline(where, found.config.timeout, stopped=not heartbeat.timeout_s())


def assign_roles(comm: Comm | Link, config: Config) -> Cluster:
    """Return the ranks, of this side of a link, with their roles and their share of the cores.

    Raises:
        CollectiveError: If the roles cannot be assigned, on every rank.

    Collective: yes.
    """
    ranks = make_cluster(comm, config)
    evaluate = config.eval_only or (isinstance(comm, Link) and comm.evaluates)
    ranks.roles = raise_on_all(ranks.comm, lambda: _roles(config, ranks, evaluate))
    ranks.limit_threads(config.threads)
    return ranks


def _roles(config: Config, ranks: Cluster, evaluate: bool) -> Roles:
    if evaluate:  # needs no server: every rank evaluates a part
        return Roles((), tuple(range(ranks.world)))
    roles = roles_of(config, ranks.hosts, ranks.node_of)
    check_delays(config.delays, len(roles.workers))
    if config.tensorboard:
        from mpips.session import tensorboard

        tensorboard.check()
    return roles


def make_job(
    found: Run,
    ranks: Cluster,
    started: float,
    open_data: OpenData = open_data,
    make_problem: MakeProblem = load_problem,
) -> Job:
    """Open the data, build the problem, and read the checkpoint's index. Collective: yes.

    Args:
        found: The run.
        ranks: The job's ranks, with their roles.
        started: `time.perf_counter` when the process started.
        open_data: Returns the data. Default: the data that the configuration names.
        make_problem: Returns the model. Default: the model that the configuration names.

    Raises:
        CollectiveError: If anything is wrong, on every rank.
    """
    config, comm = found.config, ranks.comm
    info, dataset = open_data(found, ranks)
    block = dataset.train.block(config.batch_size) if dataset else 0
    block = broadcast(comm, block, ranks.roles.workers[0])
    load_loops(ranks, config)
    local = sum(ranks.hosts[r] == ranks.hosts[ranks.rank] for r in ranks.roles.workers)

    def build() -> Job:
        problem = make_problem(config.problem, info, config)
        check_memory(problem.layout, config, local, ranks.nodes)
        initial = initial_of(found, problem.layout)
        file = None if isinstance(initial, Checkpoint) else initial
        found.notes.extend(file.notes if file is not None else ())
        saved = initial if found.resumed and isinstance(initial, Checkpoint) else None
        if saved is not None:
            check_samples(saved, info.n_train)
        kept = int(saved.state["block"]) if saved is not None else block
        augment_of(config, info)  # raises if there are no images
        job = Job(config, ranks, info, dataset, problem, found.out, kept, saved, initial, started)
        check_job(job)
        if saved is not None:
            check_length(job.allocator().epochs_done, config)
        if file is not None and ranks.rank in ranks.roles.owners:
            file.read_params(job.shard.begin, job.shard.end)  # raises if the file is invalid
        job.rate()  # raises if the schedule is invalid
        _check_ranks(job)
        return job

    job = raise_on_all(comm, build)
    layouts_alike(comm, replace(job.layout, tables=tables_of_problem(job.problem)))
    load_loops(ranks, config, tables_of(job))
    ranks.limit_threads(config.threads)  # also of libraries that a user's file has imported
    return job


def _check_ranks(job: Job) -> None:
    if job.config.on_death == "shrink":
        from mpips.failover.policy import refuse_shrink

        refuse_shrink(job)
    if job.config.backup_workers and not all(shard.size for shard in job.shards):
        got = f"servers {len(job.shards)} for {job.layout.size} parameters"
        raise UserError(got, "a share for each, with backup_workers", "use fewer servers")


def initial_of(found: Run, layout: Layout) -> "Checkpoint | ParameterFile | None":
    """Return the source of a run's initial parameters; None if the problem creates them.

    Raises:
        UserError: If it cannot be read, or its arrays differ from the model's.
    """
    path, dtype = found.checkpoint, found.config.dtype
    if path is None:
        return None
    if not found.resumed and is_parameter_file(path):
        from mpips.checkpoint.exchange import ParameterFile

        if found.config.eval_only and found.config.eval_ema:
            remedy = "export --ema writes the average as parameters"
            raise UserError(f"eval_ema with {path}", "a run or a checkpoint", remedy)
        return ParameterFile(path, layout, dtype)
    # The coordinator has checked all files. Each rank looks only at those that it reads.
    saved = Checkpoint.of(path)
    check_checkpoint(saved, layout, dtype)
    return saved
