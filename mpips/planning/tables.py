"""Tables of a job, and the jobs that cannot have any."""

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

AREA_BYTES = 16 << 20  # of a worker's rows in one push to a table, where the table does not say
AREA_ROWS, MOST_AREA_BYTES = 1024, 256 << 20  # at least, where they take no more than that
TABLE_MODES = ("async", "ssp", "sync", "hybrid")


@dataclass(frozen=True)
class JobTable:
    """A table of a job. The same on every rank.

    Attributes:
        name: Of the table.
        table: As the program gives it.
        rule: What is done with the gradients of a row.
        seed: Of what rows hold at first.
        push_rows: Rows that a worker has room for in a push.
        rate: Its learning rate as a function of the update's number.
        spares: How many of the servers, the last ones, own none of its rows.
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
        """What a checkpoint says of it, and a run that goes on has to be like."""
        init = self.table.init
        made = {"init": type(init).__name__, "scale": init.scale, "seed": self.seed}
        size = {"hashed": self.table.hashed, "rows": self.table.rows, "dim": self.dim}
        return {**size, "rule": self.rule.name, **made, **self.rule.kept}

    def nbytes(self, itemsize: int) -> int:
        """Return what its rows take with all that their rule keeps, by the size of a number."""
        return self.table.rows * self.rule.width(self.dim) * itemsize

    def owned_by(self, servers: int) -> "Ownership":
        """Return which of so many servers owns which row."""
        from mpips.layout.tables import Ownership

        return Ownership(self.name, self.table, servers, self.seed, self.spares)


def rows_of_area(nbytes: int) -> int:
    """Return how many rows of so many bytes a worker has room for in a push by default."""
    return max(1, max(AREA_BYTES, min(AREA_ROWS * nbytes, MOST_AREA_BYTES)) // nbytes)


def tables_of(job: "Job") -> tuple[JobTable, ...]:
    """Return the tables of a job, with what the configuration says of them.

    Raises:
        UserError: If they cannot be tables, if two sets of them are given, or if the rule of the
            job, which a table is to have, is none for rows.
    """
    if not tables_of_problem(job.problem):
        return ()
    from mpips.planning.table_rules import configured_tables

    found = []
    for name, table, rule in configured_tables(job.problem, job.config):
        most = rows_of_area(8 + table.dim * job.dtype.itemsize)
        room = min(table.rows, table.push_rows or most)
        how = job.config.seed, room, job.rate(rule.rate), job.cluster.roles.spares
        found.append(JobTable(name, table, rule, *how))
    return tuple(found)


def check_job(job: "Job") -> None:
    """Refuse a job that tables are not made for, or that goes on from others.

    Raises:
        UserError: If there are tables, and it is one.
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
    _check_world(job, tables)
    _check_memory(job, tables)


def _check_world(job: "Job", tables: Sequence[JobTable]) -> None:
    """Refuse modes, ranks and options that tables are not made for."""
    c, ranks = job.config, job.cluster
    if c.mode not in TABLE_MODES:
        raise UserError(f"tables in mode {c.mode!r}", f"mode {' or '.join(TABLE_MODES)}")
    if c.mode == "hybrid" and c.clip:
        remedy = "rows are applied before the norm of the whole is known: leave out --clip"
        raise UserError(f"clip {c.clip:g} in mode 'hybrid'", "clip 0", remedy)
    if c.mode == "hybrid" and c.record and c.codec != "none" and ranks.nodes > 1:
        got = f"record with codec {c.codec!r} in mode 'hybrid' on several nodes"
        raise UserError(got, "codec 'none'", "leave out --codec, or --record")
    if c.mode == "sync" and c.reduce == "allreduce":
        remedy = "rows are exchanged in shared memory and by messages: leave out --reduce"
        raise UserError("reduce 'allreduce' with tables", "reduce 'auto' or 'shared'", remedy)
    if c.codec == "powersgd":
        remedy = "rows have no matrix to be taken apart: use another --codec, or none"
        raise UserError("codec 'powersgd' with tables", "a codec of single numbers", remedy)
    if ranks.nodes > 1 and c.node_aggregation:
        got = f"node_aggregation with tables, on {ranks.nodes} nodes"
        raise UserError(got, "each worker's rows sent by itself", "leave node_aggregation out")
    for name in ("delay_compensation", "backup_workers"):
        if given := getattr(c, name):
            got = f"{name}={given} with tables"
            raise UserError(got, f"{name} as it is by default", "leave it out")


def _check_memory(job: "Job", tables: Sequence[JobTable]) -> None:
    """Refuse tables that the servers of this host have no memory for."""
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
    """Raise UserError unless this host has room for its servers' rows of whole tables."""
    ranks, free = job.cluster, room_bytes(job.cluster)
    here, roles = ranks.hosts[ranks.rank], ranks.roles
    owners = roles.owners[: len(roles.owners) - roles.spares]
    share = sum(ranks.hosts[rank] == here for rank in owners)
    sizes = [table.nbytes(job.dtype.itemsize) for table in tables]
    needed = sum(sizes) * share // len(owners)
    if needed <= free:
        return
    size, largest = max(zip(sizes, tables, strict=True), key=lambda each: each[0])
    got = f"table {largest.name!r} of {largest.table.rows:,} rows takes {human_bytes(size)}"
    if len(tables) > 1:
        got += f" of the {human_bytes(sum(sizes))} of all tables"
    where = f"what {share} of {len(owners)} {_owners_are(job)} have free on {here}"
    nodes = -(-sum(sizes) // max(1, free))
    remedy = f"use {nodes} nodes like it, with a server each or more, or capacity='lazy' if a run"
    raise UserError(got, f"at most {human_bytes(free)}, {where}", f"{remedy} has few of the rows")


def _owners_are(job: "Job") -> str:
    return "servers" if job.cluster.roles.servers else "ranks"


def room_bytes(cluster: Cluster) -> int:
    """Return what this rank's host has free for the memory that a rank shares with its node."""
    free = available_bytes()
    return free if len(cluster.my_node) == 1 else min(free, shared_bytes_free())
