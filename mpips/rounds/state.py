"""Codec state that ranks keep between rounds, in checkpoints.

A codec's residuals lie with the rank that packs a sum, powersgd's error with the rank that has the
rows; its basis is the same on every node. All is copied at the end of the round that a checkpoint
holds. Every rank writes a file, beside the shards; the basis is in that of rank 0. A residual is of
no codec: another one that keeps residuals goes on with it.

A resumed run goes on with it if every rank is where it was. Else the sum over the ranks is shared
out: of a residual, each node that sends a slice to its owner takes an equal part, of an error,
each node. What counts is the sum that comes in at the owner, so that nothing is lost.
"""

from collections.abc import Iterator, Mapping

from mpips.checkpoint import Checkpoint, Pieces
from mpips.codecs.powersgd import Factors
from mpips.planning.job import Job, saved_config
from mpips.rounds.powersgd import BASIS, ERROR
from mpips.snapshot.saver import WorkerSaver
from mpips.snapshot.worker_state import unfit
from mpips.transport.wire import kept, unpacked


def names(job: Job) -> tuple[str, ...]:
    """Names of the vectors that ranks keep between rounds; empty where none keeps any."""
    config, cluster = job.config, job.cluster
    if not config.in_rounds or cluster.nodes == 1:
        return ()
    if config.codec == "powersgd":
        return ERROR, BASIS
    return kept(config, cluster.roles, cluster.node_of, job.shards)


def _senders(job: Job, owner: int) -> int:
    """Return how many nodes send sums to an owner on another one."""
    node_of = job.cluster.node_of
    return len({node_of[rank] for rank in job.cluster.roles.workers} - {node_of[owner]})


def resume_notes(job: Job) -> Iterator[str]:
    """Yield lines that say, in a resumed run, what becomes of what was kept."""
    mine = names(job)
    if job.checkpoint is None or not job.base_step:
        return
    found = read_names(job)
    if found and _same_places(job):
        yield f"each rank goes on with its own {', '.join(found)}"
    elif found:
        yield f"the sum of the ranks' {', '.join(found)} is shared out to those who pack now"
    if found and (dropped := _dropped(job)):
        yield f"{found[0]} of {dropped} is left out: nobody packs them now"
    fresh = [name for name in mine if name not in found]
    if fresh:
        yield f"{', '.join(fresh)} begins anew: {unfit(job, fresh) or 'none that fits was saved'}"


def restore(job: Job, state: Mapping[str, Pieces]) -> None:
    """Restore what this rank keeps from the checkpoint, where there is something for it.

    Args:
        job: The run.
        state: `mpips.rounds.base.Round.own_state`, which is changed in place.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    cluster, same = job.cluster, _same_places(job)
    for name in read_names(job):
        for begin, view in state.get(name, ()):
            if name == BASIS:
                _checkpoint(job).read_workers_share(name, begin, view, 1)
            elif same:
                _checkpoint(job).read_worker(name, cluster.rank, view, begin)
            else:
                shares = cluster.nodes if name == ERROR else _senders(job, _owner(job, begin))
                _checkpoint(job).read_workers_share(name, begin, view, shares)


def saver_of(job: Job, state: Mapping[str, Pieces], stall: bool) -> WorkerSaver | None:
    """Return what saves this rank's part at snapshots, or None where no rank keeps anything.

    Args:
        job: The run.
        state: `mpips.rounds.base.Round.own_state`.
        stall: See `mpips.snapshot.saver.Snapshots`.
    """
    found, rank = names(job), job.cluster.rank
    if not found:
        return None
    vectors = {name: state.get(name, ()) if name != BASIS or rank == 0 else () for name in found}
    return WorkerSaver(job.cluster, rank, vectors, job.layout.size, job.dtype, stall)


def _owner(job: Job, begin: int) -> int:
    """Return the rank that owns the slice that begins there."""
    owners = zip(job.cluster.roles.owners, job.shards, strict=True)
    return next(rank for rank, shard in owners if shard.size and shard.begin == begin)


def _checkpoint(job: Job) -> Checkpoint:
    assert job.checkpoint is not None, "nothing was saved"
    return job.checkpoint


def read_names(job: Job) -> tuple[str, ...]:
    """Names of what was saved in rounds, and is read."""
    if job.checkpoint is None:
        return ()
    saved, now = saved_config(job), job.config
    if not saved.in_rounds:
        return ()
    found = [name for name in names(job) if name in job.checkpoint.worker_names]
    if saved.powersgd_rank != now.powersgd_rank:
        found = [name for name in found if name != BASIS]
    return tuple(found)


def _dropped(job: Job) -> str:
    """Return the arrays or parameters that something was kept of, and for which nothing is now."""
    c, cluster = job.config, job.cluster
    if c.codec == "powersgd":
        ranks = saved_config(job).powersgd_rank, c.powersgd_rank
        before, now = (Factors.of(job.layout, job.dtype, rank).matrices for rank in ranks)
        return ", ".join(x.name for x in before if x.name not in {y.name for y in now})
    if _same_places(job):
        return ""
    none = unpacked(c, cluster.roles, cluster.node_of, job.shards)
    return f"parameters {none}" if none else ""


def _same_places(job: Job) -> bool:
    if job.checkpoint is None:
        return False
    world, cluster = job.checkpoint.state["world"], job.cluster
    before = list(world["servers"]), list(world["node_of"])
    return before == (list(cluster.roles.servers), list(cluster.node_of))
