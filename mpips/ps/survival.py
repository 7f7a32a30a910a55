"""Asynchronous runs that go on when a worker dies, where MPI lets them (`mpips.cluster.failures`).

What a worker has announced stays in the memory of its node, and one word announces a push to all
servers: each applies all that the dead worker's word says, and counts it as finished. The chief
hands the other batches that it had to those who live, under new numbers, and tells the servers that
the old ones never come, for clocks that wait for them. So each batch is applied exactly once.

When a server dies, but for server 0, the chief takes its shard over: see `mpips.ps.adoption`.

The death of the chief, of a rank on another node, or of a worker that keeps state of its own, ends
the job: it goes on from a checkpoint.
"""

from mpips.cut import worker_state
from mpips.planning.job import Job


def spared(job: Job) -> tuple[int, ...]:
    """Return the ranks that a run can do without, if there are any. The same on all ranks."""
    ranks, c = job.cluster, job.config
    able = c.mode in ("async", "ssp") and not c.backup_workers and ranks.nodes == 1
    if not ranks.failures.on or not able or worker_state.names(job):
        return ()
    return ranks.roles.workers + adoptable(job)


def adoptable(job: Job) -> tuple[int, ...]:
    """Return the servers among them: all but the chief, where they agree in shared memory."""
    c, servers = job.config, job.cluster.roles.servers
    return servers[1:] if c.window == "shared" and not c.node_aggregation else ()


def adopts(job: Job) -> bool:
    """Whether the chief goes on with the shards of servers that die."""
    return bool(set(adoptable(job)).intersection(spared(job)))


def announcement(job: Job) -> str | None:
    """Return what the chief says of it, where MPI lets jobs go on."""
    if not job.cluster.failures.on:
        return None
    if adopts(job):
        return (
            "if a worker dies, the others go on without it; if a server dies, server 0 takes its "
            "shard over; if server 0 dies, this job ends"
        )
    if spared(job):
        return "if a worker dies, the others go on without it; if the server dies, this job ends"
    return "if a rank dies, this job ends: others go on in modes async and ssp, on one node"
