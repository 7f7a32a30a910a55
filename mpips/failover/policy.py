"""Failure policy: runs that survive the death of a rank.

Runs in rounds survive deaths on request: see `mpips.rounds.survivable`, on several nodes
`mpips.rounds.survivable_nodes`, in mode hybrid `mpips.rounds.survivable_hybrid`. The following is
about asynchronous runs.

The pushes that a worker has announced stay in the memory of its node, and one word announces a push
to all servers. Each server applies all announced pushes of a dead worker, and counts the worker as
finished. The coordinator assigns its other batches to living workers, under new numbers. It tells
the servers to skip the old numbers, since clocks wait for them. So each batch is applied exactly
once.

The worker's row gradients of tables lie beside the gradient, and are treated alike.

When a server dies, another server of its node takes over its shard and its rows: the coordinator,
if it is on that node (`mpips.failover.takeover`). When the coordinator dies, a successor becomes
the coordinator: see `mpips.failover.coordinator_failover`.

On several nodes a worker keeps its pushes to remote servers until they are applied. After its death
a rank of its node resends them: see `mpips.transport.acknowledged` and `mpips.failover.resending`.

The death of the last server of a node ends the job, and so does that of a worker with state of its
own. With evaluators, the coordinator's death does as well. The job restarts from a checkpoint.
"""

import dataclasses
from collections.abc import Sequence

from mpips.errors import UserError
from mpips.launch import heartbeat
from mpips.mpi.collectives import first_ranks
from mpips.mpi.start import mpi_name
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.snapshot import worker_state


def survivable(job: Job) -> tuple[int, ...]:
    """Return the ranks that may die without ending the run. The same on all ranks."""
    ranks = job.cluster
    if not ranks.failures.on or needs_all(job):
        return ()
    if job.config.in_rounds:
        return tuple(sorted(set(ranks.roles.workers) - set(first_ranks(ranks.node_of))))
    workers = tuple(rank for rank in ranks.roles.workers if _leaves_pushes(job, rank))
    return workers + _replaceable_servers(job)


def needs_all(job: Job) -> str:
    """Return why a run needs all training ranks, whatever MPI supports; empty if it does not."""
    c = job.config
    if c.backup_workers:
        return "--backup-workers needs all ranks"
    if c.on_death == "shrink":
        return _needs_all_in_rounds(job)
    if c.mode not in ("async", "ssp"):
        return f"mode {c.mode} needs all ranks"
    if worker_state.names(job):
        return f"codec {c.codec} keeps a state between nodes"
    return _needs_all_between_nodes(job) if job.cluster.nodes > 1 else ""


def _needs_all_in_rounds(job: Job) -> str:
    """Return why rounds need all ranks; empty if they do not."""
    c, ranks = job.config, job.cluster
    conditions = {
        f"--codec {c.codec} between nodes": c.codec != "none" and ranks.nodes > 1,
        f"--pull-codec {c.pull_codec} between nodes": c.pull_codec != "none" and ranks.nodes > 1,
        "--window private": c.window != "shared",
        "--reduce allreduce": c.reduce == "allreduce",
        "--servers": ranks.roles.servers and c.mode != "hybrid",
        "--evaluators": c.evaluators,
        "--clip": c.clip and c.mode == "sync",
        "--fragments, --overlap-steps or --mixing": c.streaming,
        "--local-slots keep": c.mode == "local_sgd" and c.local_slots == "keep",
        "--schedule cosine, which ends with the last round,": c.schedule == "cosine",
        "a table": c.mode != "hybrid" and bool(tables_of(job)),
        "--evict-after": any(table.table.evict_after for table in tables_of(job)),
        "a run of one worker": len(ranks.roles.workers) == 1,
        "one worker a node": set(ranks.roles.workers) <= set(first_ranks(ranks.node_of)),
    }
    option = next((name for name, holds in conditions.items() if holds), "")
    return option and f"{option} needs all ranks of a round"


def refuse_shrink(job: Job) -> None:
    """Refuse ``on_death = "shrink"`` if the run cannot continue without dead workers.

    Raises:
        UserError: If the job or its MPI needs all ranks; the same on all ranks.
    """
    why = needs_all(job)
    if not why and not job.cluster.failures.on:
        terms = heartbeat.terms()
        why = (terms.all_end if terms is not None else "") or f"{mpi_name()} ends all ranks here"
    if why:
        remedy = "start it by mpips.launch with Open MPI, or leave it out"
        raise UserError(f"on_death 'shrink' where {why}", "'restart'", remedy)


def keeps(job: Job) -> bool:
    """Return whether workers keep pushes for other nodes until applied. The same on all ranks."""
    return job.cluster.nodes > 1 and bool(survivable(job))


def _needs_all_between_nodes(job: Job) -> str:
    """Return why workers cannot keep pushes for other nodes; empty if they can.

    See `mpips.transport.acknowledged`.
    """
    c = job.config
    conditions = {
        "--window private": c.window != "shared",
        "--far-read get": c.far_read == "get",
        "--node-aggregation": c.node_aggregation,
        "--record": c.record,
        "--delay-compensation": job.staleness.origins,
        "a table": bool(tables_of(job)),
    }
    option = next((name for name, holds in conditions.items() if holds), "")
    return option and f"{option} needs all ranks of several nodes"


def _leaves_pushes(job: Job, rank: int) -> bool:
    """Return whether other ranks can apply all announced pushes of a worker after its death."""
    ranks = job.cluster
    servers = zip(ranks.roles.servers, job.shards, strict=True)
    owners = [server for server, shard in servers if shard.size]
    return len(owners) == 1 or ranks.node_of.count(ranks.node_of[rank]) > 1


def _replaceable_servers(job: Job) -> tuple[int, ...]:
    """Return the servers whose shards another server of their node can take over."""
    c, servers = job.config, job.cluster.roles.servers
    if c.node_aggregation or c.record or job.rule.whole:
        return ()
    if c.evaluators:  # only server 0 has the evaluators' results
        servers = servers[1:]
    return tuple(rank for rank in servers if len(_servers_beside(job, rank)) > 1)


def _needs_servers(job: Job) -> str:
    """Return why no server can take over the shard of another."""
    c = job.config
    conditions = {
        "it is the only one": len(job.cluster.roles.servers) == 1,
        "--node-aggregation needs it": c.node_aggregation,
        "each writes its own --record": c.record,
        "an update of whole arrays cannot be undone": job.rule.whole,
    }
    return next((why for why, holds in conditions.items() if holds), "each is alone on its node")


def _servers_beside(job: Job, rank: int) -> list[int]:
    """Return the servers on the node of a rank, in their order."""
    node_of = job.cluster.node_of
    return [each for each in job.cluster.roles.servers if node_of[each] == node_of[rank]]


def takes_over(job: Job) -> tuple[int, ...]:
    """Return the servers whose shards others take over when they die."""
    return tuple(rank for rank in survivable(job) if rank in job.cluster.roles.servers)


def groups(job: Job) -> list[list[int]]:
    """Return the servers of each node; the run needs at least one of each group."""
    found = {
        job.cluster.node_of[rank]: _servers_beside(job, rank) for rank in _replaceable_servers(job)
    }
    return list(found.values())


def takes_over_from(job: Job, rank: int) -> int:
    """Return the server that takes over the shards of a dead one.

    It is the coordinator if that is on the same node. Else it is the first living spare, or the
    first living server. One is alive: otherwise `Failures.spare` has ended the job.
    """
    ranks = job.cluster
    beside = _servers_beside(job, rank)
    if ranks.roles.coordinator in beside and ranks.roles.coordinator not in ranks.failures.lost:
        return ranks.roles.coordinator
    living = [each for each in beside if each not in ranks.failures.lost]
    spares = ranks.roles.servers[len(ranks.roles.servers) - ranks.roles.spares :]
    return next((each for each in living if each in spares), living[0])


def follow_successor(job: Job) -> int:
    """Replace the dead coordinator by its successor in the roles; returns the successor's rank."""
    ranks = job.cluster
    successor = takes_over_from(job, ranks.roles.coordinator)
    ranks.roles = dataclasses.replace(ranks.roles, successor=successor)
    return successor


def announcement(job: Job) -> str:
    """Return the coordinator's line about the effect of a rank's death, with the reason.

    Args:
        job: The run, with settled codecs.
    """
    terms, on, spares = heartbeat.terms(), job.cluster.failures.on, job.config.spares
    if terms is None and not on:
        return f"--spares {spares} has no effect but under mpips.launch, by Open MPI"
    useless = f"--spares {spares} has no effect here; " if spares and not takes_over(job) else ""
    if on:
        return useless + _who_goes_on(job, _fate(job, terms))
    why = needs_all(job) or (terms.all_end if terms is not None else "")
    return f"{useless}if a rank dies, {_fate(job, terms)}: {why}"


def _taken_over_in_words(servers: Sequence[int], taken_over: Sequence[int]) -> str:
    """Return in words which of the servers are taken over; empty if all are."""
    beside = " beside another" if set(servers[1:]) - set(taken_over) else ""
    return beside + (" but server 0" if servers[0] not in taken_over else "")


def _fate(job: Job, terms: heartbeat.Terms | None) -> str:
    """Return the fate of a job that MPI ends."""
    if terms is None or not terms.restarts:
        return "this job ends"
    if terms.program and job.config.resume != "auto":
        return 'this job ends, as the program does not say resume="auto"'
    return "this job starts again from its newest checkpoint"


def _who_goes_on_in_rounds(job: Job, fate: str) -> str:
    each, ranks = job.config.unit_size, job.cluster
    many, servers = len(ranks.roles.workers), len(ranks.roles.servers)
    rate = ", at a rate that falls likewise" if job.config.scale_lr else ""
    slices = "" if servers else "another one takes its slice over, and "
    needed, why = f"rank {ranks.roles.coordinator}", "it holds the run's folder"
    if ranks.nodes > 1:
        first = ", ".join(map(str, first_ranks(ranks.node_of)))
        needed, why = f"the first rank of a node ({first})", "it acts on the deaths of the others"
        if servers:
            needed, why = f"a server or {needed}", "no other can replace it"
    elif servers:
        leads = "" if 0 in ranks.roles.servers else " or rank 0"
        needed, why = f"{'a' if servers > 1 else 'the'} server{leads}", "no other can replace it"
    return (
        f"if a worker dies, the others go on without it: {slices}a round has "
        f"{each * (many - 1)} samples in place of {each * many}, {each} a worker{rate}; if "
        f"{needed} dies, {fate}: {why}"
    )


def _who_goes_on(job: Job, fate: str) -> str:
    """Return the effect of a rank's death, if MPI lets the others continue."""
    spare, workers = set(survivable(job)), set(job.cluster.roles.workers)
    evaluator = "an evaluator or " if job.config.evaluators else ""
    if not spare:
        why = needs_all(job) or "each worker is alone on its node"
        first = "if an evaluator dies, the others go on without it; " if evaluator else ""
        return f"{first}if {'another' if evaluator else 'a'} rank dies, {fate}: {why}"
    if job.config.in_rounds:
        return _who_goes_on_in_rounds(job, fate)
    beside = "" if workers <= spare else " beside another rank"
    first = f"if {evaluator}a worker{beside} dies, the others go on without it"
    if taken_over := takes_over(job):
        server = f"a server{_taken_over_in_words(job.cluster.roles.servers, taken_over)}"
        return f"{first}; if {server} dies, another one takes its shard over"
    server = "the server" if len(job.cluster.roles.servers) == 1 else "a server"
    return f"{first}; if {server} dies, {fate}: {_needs_servers(job)}"
