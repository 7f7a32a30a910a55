"""Asynchronous SGD: servers apply each gradient as it arrives.

An update is ``w <- w - lr * g(w_old)``. No worker waits for another. A worker computes a gradient
from the version that it pulled, and the server applies it to its current version. The difference of
versions is the staleness. A worker has at most two pushes that a server has not taken. So over a
run of W workers, the mean staleness of a shard is at most 2 W - 1. If workers are on other nodes,
it is larger by at most the pushes in the server's inbox and in node aggregators
(`mpips.transport.push_sender`).

References: Dean et al., NeurIPS 2012 (Downpour); Recht et al., NeurIPS 2011 (Hogwild); Li et al.,
OSDI 2014 (parameter server).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks
from mpips.ps.assemble import ServerHalf, WorkerHalf, announcement, assemble
from mpips.ps.coordinator import Checkpoints, Coordinator
from mpips.ps.design import Design, Update
from mpips.ps.dispatch import Dispatcher
from mpips.ps.server import AsyncServer
from mpips.ps.shard import Server
from mpips.ps.steps import Steps, gradient_steps
from mpips.ps.worker import AsyncWorker
from mpips.snapshot import worker_state
from mpips.snapshot.committer import Committer
from mpips.snapshot.worker_state import Holding
from mpips.strategies import survivable_ranks
from mpips.transport import wire

if TYPE_CHECKING:
    from mpips.failover.takeover import Failover, Takeover
    from mpips.session.metrics import Log


def run(
    job: Job,
    log: "Log",
    update: Update | None = None,
    make_steps: Callable[[Job, WorkerHalf], Steps] = gradient_steps,
) -> Tasks[Outcome]:
    """Train asynchronously; in mode ssp with a staleness bound. Collective: yes.

    Args:
        job: The run.
        log: Log of the run.
        update: Rule and learning rate of the servers; by default those of the job.
        make_steps: Makes the object with the steps of a worker.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    design = Design.of(job, update)
    if job.cluster.failures.on:
        from mpips.failover.policy import keeps, takes_over

        design = dataclasses.replace(design, takes_over=takes_over(job), kept=keeps(job))
    half = assemble(job.cluster, design)
    if isinstance(half, WorkerHalf):
        return (yield from _work(job, half, make_steps(job, half)))
    return _serve(job, half, log, design.ahead)


def _serve(job: Job, half: ServerHalf, log: "Log", ahead: int) -> Outcome:
    server = half.server
    job.fill(server.params, server.slots, job.shard)
    if server.rows is not None:
        from mpips.tables.server import fill_tables

        fill_tables(server.rows.tables, job.checkpoint)
    server.start_from(job.base_step)
    if job.config.record:
        from mpips.ps.replay_log import recorder_of

        if (recorder := recorder_of(job, half)) is not None:
            server.record_by(recorder)
    failover = _failover(job, half, log, ahead) if job.cluster.failures.on else None
    loop = AsyncServer(job, half, _coordinator(job, half, log, ahead), failover)
    loop.start()
    times = half.open(lambda request: loop.serve_until(request.Test))
    if times is not None:
        log.say(announcement(times))
    for line in (wire.announcement(job), *worker_state.resume_notes(job)):
        log.say(line)
    reason = loop.serve()
    if server.recorder is not None:
        server.recorder.close()
    if server.rows is not None:
        job.cluster.serving = server.rows.answer  # workers read rows, but no shards, to evaluate
    outcome = Outcome(reason, server.version, release=partial(_release, job, half))
    if (coordinator := loop.coordinator) is not None:
        outcome.samples, outcome.detail = coordinator.samples, coordinator.diverged or ""
        outcome.step, outcome.unsaved = coordinator.step, coordinator.snapshots.unsaved
        allocator = coordinator.allocator
        outcome.epochs, outcome.clocks = allocator.epochs_done, allocator.clocks
        outcome.lost = dict(coordinator.lost)
    takeovers = failover.takeovers if failover is not None else []
    outcome.stats = _stats(server, server.tally.handled)
    outcome.stats["taken_over"] = {each.served.rank: _taken_over(job, each) for each in takeovers}
    return outcome


def _failover(job: Job, half: ServerHalf, log: "Log", ahead: int) -> "Failover":
    """Return a server's handling of ranks that die."""
    from mpips.failover.coordinator_failover import succeed
    from mpips.failover.takeover import Failover

    succeeds = job.cluster.roles.servers[0] in half.design.takes_over
    return Failover(job, half, partial(succeed, job, log, ahead) if succeeds else None)


def _release(job: Job, half: ServerHalf) -> None:
    job.cluster.serving = None
    half.free()


def _stats(server: Server, applied: int) -> dict[str, Any]:
    """Return a shard's part of the summary.

    Args:
        server: The server of the shard.
        applied: Number of pushes that it has applied.
    """
    tally, rows = server.tally, server.rows
    return {
        "bytes": server.nbytes,
        "applied": applied,
        "busy_s": tally.busy_s,
        "pushes_dropped": tally.dropped,
        "staleness": tally.staleness.tolist(),
        "staleness_sum": tally.staleness_sum,
        "staleness_max": tally.staleness_max,
        "rows_changed": {} if rows is None else rows.changed,
        "rows_evicted": {} if rows is None else rows.evicted,
    }


def _taken_over(job: Job, takeover: "Takeover") -> dict[str, Any]:
    """Return the summary's part of a shard that was taken over."""
    store, begun = takeover.served.store, takeover.version - job.base_step
    took = {"statistics_from": begun, "taken_over_in_s": round(takeover.seconds, 6)}
    took["taken_over_by"] = job.cluster.roles.servers.index(job.cluster.rank)
    return _stats(store, store.version - job.base_step) | took


def _coordinator(job: Job, half: ServerHalf, log: "Log", ahead: int) -> Coordinator | None:
    """Return the coordinator on its rank, server 0; None on other ranks."""
    if job.run_folder is None:
        return None
    cluster, allocator = job.cluster, job.allocator()
    holding = Holding(cluster) if worker_state.names(job) else None
    snapshots = Checkpoints(job, Committer(job, log), holding)
    if not survivable_ranks(job):
        dispatcher = Dispatcher(cluster, half.window, allocator, ahead)
        return Coordinator(job, half.server, dispatcher, snapshots, log)
    from mpips.failover.coordinator_failover import SurvivingCoordinator
    from mpips.failover.coordinator_log import CoordinatorLog, SurvivingDispatcher

    window, is_kept = half.window, cluster.rank in half.design.takes_over
    record = CoordinatorLog(window, cluster.rank) if is_kept else None
    surviving = SurvivingDispatcher(cluster, window, allocator, ahead, record=record)
    coordinator = SurvivingCoordinator(job, half.server, surviving, snapshots, log)
    coordinator.note()
    return coordinator


def _work(job: Job, half: WorkerHalf, steps: Steps) -> Tasks[Outcome]:
    puller, sender, rows = half.puller, half.sender, half.rows
    job.rows = rows
    reason = yield from AsyncWorker(job, half, steps).work()
    if rows is not None:
        rows.end()  # tells the servers that this worker reads no more rows
    rows_sent, rows_received = rows.bytes_moved if rows is not None else (0, 0)
    stats = {
        **dataclasses.asdict(steps.times),
        "pushes_sent": sender.seq,
        "bytes_pushed": sender.seq * job.layout.size * job.dtype.itemsize,
        "bytes_pulled": puller.bytes,
        "bytes_sent": sender.push_sender.bytes_sent + rows_sent,
        "bytes_received": puller.remote.bytes_received + rows_received,
        "torn_reads": puller.torn,
        "joined_reads": puller.remote.joined,
        "clock_distance_max": puller.controller.distance_max if puller.controller else 0,
        "tables": rows.stats() if rows else {},
    }
    if reason != "diverged":
        half.pull_final(steps.replica)
    half.leave()
    return Outcome(reason, params=steps.replica, stats=stats, release=half.free)
