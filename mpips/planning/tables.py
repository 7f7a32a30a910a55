"""Tables of a job, and checks of jobs with tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpips.checkpoint import Checkpoint
from mpips.checkpoint.reader import check_tables
from mpips.config import OPTIONS
from mpips.config.names import SPARSE_PROBLEMS
from mpips.errors import UserError, human_bytes
from mpips.mpi.window import shared_bytes_free
from mpips.mpi.world import Cluster
from mpips.planning.needs import available_bytes
from mpips.problems.rows import tables_of_problem

if TYPE_CHECKING:
    from mpips.layout.tables import Ownership, Table
    from mpips.optim.row_rules import RowRule
    from mpips.planning.job import Job

AREA_BYTES = 16 << 20  # default size of a worker's push to a table
# But at least this number of rows, if they fit in this size.
AREA_ROWS, MOST_AREA_BYTES = 1024, 256 << 20


@dataclass(frozen=True)
class JobTable:
    """A table of a job. Equal on every rank.

    Attributes:
        name: Name of the table.
        table: The table as the program defines it.
        rule: Update rule of its rows.
        seed: Seed of the initial rows.
        push_rows: Largest number of rows in a worker's push.
        rate: Learning rate as a function of the update's number.
        spares: Number of the last servers, which own no rows.
    """

    name: str
    table: "Table"
    rule: "RowRule"
    seed: int
    push_rows: int
    rate: Callable[[int], float]
    spares: int = 0

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return self.table.dim

    @property
    def description(self) -> dict[str, Any]:
        """Properties that a checkpoint records, and that a resumed run must share."""
        init = self.table.init
        made = {"init": type(init).__name__, "scale": init.scale, "seed": self.seed}
        size = {"hashed": self.table.hashed, "rows": self.table.rows, "dim": self.dim}
        return {**size, "rule": self.rule.name, **made, **self.rule.kept}

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of its rows, with their slots.

        Args:
            itemsize: Bytes of a number.
        """
        return self.table.rows * self.rule.width(self.dim) * itemsize

    def owned_by(self, servers: int) -> "Ownership":
        """Return the ownership of its rows.

        Args:
            servers: Number of servers.
        """
        from mpips.layout.tables import Ownership

        return Ownership(self.name, self.table, servers, self.seed, self.spares)


def rows_of_area(nbytes: int) -> int:
    """Return the default number of rows in a worker's push.

    Args:
        nbytes: Bytes of a row.
    """
    return max(1, max(AREA_BYTES, min(AREA_ROWS * nbytes, MOST_AREA_BYTES)) // nbytes)


def tables_of(job: "Job") -> tuple[JobTable, ...]:
    """Return the tables of a job, configured.

    Raises:
        UserError: If they are not valid tables, two sets of tables are given, or the job's rule,
            which a table needs, is no row rule.
    """
    if not tables_of_problem(job.problem):
        return ()
    from mpips.planning.table_rules import configured_tables

    tables = []
    for name, table, rule in configured_tables(job.problem, job.config):
        default_rows = rows_of_area(8 + table.dim * job.dtype.itemsize)
        push_rows = min(table.rows, table.push_rows or default_rows)
        settings = job.config.seed, push_rows, job.rate(rule.rate), job.cluster.roles.spares
        tables.append(JobTable(name, table, rule, *settings))
    return tuple(tables)


def check_job(job: "Job") -> None:
    """Refuse a job whose options, ranks or checkpoint do not suit its tables.

    Raises:
        UserError: If the job is refused.
    """
    tables, c = tables_of(job), job.config
    saved = job.initial if c.eval_only else job.checkpoint
    if isinstance(saved, Checkpoint):
        check_tables(saved.path, saved.tables, {table.name: table.description for table in tables})
    for name in ("row_optimizer", "checkpoint_rows", "evict_after"):
        if not tables and (given := getattr(c, name)) != OPTIONS[name].default:
            known = ", ".join(SPARSE_PROBLEMS)
            raise UserError(f"{name} {given!r} without tables", f"a problem with rows: {known}")
    if not tables and c.mode == "hybrid" and not c.eval_only:
        remedy = "use --mode sync, in which servers may own the parameters too"
        raise UserError("mode 'hybrid' without tables", "a problem with rows", remedy)
    if not tables or (c.eval_only and isinstance(saved, Checkpoint)):
        return
    if job.initial is not None and job.checkpoint is None:
        remedy = "leave out init_from, or go on with that run by resume"
        raise UserError("init_from with tables", "a run whose rows are made anew", remedy)
    from mpips.planning.table_rules import check_options

    check_options(c, job.cluster.nodes)
    _check_memory(job, tables)


def _check_memory(job: "Job", tables: Sequence[JobTable]) -> None:
    """Refuse tables that do not fit in the memory of this host's servers."""
    from mpips.kernels.rows import MOST_PLACES

    roles, kind = job.cluster.roles, _owners_are(job)
    owners = len(roles.owners) - roles.spares
    for table in tables:
        if table.table.lazy and -(-table.table.rows // owners) > MOST_PLACES:
            got = f"lazy table {table.name!r} of {table.table.rows:,} rows on {owners} {kind}"
            most = f"at most {MOST_PLACES:,} rows on each"
            raise UserError(got, most, f"use {-(-table.table.rows // MOST_PLACES)} {kind}")
    full = [table for table in tables if not table.table.lazy]
    if full:
        _check_room(job, full)


def _check_room(job: "Job", tables: Sequence[JobTable]) -> None:
    """Raise UserError unless this host's memory holds its servers' rows of dense tables."""
    ranks, free = job.cluster, room_bytes(job.cluster)
    host, roles = ranks.hosts[ranks.rank], ranks.roles
    owners = roles.owners[: len(roles.owners) - roles.spares]
    owners_here = sum(ranks.hosts[rank] == host for rank in owners)
    sizes = [table.nbytes(job.dtype.itemsize) for table in tables]
    needed = sum(sizes) * owners_here // len(owners)
    if needed <= free:
        return
    size, largest = max(zip(sizes, tables, strict=True), key=lambda each: each[0])
    got = f"table {largest.name!r} of {largest.table.rows:,} rows takes {human_bytes(size)}"
    if len(tables) > 1:
        got += f" of the {human_bytes(sum(sizes))} of all tables"
    where = f"what {owners_here} of {len(owners)} {_owners_are(job)} have free on {host}"
    nodes = -(-sum(sizes) // max(1, free))
    remedy = f"use {nodes} nodes like it, with a server each or more, or capacity='lazy' if a run"
    raise UserError(got, f"at most {human_bytes(free)}, {where}", f"{remedy} has few of the rows")


def _owners_are(job: "Job") -> str:
    return "servers" if job.cluster.roles.servers else "ranks"


def room_bytes(cluster: Cluster) -> int:
    """Return the bytes that this rank's host has free for memory shared within a node."""
    free = available_bytes()
    return free if len(cluster.my_node) == 1 else min(free, shared_bytes_free())
