"""Design of asynchronous training, and layout of each rank's window segment."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpips.layout import Shard
from mpips.mpi.window import Field, Plan
from mpips.mpi.world import Cluster
from mpips.optim import Rule
from mpips.optim.staleness import Staleness
from mpips.planning.job import Job
from mpips.planning.tables import JobTable, tables_of
from mpips.ps import dispatch
from mpips.ps.client import reader_fields
from mpips.ps.dispatch import AHEAD
from mpips.ps.shard import FRESH, server_fields
from mpips.snapshot import worker_state
from mpips.transport import push_sender
from mpips.transport.push_sender import PushOptions
from mpips.transport.wire import Packing, pull_codec, push_codec

if TYPE_CHECKING:
    from mpips.tables.capacity import Lines

ALL = sys.maxsize  # number of an update that no run reaches
Update = tuple[Rule, Callable[[int], float]]  # a rule, and its learning rate by update number


@dataclass(frozen=True)
class Design:
    """Settings of asynchronous training, derived from the job. All ranks have the same.

    The exception is the number of messages packed before in `pushes`, which differs by worker.

    Attributes:
        shards: Shard of each server.
        dtype: dtype of the parameters.
        rule: Update rule that servers apply to a push.
        rate: Learning rate as a function of the update's number.
        stale: Corrections for stale pushes.
        consistent: Whether a worker never reads a shard during an update.
        far_read: How workers read shards of other nodes: "get", "reply", or "auto" for the faster.
            If reads are consistent or wait, it is always by reply.
        share: Whether the workers of a node share their remote reads.
        replicas: Number of replicas that a worker reads into, if they are in shared memory: 1 or 2.
        bound: Staleness bound, in clocks, that reads wait for; None for no bound.
        backup: Number of backup workers, if servers update in rounds; otherwise None.
        aggregate: Whether the gradients of a node go to remote servers in one message.
        inbox: Largest number of bodies of remote pushes that a server holds at a time.
        pushes: Compression of pushes to remote servers.
        replies: Compression of replies to remote readers.
        ahead: Largest number of batches assigned to a worker that it has not taken yet.
        shared: Whether the ranks of a node share memory; if not, each rank is a node of its own.
        tables: Tables of rows, whose rows are spread over all servers.
        takes_over: Ranks of the servers whose shards another server can take over
            (`mpips.failover.policy`).
        foreseen: Number of the last update whose `rate` may be computed before it is known whether
            the update will be made. 0 for none; `ALL` if the rate is not a function of the user's.
        kept: Whether ranks may die in a job on several nodes (`mpips.transport.acknowledged`). Then
            each worker reads remote shards for itself, by reply.
    """

    shards: Sequence[Shard]
    dtype: str
    rule: Rule
    rate: Callable[[int], float]
    stale: Staleness = FRESH
    consistent: bool = False
    far_read: str = "auto"
    share: bool = False
    replicas: int = 1
    bound: int | None = None
    backup: int | None = None
    aggregate: bool = False
    inbox: int = 2
    pushes: Packing = field(default_factory=Packing)
    replies: Packing = field(default_factory=Packing)
    ahead: int = AHEAD
    shared: bool = True
    tables: Sequence[JobTable] = ()
    takes_over: Sequence[int] = ()
    foreseen: int = 0
    kept: bool = False

    @classmethod
    def of(cls, job: Job, update: Update | None = None) -> "Design":
        """Return the design of a job.

        Args:
            job: The run.
            update: Rule and learning rate of the servers; by default those of the job.
        """
        c = job.config
        rule, rate = update or (job.rule, job.rate())
        numbered = job.worker_id is None or c.in_rounds  # messages are numbered by the round
        packed = 0 if numbered else worker_state.packed_before(job)
        return cls(
            job.shards, c.dtype, rule, rate, job.staleness,
            consistent=c.read == "consistent",
            far_read=c.far_read,
            share=c.share_pulls,
            replicas=2 if c.prefetch or job.staleness.origins else 1,
            bound=c.bound if c.reads_wait and not c.backup_workers else None,
            backup=c.backup_workers or None,
            aggregate=c.node_aggregation,
            inbox=c.inbox,
            pushes=Packing(push_codec(c), c.seed, packed),
            replies=Packing(pull_codec(c), c.seed, job.base_step),
            ahead=1 if c.mode == "ssp" else AHEAD,  # in mode ssp only the batch being computed
            shared=c.window == "shared",
            tables=tables_of(job),
            foreseen=job.total_steps if getattr(job.problem, "rate_schedule", None) else ALL,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Number of parameters."""
        return max(shard.end for shard in self.shards)

    @property
    def push_options(self) -> PushOptions:
        """Options of the channel by which pushes go to the servers."""
        how = self.inbox, self.aggregate, self.pushes, self.stale.origins
        return PushOptions(*how, self.tables, self.kept)

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of a shard's slots: those of the rule and of stale pushes."""
        return self.rule.slots + self.stale.slots

    @property
    def reads_wait(self) -> bool:
        """Whether reads wait for other workers' pushes (`mpips.ps.consistency`)."""
        return self.bound is not None or self.backup is not None

    def sharing(self, cluster: Cluster, rank: int) -> list[int]:
        """Return the ranks of the workers that share a worker's remote reads, itself included.

        They are those of its node; the list is empty if each reads for itself.
        """
        if not self.share or self.consistent or self.reads_wait or self.kept:
            return []
        roles, node_of = cluster.roles, cluster.node_of
        owners = [r for r, s in zip(roles.servers, self.shards, strict=True) if s.size]
        local = [r for r in roles.workers if node_of[r] == node_of[rank]]
        remote = any(node_of[r] != node_of[rank] for r in owners)
        return local if remote and len(local) > 1 else []

    def plans(self, cluster: Cluster) -> list[Plan]:
        """Return the plan of each rank's window segment. Collective: yes, if a table is lazy."""
        lines: Lines = {}
        if self.tables:
            from mpips.tables.capacity import lines_of

            size = lambda rank, lines: self.plan(cluster, rank, lines).nbytes  # noqa: E731
            lines = lines_of(cluster, self.tables, cluster.roles.servers, self.dtype, size)
        return [self.plan(cluster, rank, lines) for rank in range(cluster.world)]

    def plan(self, cluster: Cluster, rank: int, lines: "Lines | None" = None) -> Plan:
        """Return the plan of a rank's window segment.

        Args:
            cluster: The job's ranks.
            rank: The rank.
            lines: Number of lines of lazy tables, by table and server; by default as many lines as
                the server owns rows.
        """
        if rank in cluster.roles.servers:
            return Plan(self._server_fields(cluster, rank, lines or {}))
        workers, servers = len(cluster.roles.workers), len(cluster.roles.servers)
        fields = push_sender.worker_fields(self.size, servers, self.dtype)
        fields += reader_fields(servers) + dispatch.worker_fields()
        if self.tables:
            from mpips.transport.rows import rows_fields

            fields += rows_fields(self.tables, servers, self.dtype)
        if self.aggregate:
            fields += push_sender.aggregator_fields(workers)
        if local := self.sharing(cluster, rank):
            from mpips.transport import single_flight

            fields += single_flight.fields(
                self.size, servers, len(local), self.dtype, self.replicas
            )
        elif self.stale.origins:
            fields += (Field("replicas", self.dtype, (self.replicas, self.size)),)
        return Plan(fields)

    def _server_fields(self, cluster: Cluster, rank: int, lines: "Lines") -> tuple[Field, ...]:
        roles, dtype = cluster.roles, self.dtype
        workers, server = len(roles.workers), roles.servers.index(rank)
        size = self.shards[server].size
        fields = server_fields(size, self.slots, dtype, workers)
        if self.tables:
            from mpips.tables.server import table_fields

            for table in self.tables:
                most = lines.get((table.name, server))
                fields += table_fields(table, len(roles.servers), server, dtype, most)
        if rank in self.takes_over:
            fields += self._undo_fields(size)
        if server == 0:
            fields += dispatch.coordinator_fields(workers)
            if rank in self.takes_over:
                from mpips.failover.coordinator_log import record_fields

                fields += record_fields()
        return fields

    def _undo_fields(self, size: int) -> tuple[Field, ...]:
        """Return the fields of a server whose shard another server can take over."""
        from mpips.failover.undo_log import row_undo_fields, undo_log_fields

        fields = undo_log_fields(size, self.rule, self.stale, self.dtype)
        return fields + row_undo_fields(self.tables, self.dtype)
