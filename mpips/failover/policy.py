"""Failure policy: runs that survive the death of a rank.

In rounds a run does so where it is asked to: see `mpips.rounds.survivable`, and on several nodes
`mpips.rounds.survivable_nodes`, in mode hybrid `mpips.rounds.survivable_hybrid`. The rest is about
asynchronous runs.

What a worker has announced stays in the memory of its node, and one word announces a push to all
servers: each applies all that the dead worker's word says, and counts it as finished. The
coordinator hands the other batches that it had to those who live, under new numbers, and tells the
servers that the old ones never come, for clocks that wait for them. So each batch is applied
exactly once.

What it had for rows of tables lies beside the gradient, and goes the same way.

When a server dies, another one of its node takes its shard over, and its rows: the coordinator, if
it is one of them (`mpips.failover.takeover`). When the coordinator dies, its successor becomes the
coordinator: see `mpips.failover.coordinator_failover`.

On several nodes a worker's pushes to the others are kept until they are applied, and a rank of its
node sends them after its death: see `mpips.transport.acknowledged` and `mpips.failover.resending`.

The death of the last server of a node, or of a worker that keeps state of its own, ends the job,
and so does that of the coordinator where ranks evaluate: it goes on from a checkpoint.
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
    """Return the ranks that a run can do without, if there are any. The same on all ranks."""
    ranks = job.cluster
    if not ranks.failures.on or needs_all(job):
        return ()
    if job.config.in_rounds:
        return tuple(sorted(set(ranks.roles.workers) - set(first_ranks(ranks.node_of))))
    workers = tuple(rank for rank in ranks.roles.workers if _is_left(job, rank))
    return workers + can_be_taken_over(job)


def needs_all(job: Job) -> str:
    """Return why a run needs all ranks that train, whatever MPI can do; empty if it does not."""
    c = job.config
    if c.backup_workers:
        return "--backup-workers needs all ranks"
    if c.on_death == "shrink":
        return _needs_all_in_rounds(job)
    if c.mode not in ("async", "ssp"):
        return f"mode {c.mode} needs all ranks"
    if worker_state.names(job):
        return f"codec {c.codec} keeps a state between nodes"
    return _sends_once(job) if job.cluster.nodes > 1 else ""


def _needs_all_in_rounds(job: Job) -> str:
    """Return why rounds need all ranks; empty if they do not."""
    c, ranks = job.config, job.cluster
    found = {
        f"--codec {c.codec} between nodes": c.codec != "none" and ranks.nodes > 1,
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
    what = next((name for name, given in found.items() if given), "")
    return what and f"{what} needs all ranks of a round"


def refuse_shrink(job: Job) -> None:
    """Refuse a run that is to go on without workers that die, and could not.

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
    """Return whether a run goes on without some ranks of several nodes. The same on all ranks."""
    return job.cluster.nodes > 1 and bool(survivable(job))


def _sends_once(job: Job) -> str:
    """Return what hinders workers from keeping pushes for other nodes.

    See `mpips.transport.acknowledged`.

    Empty if nothing does.
    """
    c = job.config
    found = {
        "--window private": c.window != "shared",
        "--far-read get": c.far_read == "get",
        "--node-aggregation": c.node_aggregation,
        "--record": c.record,
        "--delay-compensation": job.staleness.origins,
        "a table": bool(tables_of(job)),
    }
    what = next((name for name, given in found.items() if given), "")
    return what and f"{what} needs all ranks of several nodes"


def _is_left(job: Job, rank: int) -> bool:
    """Return whether a worker that dies leaves what it has announced to somebody."""
    ranks = job.cluster
    servers = zip(ranks.roles.servers, job.shards, strict=True)
    owners = [server for server, shard in servers if shard.size]
    return len(owners) == 1 or ranks.node_of.count(ranks.node_of[rank]) > 1


def can_be_taken_over(job: Job) -> tuple[int, ...]:
    """Return the servers among them: those that share memory with another one."""
    c, servers = job.config, job.cluster.roles.servers
    if c.node_aggregation or c.record or job.rule.whole:
        return ()
    if c.evaluators:  # of which server 0 alone knows what they have found
        servers = servers[1:]
    return tuple(rank for rank in servers if len(_servers_beside(job, rank)) > 1)


def _needs_servers(job: Job) -> str:
    """Return why no server goes on with the shard of another."""
    c = job.config
    found = {
        "it is the only one": len(job.cluster.roles.servers) == 1,
        "--node-aggregation needs it": c.node_aggregation,
        "each writes its own --record": c.record,
        "an update of whole arrays cannot be undone": job.rule.whole,
    }
    return next((why for why, holds in found.items() if holds), "each is alone on its node")


def _servers_beside(job: Job, rank: int) -> list[int]:
    """Return the servers of the node of a rank, in their order."""
    node_of = job.cluster.node_of
    return [each for each in job.cluster.roles.servers if node_of[each] == node_of[rank]]


def takes_over(job: Job) -> tuple[int, ...]:
    """Return the servers with whose shards others go on if they die."""
    return tuple(rank for rank in survivable(job) if rank in job.cluster.roles.servers)


def groups(job: Job) -> list[list[int]]:
    """Return the servers of each node: a run does without no such group."""
    found = {
        job.cluster.node_of[rank]: _servers_beside(job, rank) for rank in can_be_taken_over(job)
    }
    return list(found.values())


def takes_over_from(job: Job, rank: int) -> int:
    """Return who takes over what a server served that has died.

    That is the coordinator on its node, and elsewhere the first spare that lives, or the first
    server. One lives: else `Failures.spare` has ended the job.
    """
    ranks = job.cluster
    beside = _servers_beside(job, rank)
    if ranks.roles.coordinator in beside and ranks.roles.coordinator not in ranks.failures.lost:
        return ranks.roles.coordinator
    left = [each for each in beside if each not in ranks.failures.lost]
    spares = ranks.roles.servers[len(ranks.roles.servers) - ranks.roles.spares :]
    return next((each for each in left if each in spares), left[0])


def follow_successor(job: Job) -> int:
    """Have another server be the coordinator, as the coordinator has died; returns its rank."""
    ranks = job.cluster
    successor = takes_over_from(job, ranks.roles.coordinator)
    ranks.roles = dataclasses.replace(ranks.roles, successor=successor)
    return successor


def announcement(job: Job) -> str:
    """Return what happens when a rank dies, and why not more: a line that the coordinator says.

    Args:
        job: The run, with codecs that are settled.
    """
    terms, on, spares = heartbeat.terms(), job.cluster.failures.on, job.config.spares
    if terms is None and not on:
        return f"--spares {spares} has no effect but under mpips.launch, by Open MPI"
    useless = f"--spares {spares} has no effect here; " if spares and not takes_over(job) else ""
    if on:
        return useless + _who_goes_on(job, _fate(job, terms))
    why = needs_all(job) or (terms.all_end if terms is not None else "")
    return f"{useless}if a rank dies, {_fate(job, terms)}: {why}"


def _but(servers: Sequence[int], taken_over: Sequence[int]) -> str:
    """Return which of the servers are taken over, in words; nothing if all are."""
    beside = " beside another" if set(servers[1:]) - set(taken_over) else ""
    return beside + (" but server 0" if servers[0] not in taken_over else "")


def _fate(job: Job, terms: heartbeat.Terms | None) -> str:
    """Return what becomes of a job that MPI ends."""
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
    """Return what happens when a rank dies, where MPI lets the others go on."""
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
        server = f"a server{_but(job.cluster.roles.servers, taken_over)}"
        return f"{first}; if {server} dies, another one takes its shard over"
    server = "the server" if len(job.cluster.roles.servers) == 1 else "a server"
    return f"{first}; if {server} dies, {fate}: {_needs_servers(job)}"
