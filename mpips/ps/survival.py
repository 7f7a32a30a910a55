"""Asynchronous runs that go on when a rank dies, where MPI lets them (`mpips.cluster.failures`).

What a worker has announced stays in the memory of its node, and one word announces a push to all
servers: each applies all that the dead worker's word says, and counts it as finished. The chief
hands the other batches that it had to those who live, under new numbers, and tells the servers that
the old ones never come, for clocks that wait for them. So each batch is applied exactly once.

What it had for rows of tables lies beside the gradient, and goes the same way.

When a server dies, the chief takes its shard over, and its rows: see `mpips.ps.adoption`. When the
chief dies, its heir becomes the chief: see `mpips.ps.succession`.

On several nodes a worker's pushes to the others are kept until they are applied, and a rank of its
node sends them after its death: see `mpips.transport.kept` and `mpips.ps.bequest`.

The death of the last server, of a server on several nodes, or of a worker that keeps state of its
own, ends the job, and so does that of the chief where ranks evaluate: it goes on from a checkpoint.
"""

import dataclasses

from mpips.cut import worker_state
from mpips.planning.job import Job
from mpips.planning.tables import tables_of


def spared(job: Job) -> tuple[int, ...]:
    """Return the ranks that a run can do without, if there are any. The same on all ranks."""
    ranks, c = job.cluster, job.config
    able = c.mode in ("async", "ssp") and not c.backup_workers
    able = able and (ranks.nodes == 1 or _keeps_pushes(job))
    if not ranks.failures.on or not able or worker_state.names(job):
        return ()
    servers = adoptable(job)
    if c.evaluators:  # of which server 0 alone knows what they have found
        servers = servers[1:]
    return tuple(rank for rank in ranks.roles.workers if _is_left(job, rank)) + servers


def keeps(job: Job) -> bool:
    """Whether a run goes on without some ranks of several nodes. The same on all ranks."""
    return job.cluster.nodes > 1 and bool(spared(job))


def _keeps_pushes(job: Job) -> bool:
    """Whether workers can keep what they push to other nodes; see `mpips.transport.kept`."""
    c = job.config
    apart = c.node_aggregation or c.record or bool(tables_of(job)) or job.staleness.origins
    return c.window == "shared" and c.far_read != "get" and not apart


def _is_left(job: Job, rank: int) -> bool:
    """Whether a worker that dies leaves what it has announced to somebody."""
    ranks = job.cluster
    servers = zip(ranks.roles.servers, job.shards, strict=True)
    owners = [server for server, shard in servers if shard.size]
    return len(owners) == 1 or ranks.node_of.count(ranks.node_of[rank]) > 1


def adoptable(job: Job) -> tuple[int, ...]:
    """Return the servers among them: all where there are several, and they share memory.

    Not where each writes down what it applies.
    """
    c, servers = job.config, job.cluster.roles.servers
    able = len(servers) > 1 and c.window == "shared" and not (c.node_aggregation or c.record)
    able = able and job.cluster.nodes == 1
    return servers if able else ()


def adopts(job: Job) -> bool:
    """Whether a server goes on with the shards of others that die."""
    return bool(set(adoptable(job)).intersection(spared(job)))


def follow_heir(job: Job) -> int:
    """Have the first spare that lives be the chief, as the chief has died, or the first server.

    Returns:
        Its rank.

    Raises:
        Lost: If no server is left.
    """
    ranks = job.cluster
    left = [rank for rank in ranks.roles.servers if rank not in ranks.failures.lost]
    if not left:
        raise ranks.failures.needed()
    first = len(ranks.roles.servers) - ranks.roles.spares
    heir = next((rank for rank in left if rank in ranks.roles.servers[first:]), left[0])
    ranks.roles = dataclasses.replace(ranks.roles, heir=heir)
    return heir


def announcement(job: Job) -> str | None:
    """Return what the chief says of it, where MPI lets jobs go on."""
    spares = job.config.spares
    if spares and not adopts(job):
        why = "on several nodes, or with state of workers"
        if not job.cluster.failures.on:
            why = "but under mpips.launch, by Open MPI"
        return f"--spares {spares} has no effect {why}: if a rank dies, this job ends"
    if not job.cluster.failures.on:
        return None
    others = "an evaluator or " if job.config.evaluators else ""
    if adopts(job):
        server = "a server but server 0" if others else "a server"
        return (
            f"if {others}a worker dies, the others go on without it; if {server} dies, another one "
            "takes its shard over"
        )
    if spared(job):
        servers = "the server" if len(job.cluster.roles.servers) == 1 else "a server"
        alone = "" if set(job.cluster.roles.workers) <= set(spared(job)) else " beside another rank"
        return (
            f"if {others}a worker{alone} dies, the others go on without it; if {servers} dies, "
            "this job ends"
        )
    if others:
        return "if an evaluator dies, the others go on without it; if another dies, this job ends"
    return "if a rank dies, this job ends: others go on in modes async and ssp, see mpips.guide"
