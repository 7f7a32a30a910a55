"""Own state of workers in a snapshot of an asynchronous run.

Workers have **own state** in mode easgd (replicas, with the slots of their rule), and if codecs
keep residuals. A residual is the part of gradients that pushes have left out. Runs without own
state do not use this module. A checkpoint contains a worker's state as it is after the last of its
pushes in the snapshot:

1. The coordinator sends ``hold`` to the workers. Between two steps, a worker copies its state after
   its push q and answers ``held`` with q. It computes on, but does not announce push q + 1. Within
   a step, it first finishes the step and its push. After its last step, it answers with its last
   push.
2. When all have answered, the coordinator sends the q's to the servers with ``snapshot``. Each
   server applies all announced pushes, which are exactly those up to the q's. It copies its shard
   and answers ``reached``.
3. When all have answered, the coordinator sends ``go``, and the workers push again. Meanwhile all
   ranks write their copies (`mpips.snapshot.saver`). The next snapshot begins after the commit.

So a worker waits before a push for the slowest worker's step and for the servers' copies, unless
its own next step takes longer. No rank waits for a waiting worker. Servers apply pushes, answer
reads and receive remote bodies until they have reached the snapshot. A waiting worker still handles
messages, shared reads and the pushes that it aggregates. A worker that waits for others' pushes
before a step (mode ssp, backup workers) answers ``hold`` while it waits. A stop, or the end of the
data, changes nothing: workers push after ``go``, and then end. The last checkpoint is made like all
others. Pushes that a server drops for their staleness count as applied. A worker that has failed
(its loss is not finite) refuses to save, and the checkpoint is removed. The checkpoint before the
first step contains no own state.

A node aggregator (`mpips.transport.push_sender`) keeps a residual for the pushes of its whole node.
It copies it and answers when all workers of the node hold, which each shows by a word, and it has
sent their pushes. Until then it begins no step.

In rounds every rank has own state. Residuals of a codec belong to the rank that packs a sum, and
powersgd's error to the rank with the rows. powersgd's basis is the same on every node, and rank 0
saves it. All ranks copy their state at the end of the round that a checkpoint contains.

A resumed run continues the state if it has as many workers and, for residuals, the same ranks as
servers and nodes. Otherwise, the ranks that now pack for a shard share the sum of its residuals
equally. Nodes share the sum of errors. So no gradient is lost (the rules with residuals are
linear). Another codec with residuals continues them, too. Replicas begin at the centre, as in Zhang
et al., NeurIPS 2015, algorithm 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from mpips.checkpoint import Checkpoint, Pieces
from mpips.codecs import BASIS, ERROR
from mpips.health import status_board
from mpips.mpi.collectives import Handler
from mpips.mpi.world import Cluster
from mpips.planning.job import Job, saved_config
from mpips.snapshot.saver import WorkerSaver
from mpips.transport.push_sender import aggregators
from mpips.transport.wire import kept, unpacked

REPLICA = "replica"


def replica_names(job: Job) -> tuple[str, ...]:
    """Return the names of a replica's parameters and slots in mode easgd."""
    return (REPLICA, *(f"{REPLICA}_{slot}" for slot in job.rule.slots))


def names(job: Job) -> tuple[str, ...]:
    """Return the names of the vectors of each worker, or in rounds of each rank; may be empty."""
    c = job.config
    if c.mode == "easgd":
        return replica_names(job)
    if c.codec == "powersgd":
        return (ERROR, BASIS) if job.cluster.nodes > 1 else ()
    return kept(job)


def read_names(job: Job) -> tuple[str, ...]:
    """Return the names of saved vectors that fit this mode and codec, and are read."""
    if job.checkpoint is None:
        return ()
    saved, now = saved_config(job), job.config
    if saved.in_rounds != now.in_rounds or (now.mode == "easgd" and _mismatch(job)):
        return ()
    found = [name for name in names(job) if name in job.checkpoint.worker_names]
    if saved.powersgd_rank != now.powersgd_rank:
        found = [name for name in found if name != BASIS]
    return tuple(found)


def _mismatch(job: Job) -> str:
    """Return why ranks cannot continue their own saved state; empty if they can."""
    config, cluster, saved = job.config, job.cluster, saved_config(job)
    before, now = len(_checkpoint(job).state.get("own", ())), len(cluster.roles.workers)
    if before != now and not config.in_rounds:
        return f"saved by {before} workers, now {now}"
    if config.mode == "easgd":
        return ""
    old = _checkpoint(job).state["world"]
    for what, a, b in (
        ("servers are ranks", old["servers"], list(cluster.roles.servers)),
        ("nodes of the ranks are", old["node_of"], list(cluster.node_of)),
        ("node_aggregation is", saved.node_aggregation, config.node_aggregation),
    ):
        if a != b:
            return f"{what} {b}, were {a}"
    return ""


def _checkpoint(job: Job) -> Checkpoint:
    assert job.checkpoint is not None, "nothing was saved"
    return job.checkpoint


def saved_numbers(job: Job) -> dict[str, int]:
    """Return the numbers saved with this worker's state; empty if it begins anew."""
    assert job.worker_id is not None, "a server has none"
    if not read_names(job) or _mismatch(job):
        return {}
    return _checkpoint(job).state["own"][job.worker_id]


def packed_before(job: Job) -> int:
    """Return the number of messages that this worker had packed; estimated if it is not saved."""
    return saved_numbers(job).get("packed", job.base_step // len(job.cluster.roles.workers))


def resume_notes(job: Job) -> Iterator[str]:
    """Yield lines for people about own state in a resumed run."""
    if job.checkpoint is None or not job.base_step:
        return
    found, who = read_names(job), "rank" if job.config.in_rounds else "worker"
    elastic = job.config.mode == "easgd"
    change = _mismatch(job) if found or (elastic and saved_config(job).mode == "easgd") else ""
    if found and not change:
        yield f"each {who} goes on with its own {', '.join(found)}"
    elif found:
        yield f"the sum of the {who}s' {', '.join(found)} goes to those who pack now: {change}"
    if found and (dropped := _dropped(job, change)):
        yield f"{found[0]} of {dropped} is left out: nobody packs them now"
    if fresh := [name for name in names(job) if name not in found]:
        start = "at the centre" if elastic else "anew" if BASIS in fresh else "at zero"
        why = unfit(job, fresh) or change * elastic or "none that fits was saved"
        yield f"the {who}s' {', '.join(fresh)} begins {start}: {why}"


def _dropped(job: Job, change: str) -> str:
    """Return the arrays or parameters whose saved residuals no rank continues."""
    c = job.config
    if c.codec == "powersgd":
        from mpips.codecs.powersgd import Factors

        ranks = saved_config(job).powersgd_rank, c.powersgd_rank
        before, now = (Factors.of(job.layout, job.dtype, rank).matrices for rank in ranks)
        return ", ".join(x.name for x in before if x.name not in {y.name for y in now})
    none = unpacked(job) if change else ""
    return none and f"parameters {none}"


def unfit(job: Job, fresh: Sequence[str]) -> str:
    """Return which saved vectors of these names do not fit this run; empty if all do."""
    there = set(fresh) & set(_checkpoint(job).worker_names)
    saved, now = saved_config(job), job.config
    if not there or (saved.mode, saved.in_rounds) == (now.mode, now.in_rounds):
        return ""
    how = " with backup workers" if saved.backup_workers else ""
    return f"that of mode {saved.mode}{how} is left out"


def fill(job: Job, state: Mapping[str, Pieces]) -> None:
    """Fill the own state of this worker, or rank, from the checkpoint, if it has any.

    Args:
        job: The run.
        state: The state; changed in place.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    number = job.cluster.rank if job.config.in_rounds else job.worker_id
    for name in read_names(job):
        change = _mismatch(job)
        for begin, view in state.get(name, ()):
            if name == BASIS:
                _checkpoint(job).read_workers_share(name, begin, view, 1)
            elif change:
                shares = job.cluster.nodes if name == ERROR else _packers(job, begin)
                _checkpoint(job).read_workers_share(name, begin, view, shares)
            else:
                assert number is not None, "a server has none"
                _checkpoint(job).read_worker(name, number, view, begin)


def _packers(job: Job, begin: int) -> int:
    """Return the number of ranks that pack gradients for the owner of a slice.

    Args:
        job: The run.
        begin: First element of the slice.
    """
    cluster, c = job.cluster, job.config
    owners = zip(cluster.roles.owners, job.shards, strict=True)
    owner = next(rank for rank, shard in owners if shard.size and shard.begin == begin)
    senders = aggregators(cluster, c.node_aggregation or c.in_rounds)
    node_of = cluster.node_of
    return len({sender for rank, sender in senders.items() if node_of[rank] != node_of[owner]})


def saver_of_own(job: Job, state: Mapping[str, Pieces], stall: bool) -> WorkerSaver | None:
    """Return the writer of this worker's or rank's own state; None if no rank has any.

    Args:
        job: The run.
        state: The state; empty if this rank has none.
        stall: See `mpips.snapshot.saver.ArraySaver`.
    """
    found = names(job)
    if not found:
        return None
    number = job.cluster.rank if job.config.in_rounds else job.worker_id
    assert number is not None, "a server has none"
    vectors = {name: state.get(name, ()) if name != BASIS or not number else () for name in found}
    return WorkerSaver(job, number, vectors, stall)


class Keeper:
    """Worker's half: copies its state for snapshots, and holds. Collective: no.

    Args:
        cluster: The job's ranks.
        saver: Writer of the state.
        hold: Takes the number of a snapshot, and stops announcing pushes. Returns whether residuals
            no longer change.
        numbers: Returns this worker's number of pushes, and the numbers saved with its state.
    """

    def __init__(
        self,
        cluster: Cluster,
        saver: WorkerSaver,
        hold: Callable[[int], bool],
        numbers: Callable[[], tuple[int, dict[str, int]]],
    ) -> None:
        self._cluster, self._saver, self._hold, self._numbers = cluster, saver, hold, numbers
        self._asked = 0  # number of the requested snapshot, until the state is copied
        self._holding = False  # whether this worker may announce no push

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of message about checkpoints."""
        write = lambda _, folder: self._saver.write_into(folder)  # noqa: E731
        return {"hold": self._hold_for, "go": self._go, "write": write}

    def _hold_for(self, _: int, number: int) -> None:
        self._asked = number

    def _go(self, _: int, __: None) -> None:
        self._holding = False

    def between(self, sound: bool) -> bool:
        """Copy the state if the coordinator has requested it; call it only between two steps.

        Args:
            sound: Whether the state is exactly that after the last push.

        Returns:
            Whether the next step may begin.

        Blocks: for the copy.
        """
        if not self._asked:
            return True
        if not self._hold(self._asked):
            return False
        self._saver.sound = sound
        self._saver.snapshot()
        self._asked, self._holding = 0, True
        self._cluster.send(self._cluster.roles.coordinator, "held", self._numbers())
        return True

    def wait_to_push(self, advance: Callable[[], object]) -> float:
        """Wait until no snapshot holds back pushes; return the seconds waited.

        Args:
            advance: Does this worker's work for other ranks meanwhile.
        """

        def released() -> bool:
            if self._holding:
                advance()
            return not self._holding

        return self._cluster.wait(released, status_board.SAVE)

    def poll(self) -> None:
        """Advance the write. Blocks: no."""
        self._saver.poll()


def keeper_of(
    job: Job,
    state: Mapping[str, Pieces],
    hold: Callable[[int], bool],
    numbers: Callable[[], tuple[int, dict[str, int]]],
) -> Keeper | None:
    """Fill a worker's own state from the checkpoint, and return its keeper; None without state.

    Args:
        job: The run.
        state: The state; changed in place.
        hold: See `Keeper`.
        numbers: See `Keeper`.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    fill(job, state)
    saver = saver_of_own(job, state, stall=False)
    return None if saver is None else Keeper(job.cluster, saver, hold, numbers)


class Holding:
    """Coordinator's half: holds the workers for a snapshot, and releases them.

    Attributes:
        numbers: Numbers saved with each worker's state, at the last snapshot.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._number = 0
        self._held: dict[int, tuple[int, dict[str, int]]] = {}
        self._reached: set[int] = set()
        self.numbers: list[dict[str, int]] = []

    def begin(self) -> None:
        """Begin a snapshot. Blocks: no."""
        self._number += 1
        self._held, self._reached = {}, set()
        self._cluster.send(self._cluster.roles.workers, "hold", self._number)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of message about the snapshot."""
        return {"held": self._holds, "reached": self._has_reached}

    def _holds(self, source: int, payload: tuple[int, dict[str, int]]) -> None:
        self._held[source], roles = payload, self._cluster.roles
        if len(self._held) == len(roles.workers):
            pushes, numbers = zip(*(self._held[rank] for rank in roles.workers), strict=True)
            self.numbers = list(numbers)
            self._cluster.send(roles.servers, "snapshot", (self._number, list(pushes)))

    def _has_reached(self, source: int, _: None) -> None:
        self._reached.add(source)
        if len(self._reached) == len(self._cluster.roles.servers):
            self._cluster.send(self._cluster.roles.workers, "go")
