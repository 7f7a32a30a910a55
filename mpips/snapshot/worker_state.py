"""State of single workers in a snapshot of an asynchronous run.

Workers have **own state** where codecs keep what they leave out of a push (residuals), and in mode
easgd (replicas, with the slots of their rule). A run without any uses nothing of this module. A
checkpoint holds it as it is after the last push that the snapshot counts:

1. The coordinator says ``hold`` to the workers. One that hears it between two steps copies its
   state, as it is after its push q, answers ``held`` with q, and goes on to compute, but does not
   announce push q + 1. One that is within a step ends it first, its push included; one that has
   ended answers with its last push.
2. When all have answered, the coordinator sends ``snapshot`` with the q's to the servers. Each
   applies what is announced, which is exactly up to them, copies its shard, and answers
   ``reached``.
3. When all have answered, the coordinator says ``go``, and the workers push again. Meanwhile, and
   beyond, all write what they have copied (`mpips.snapshot.saver`); the next snapshot begins after
   the commit.

So a worker waits at a push for the slowest worker's step and for the servers' copies, and not at
all if its own next step takes longer. Nobody waits for a worker that waits: servers apply, answer
reads and let remote bodies in until they have reached the snapshot; whoever holds still serves
messages, reads that it shares and pushes that it carries; what waits for others' pushes before a
step (mode ssp, backup workers) answers ``hold`` while it waits. A stop, or data that runs out,
changes nothing: held workers push after ``go``, and then end. The last checkpoint is made like any
other. A push that a server drops for its staleness counts as one that was applied. A worker that
has failed (its loss is not finite) refuses, and the checkpoint is removed. The checkpoint before
the first step holds no own state: there is none.

A node aggregator (`mpips.transport.push_sender`) keeps a residual of the pushes of its whole node.
It copies and answers when all workers of the node hold, which a word of each shows, and their
pushes have been carried; until then it begins no step.

In rounds every rank has own state: a codec's residuals lie with the rank that packs a sum,
powersgd's error with the rank that has the rows; its basis is the same on every node, and is saved
by rank 0. All is copied at the end of the round that a checkpoint holds.

A resumed run continues the state if it has as many workers, and, for what codecs keep, servers and
nodes where they were. Else those who pack now share out the sum: each of those who pack for a shard
takes an equal part, and each node of an error, so that nothing is lost of what was to be sent there
(the rules that residuals go with are linear). A residual is of no codec: another one that keeps
residuals goes on with it. Replicas begin at the centre, as in Zhang et al., NeurIPS 2015,
algorithm 1.
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
    """Return the names of the vectors of each worker, in rounds of each rank; may be empty."""
    c = job.config
    if c.mode == "easgd":
        return replica_names(job)
    if c.codec == "powersgd":
        return (ERROR, BASIS) if job.cluster.nodes > 1 else ()
    return kept(job)


def read_names(job: Job) -> tuple[str, ...]:
    """Return the names of what was saved for this mode and codec, and is read."""
    if job.checkpoint is None:
        return ()
    saved, now = saved_config(job), job.config
    if saved.in_rounds != now.in_rounds or (now.mode == "easgd" and _change(job)):
        return ()
    found = [name for name in names(job) if name in job.checkpoint.worker_names]
    if saved.powersgd_rank != now.powersgd_rank:
        found = [name for name in found if name != BASIS]
    return tuple(found)


def _change(job: Job) -> str:
    """Return what keeps each from going on with what it saved itself, or an empty text."""
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
    """Return the numbers that go with this worker's state; empty where it begins anew."""
    assert job.worker_id is not None, "a server has none"
    if not read_names(job) or _change(job):
        return {}
    return _checkpoint(job).state["own"][job.worker_id]


def packed_before(job: Job) -> int:
    """Return how many messages this worker had packed before; a guess where that is not saved."""
    return saved_numbers(job).get("packed", job.base_step // len(job.cluster.roles.workers))


def resume_notes(job: Job) -> Iterator[str]:
    """Yield lines that say, in a resumed run, what becomes of own state."""
    if job.checkpoint is None or not job.base_step:
        return
    found, who = read_names(job), "rank" if job.config.in_rounds else "worker"
    elastic = job.config.mode == "easgd"
    change = _change(job) if found or (elastic and saved_config(job).mode == "easgd") else ""
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
    """Return the arrays or parameters that something was kept of, and for which nothing is now."""
    c = job.config
    if c.codec == "powersgd":
        from mpips.codecs.powersgd import Factors

        ranks = saved_config(job).powersgd_rank, c.powersgd_rank
        before, now = (Factors.of(job.layout, job.dtype, rank).matrices for rank in ranks)
        return ", ".join(x.name for x in before if x.name not in {y.name for y in now})
    none = unpacked(job) if change else ""
    return none and f"parameters {none}"


def unfit(job: Job, fresh: Sequence[str]) -> str:
    """Return what was saved by those names, and cannot be read; empty if nothing was."""
    there = set(fresh) & set(_checkpoint(job).worker_names)
    saved, now = saved_config(job), job.config
    if not there or (saved.mode, saved.in_rounds) == (now.mode, now.in_rounds):
        return ""
    how = " with backup workers" if saved.backup_workers else ""
    return f"that of mode {saved.mode}{how} is left out"


def fill(job: Job, state: Mapping[str, Pieces]) -> None:
    """Fill what this worker, or rank, has for itself from the checkpoint, where that has any of it.

    Args:
        job: The run.
        state: The state, which is changed in place.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    number = job.cluster.rank if job.config.in_rounds else job.worker_id
    for name in read_names(job):
        change = _change(job)
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
    """Return how many ranks pack what goes to the owner of the slice that begins there."""
    cluster, c = job.cluster, job.config
    owners = zip(cluster.roles.owners, job.shards, strict=True)
    owner = next(rank for rank, shard in owners if shard.size and shard.begin == begin)
    senders = aggregators(cluster, c.node_aggregation or c.in_rounds)
    return len({sender for rank, sender in senders.items() if not _beside(cluster, rank, owner)})


def _beside(cluster: Cluster, rank: int, other: int) -> bool:
    """Return whether two ranks are on one node."""
    return cluster.node_of[rank] == cluster.node_of[other]


def saver_of_own(job: Job, state: Mapping[str, Pieces], stall: bool) -> WorkerSaver | None:
    """Return what saves the own state of this worker, or rank; None where nobody has any.

    Args:
        job: The run.
        state: The state; empty where this one has none.
        stall: See `mpips.snapshot.saver.Snapshots`.
    """
    found = names(job)
    if not found:
        return None
    number = job.cluster.rank if job.config.in_rounds else job.worker_id
    assert number is not None, "a server has none"
    vectors = {name: state.get(name, ()) if name != BASIS or not number else () for name in found}
    return WorkerSaver(job, number, vectors, stall)


class Keeper:
    """A worker's half: it copies its state for snapshots, and holds. Collective: no.

    Args:
        cluster: The job's ranks.
        saver: Saves the state.
        hold: Takes the number of a snapshot; announces nothing for now, and returns whether what
            codecs keep stays as it is.
        numbers: Returns this worker's number of pushes, and the numbers that go with its state.
    """

    def __init__(
        self,
        cluster: Cluster,
        saver: WorkerSaver,
        hold: Callable[[int], bool],
        numbers: Callable[[], tuple[int, dict[str, int]]],
    ) -> None:
        self._cluster, self._saver, self._hold, self._numbers = cluster, saver, hold, numbers
        self._asked = 0  # the snapshot that the coordinator asked for, until the state is copied
        self._holding = False  # whether no push may be announced

    @property
    def handlers(self) -> dict[str, Handler]:
        """What is done with each kind of message about checkpoints."""
        write = lambda _, folder: self._saver.write_into(folder)  # noqa: E731
        return {"hold": self._hold_for, "go": self._go, "write": write}

    def _hold_for(self, _: int, number: int) -> None:
        self._asked = number

    def _go(self, _: int, __: None) -> None:
        self._holding = False

    def between(self, sound: bool) -> bool:
        """Copy the state if that was asked for; call it between two steps only.

        Args:
            sound: Whether the state is what the last push has left.

        Returns:
            Whether the next step may begin. Blocks: for a copy.
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

    def wait_to_push(self, get_on: Callable[[], object]) -> float:
        """Wait until no snapshot holds pushes back; returns the seconds waited.

        Args:
            get_on: Gets on with all that the worker does for others.
        """

        def released() -> bool:
            if self._holding:
                get_on()
            return not self._holding

        return self._cluster.wait(released, status_board.SAVE)

    def poll(self) -> None:
        """Get on with writing. Blocks: no."""
        self._saver.poll()


def keeper_of(
    job: Job,
    state: Mapping[str, Pieces],
    hold: Callable[[int], bool],
    numbers: Callable[[], tuple[int, dict[str, int]]],
) -> Keeper | None:
    """Fill a worker's own state from the checkpoint, and return what saves it; None without any.

    Args:
        job: The run.
        state: The state, which is changed in place.
        hold: See `Keeper`.
        numbers: See `Keeper`.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    fill(job, state)
    saver = saver_of_own(job, state, stall=False)
    return None if saver is None else Keeper(job.cluster, saver, hold, numbers)


class Holding:
    """The coordinator's half: has the workers hold for a snapshot, and lets them go.

    Attributes:
        numbers: Those that go with each worker's state, at the last snapshot.
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
        """What is done with each kind of message about the snapshot."""
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
