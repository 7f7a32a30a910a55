"""Loading of compiled loops before a job begins."""

from collections.abc import Sequence

from mpips import codecs
from mpips.codecs.powersgd import warm_powersgd
from mpips.config import Config
from mpips.errors import write_line
from mpips.kernels.compiled import compiling
from mpips.mpi import signals
from mpips.mpi.collective_errors import CollectiveError
from mpips.mpi.collectives import begin_barrier, gather_all
from mpips.mpi.world import Cluster
from mpips.optim import make_rule
from mpips.optim import warm as warm_rule
from mpips.planning.tables import JobTable
from mpips.ps import replay_log_lines
from mpips.session.probe import possible


def load_loops(ranks: Cluster, config: Config, tables: Sequence[JobTable] | None = None) -> None:
    """Load every loop that the job may need; the first time ever, one rank of a host compiles them.

    Args:
        ranks: The job's.
        config: Of the job.
        tables: Where they are given, those of these alone, if there are any.

    Raises:
        CollectiveError: If any rank was told to stop; on all ranks, with the exit code for that.

    Collective: yes. Blocks: for up to a minute where loops are compiled.
    """
    if tables is not None and not tables:
        return
    watch = _Watch(ranks, config.quiet)
    try:
        with compiling(watch.compiling):
            if tables is None:
                _load(config, ranks)
            else:
                _load_rows(config, ranks, tables)
    except _Stopped:
        watch.look()
    all_here = begin_barrier(ranks.comm)

    def ready() -> bool:
        watch.look()
        return all_here.Test()

    ranks.wait(ready)
    stops = [name for name in gather_all(ranks.comm, watch.stop) if name]
    if stops:
        error = CollectiveError(
            f"{stops[0]} before training began, so there is nothing to save; run me again"
        )
        error.code = signals.EXIT_SAVED
        raise error


def _load_rows(config: Config, ranks: Cluster, tables: Sequence[JobTable]) -> None:
    from mpips.failover import undo_log
    from mpips.tables import load, shard
    from mpips.tables import rounds as round_tables
    from mpips.transport import remote_rows

    load.warm()
    if config.in_rounds:
        round_tables.warm(config.dtype)
    if ranks.nodes > 1:
        remote_rows.warm(config.dtype)
    for table in tables:
        shard.warm(table.table, table.rule, config.dtype)
        if ranks.failures.on:
            undo_log.warm_rows(table.table, table.rule, config.dtype)


def _load(config: Config, ranks: Cluster) -> None:
    pushes, pulls = possible(config)
    warm_rule(make_rule(config.optimizer), config.dtype, config.in_rounds)
    if ranks.failures.on and not config.in_rounds:
        from mpips.failover import undo_log

        undo_log.warm(make_rule(config.optimizer), config.dtype)
    for codec in (*pushes, *pulls):
        codecs.warm(codec, config.dtype)
    if config.record:
        replay_log_lines.warm()
    if config.codec == "powersgd":
        warm_powersgd(config.dtype)


class _Stopped(Exception):
    """Compiling ends here."""


class _Watch:
    """Says once that loops are compiled, and passes a request to stop on to all ranks.

    Attributes:
        stop: Name of the signal that came, to whichever rank.
    """

    def __init__(self, ranks: Cluster, quiet: bool) -> None:
        self.stop: str | None = None
        self._ranks = ranks
        self._said = quiet or ranks.rank != 0

    def compiling(self) -> None:
        """Called before each loop that is compiled here, and while somebody else compiles."""
        if not self._said:
            write_line("compiling loops for this type of processor, this once ...")
            self._said = True
        self.look()
        if self.stop is not None:
            raise _Stopped

    def look(self) -> None:
        """Look for a signal, and for one that came to another rank."""
        if self.stop is not None:
            return
        self.stop = signals.received()
        if self.stop is None:
            self.stop = next((name for _, _, name in self._ranks.poll()), None)
        else:
            for rank in set(range(self._ranks.world)) - {self._ranks.rank}:
                self._ranks.send(rank, "stop", self.stop)
