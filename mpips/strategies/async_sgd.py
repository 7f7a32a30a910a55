"""Asynchronous SGD: w <- w - lr * g(w_old), applied as the gradients come.

No worker waits for another. A gradient is computed from the version that the worker pulled and
applied to the version that the server has by then; the difference is its staleness. Each worker
has at most two pushes that no server has taken, so over a run of W workers the mean staleness of a
shard is at most 2 W - 1, and where workers are on other nodes as much more as its inbox holds
(and their carriers: see `mpips.transport.outbox`).

References: Dean et al., NeurIPS 2012 (Downpour); Recht et al., NeurIPS 2011 (Hogwild); Li et al.,
OSDI 2014 (parameter server).
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpips.cluster.window import Field, Plan, Window
from mpips.cluster.world import Cluster, Comm, Request, cluster_subset, mpi_name
from mpips.cut import worker_state
from mpips.cut.saver import Committer, Contents, Saver
from mpips.cut.worker_state import Holding
from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.ps import feed, store
from mpips.ps.feed import AHEAD, Feed, Granter
from mpips.ps.gate import ClockGate, Gate, RoundGate
from mpips.ps.quorum import QuorumServer
from mpips.ps.server import AsyncServer, Chief
from mpips.ps.store import Puller, Server
from mpips.ps.worker import AsyncWorker
from mpips.strategies import Outcome
from mpips.transport import neighbours, outbox, wire
from mpips.transport.channel import Receiver, Sender
from mpips.transport.neighbours import Neighbour
from mpips.transport.wire import Packing, pull_codec, push_codec

if TYPE_CHECKING:
    from mpips.session.metrics import Log

WAYS = ("get", "reply")
TRIES = 3
Update = tuple[Rule, Callable[[int], float]]  # a rule, and its rate by the update's number
GAIN = 0.8  # a Get has to be so much faster to be chosen


def plan(job: Job, rank: int) -> Plan:
    """Return what a rank's segment holds."""
    roles, dtype = job.cluster.roles, job.config.dtype
    workers, servers = len(roles.workers), len(roles.servers)
    if rank in roles.servers:
        size = job.shards[roles.servers.index(rank)].size
        fields = store.server_fields(size, job.slots, dtype, workers)
        return Plan(fields + (feed.chief_fields(workers) if rank == roles.chief else ()))
    fields = outbox.worker_fields(job.layout.size, servers, dtype)
    fields += store.reader_fields(servers) + feed.worker_fields()
    if job.config.node_aggregation:
        fields += outbox.carrier_fields(workers)
    replicas = 2 if job.config.prefetch or job.staleness.origins else 1
    if near := sharing(job, rank):
        fields += neighbours.fields(job.layout.size, servers, len(near), dtype, replicas)
    elif job.staleness.origins:
        fields += (Field("replicas", dtype, (replicas, job.layout.size)),)
    return Plan(fields)


def sharing(job: Job, rank: int) -> list[int]:
    """Return the workers of the node with whom a worker shares its far reads, itself included."""
    cluster, c = job.cluster, job.config
    node = cluster.node_of[rank]
    owners = [r for r, s in zip(cluster.roles.servers, job.shards, strict=True) if s.size]
    near = [r for r in cluster.roles.workers if cluster.node_of[r] == node]
    far = any(cluster.node_of[r] != node for r in owners)
    alone = c.read == "consistent" or c.gated
    shared = far and len(near) > 1 and c.share_pulls and not alone
    return near if shared else []


def run(
    job: Job, log: "Log", update: Update | None = None, worker: type[AsyncWorker] = AsyncWorker
) -> Outcome:
    """Train asynchronously, with a bound on clocks in mode ssp. Collective: yes.

    Args:
        job: The run.
        log: Where it is told.
        update: What servers do with a push; by default the job's rule with the job's rate.
        worker: What workers do.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    cluster = job.cluster
    plans = [plan(job, rank) for rank in range(cluster.world)]
    window = Window(cluster, plans, job.config.window == "shared")
    servers = cluster_subset(cluster, cluster.roles.servers)
    if job.worker_id is None:
        return _serve(job, window, servers, log, update or (job.rule, job.rate()))
    return _work(job, window, job.worker_id, worker)


def _serve(job: Job, window: Window, servers: Comm, log: "Log", update: Update) -> Outcome:
    cluster, shard = job.cluster, job.shard
    server_id = cluster.roles.servers.index(cluster.rank)
    stale = job.staleness
    server = make_server(job, window, server_id, update)
    job.fill(server.params, server.slots, shard)
    server.start_from(job.base_step)
    config = job.config
    args = cluster, window, server_id, shard, config.dtype, server.applied
    how = config.node_aggregation, push_codec(config), stale.origins
    receiver = Receiver(*args, config.inbox, *how)
    slots = dict(zip(job.slots, server.slots, strict=True))
    saver = Saver(cluster, shard, server.params, slots, job.config.snapshot == "stall")
    loop = AsyncServer(job, servers, server, receiver, saver)
    handout = job.handout()
    if job.place is not None:
        own = worker_state.names(job)
        committer = Committer(cluster, job.place, Contents.of(job, own), log)
        holding = Holding(cluster) if own else None
        granter = Granter(cluster, window, handout, granted_ahead(job))
        loop.chief = Chief(job, loop, granter, handout, committer, log, holding)
    loop.start()
    cluster.barrier()  # the parameters are there before the first pull
    times = agree_on_far_reads(job, None, lambda request: loop.serve_until(request.Test))
    if times is not None:
        log.say(_told(times))
    packed = wire.told(config, cluster.roles, cluster.node_of, job.shards, job.layout)
    if packed is not None:
        log.say(packed)
    for line in worker_state.told(job):
        log.say(line)
    reason = loop.serve()
    outcome = Outcome(reason, server.version, release=_release(window, loop))
    if loop.chief:
        outcome.samples, outcome.detail = loop.chief.samples, loop.chief.diverged or ""
        outcome.unsaved = loop.chief.unsaved
        outcome.epochs, outcome.clocks = handout.epochs_done, handout.clocks
    outcome.stats = {
        "bytes": server.params.nbytes * (1 + len(slots)),
        "applied": server.handled,
        "busy_s": server.busy_s,
        "pushes_dropped": server.dropped,
        "staleness": server.staleness.tolist(),
        "staleness_sum": server.staleness_sum,
        "staleness_max": server.staleness_max,
    }
    return outcome


def make_server(job: Job, window: Window, server_id: int, update: Update) -> Server:
    """Return this rank's half of the store: of rounds, where there are backup workers."""
    backup = job.config.backup_workers
    packing = Packing(pull_codec(job.config), job.config.seed, job.base_step)
    args = job.cluster, window, server_id, job.shard, *update, packing, job.staleness
    if not backup:
        return Server(*args)
    return QuorumServer(*args, needed=len(job.cluster.roles.workers) - backup)


def _work(job: Job, window: Window, worker_id: int, make_worker: type[AsyncWorker]) -> Outcome:
    cluster = job.cluster
    c = job.config
    way = "reply" if c.far_read == "auto" else c.far_read
    args = cluster, window, worker_id, job.shards
    packing = Packing(push_codec(c), c.seed, worker_state.packed_before(job))
    sender = Sender(*args, c.node_aggregation, packing, job.staleness.origins)
    source = Feed(cluster, window, worker_id, granted_ahead(job))
    gate = gate_of(job, worker_id, source, sender)
    puller = Puller(*args, c.read == "consistent", way, gate, pull_codec(c))
    cluster.barrier()
    times = agree_on_far_reads(job, puller, cluster.wait_request)
    if times is not None:
        puller.read_far_by(faster(times))
    replicas = share_far_reads(job, window, puller)
    worker = make_worker(job, puller, sender, source, replicas)
    worker.keep_state()
    reason = worker.work()
    stats = {
        **dataclasses.asdict(worker.times),
        "pushes_sent": sender.seq,
        "bytes_pushed": sender.seq * job.layout.size * job.dtype.itemsize,
        "bytes_pulled": puller.bytes,
        "bytes_sent": sender.bytes_sent,
        "bytes_received": puller.bytes_received,
        "torn_reads": puller.torn,
        "joined_reads": puller.joined,
        "clock_distance_max": gate.distance_max if gate else 0,
    }
    if reason != "diverged":
        puller.pull_final(worker.replica)
    return Outcome(
        reason, params=worker.replica, stats=stats, release=_release(window, puller, sender, worker)
    )


def granted_ahead(job: Job) -> int:
    """Return the batches granted beside those taken: in mode ssp the one that is worked on."""
    return 1 if job.config.mode == "ssp" else AHEAD


def gate_of(job: Job, worker_id: int, source: Feed, sender: Sender) -> Gate | None:
    """Return what a worker's reads wait for, if they do."""
    c, workers = job.config, len(job.cluster.roles.workers)
    if not c.gated:
        return None
    if c.backup_workers:
        return RoundGate(worker_id)
    return ClockGate(worker_id, c.bound, lambda: source.numbers[0] // workers, lambda: sender.seq)


def share_far_reads(job: Job, window: Window, puller: Puller) -> list[np.ndarray]:
    """Have this worker share its far reads if it can; returns its replicas in shared memory."""
    ranks, me = sharing(job, job.cluster.rank), job.cluster.rank
    if not ranks:
        return list(window.view(me, "replicas")) if job.staleness.origins else []
    workers = [Neighbour.of(window, rank) for rank in ranks]
    puller.share(workers, ranks.index(me))
    return list(workers[ranks.index(me)].replicas)


def agree_on_far_reads(
    job: Job, puller: Puller | None, wait: Callable[[Request], object]
) -> np.ndarray | None:
    """Have one worker read its far shards by Get and by reply, and tell all how long it took.

    Args:
        job: The run.
        puller: On workers.
        wait: How this rank waits for the result; servers serve meanwhile.

    Returns:
        Seconds of a read by Get and by reply, shape (2,), or None where there is no choice.

    Collective: yes.
    """
    cluster, c = job.cluster, job.config
    owners = [r for r, s in zip(cluster.roles.servers, job.shards, strict=True) if s.size]
    workers = cluster.roles.workers
    far = [w for w in workers if any(cluster.node_of[r] != cluster.node_of[w] for r in owners)]
    decided = c.far_read != "auto" or c.read == "consistent" or c.pull_codec != "none"
    if not far or decided or c.gated or _get_keeps_memory(cluster):
        return None
    times = np.zeros(2)
    if puller is not None and cluster.rank == far[0]:
        out = np.zeros(job.layout.size, job.dtype)
        times[:] = [min(puller.timed(way, out) for _ in range(TRIES)) for way in WAYS]
    wait(cluster.comm.Ibcast(times, far[0]))
    return times


def _get_keeps_memory(cluster: Cluster) -> bool:
    """Whether owners lose memory by Get: Open MPI 5.0's do where nodes are of one host.

    Three readers at once left 7 KB of each 16.8 MB behind, seven 30 to 70 KB.
    """
    return "Open MPI" in mpi_name() and len(set(cluster.hosts)) < cluster.nodes


def faster(times: np.ndarray) -> str:
    """Return the way to read; a reply, which leaves the other direction free, in a tie."""
    return "get" if times[0] < GAIN * times[1] else "reply"


def _told(times: np.ndarray) -> str:
    get_ms, reply_ms = (1e3 * times).tolist()
    return f"far reads by {faster(times)}: {get_ms:.3g} ms by Get, {reply_ms:.3g} ms by reply"


def _release(window: Window, *users: object) -> Callable[[], None]:
    """Return what frees the window; the views that `users` hold go first."""

    def release() -> None:
        for user in users:
            vars(user).clear()
        window.free()

    return release
