"""State of single workers in a snapshot of an asynchronous run.

Workers have **own state** where codecs keep what they leave out of a push (residuals), and in mode
easgd (replicas, with the slots of their rule). A run without any uses nothing of this module. A
checkpoint holds it as it is after the last push that the snapshot counts:

1. The coordinator says ``hold`` to the workers. One that hears it between two steps copies its
   state, as it is after its push q, answers ``held`` with q, and goes on to compute, but does not
   announce push q + 1. One that is within a step ends it first, its push included; one that has
   ended answers with its last push.
2. When all have answered, the coordinator says ``cut`` with the q's to the servers. Each applies
   what is announced, which is exactly up to them, copies its shard, and answers ``reached``.
3. When all have answered, the coordinator says ``go``, and the workers push again. Meanwhile, and
   beyond, all write what they have copied (`mpips.snapshot.saver`); the next snapshot begins after
   the commit.

So a worker waits at a push for the slowest worker's step and for the servers' copies, and not at
all if its own next step takes longer. Nobody waits for a worker that waits: servers apply, answer
reads and let remote bodies in until they have reached the snapshot; whoever holds still serves
messages, reads that it shares and pushes that it carries; what waits for others' pushes before a
step (mode ssp, backup workers) answers ``hold`` while it waits. A stop, or data that runs out,
changes
nothing: held workers push after ``go``, and then end. The last checkpoint is cut like any other.
A push that a server drops for its staleness counts as one that was applied. A worker that has
failed (its loss is not finite) refuses, and the checkpoint is removed. The checkpoint before the
first step holds no own state: there is none.

A node aggregator (`mpips.transport.push_sender`) keeps a residual of the pushes of its whole node.
It copies and answers when all workers of the node hold, which a word of each shows, and their
pushes have been carried; until then it begins no step.

A resumed run continues the state if it has as many workers, and, for residuals, servers and nodes
where they were. Else the workers share out the sum of the residuals: each of those who pack for a
shard takes an equal part, so that nothing is lost of what was to be sent there (the rules that
residuals go with are linear). Those of a node aggregator are of sums of gradients, like any other;
a checkpoint without the mark of that, ``sums``, has them of means over numbers that nobody knows,
and they begin at zero. Replicas begin at the centre, as in Zhang et al., NeurIPS 2015, algorithm 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpips.checkpoint import Checkpoint, Pieces
from mpips.health import status_board
from mpips.mpi.messages import Handler
from mpips.mpi.world import Cluster
from mpips.planning.job import Job, saved_config
from mpips.snapshot.saver import WorkerSaver
from mpips.transport.push_sender import aggregators
from mpips.transport.wire import kept, unpacked

REPLICA = "replica"
SUMS = "sums"  # among the numbers of a worker whose residuals are of sums of gradients


def replica_names(job: Job) -> tuple[str, ...]:
    """Names of a replica's parameters and slots in mode easgd."""
    return (REPLICA, *(f"{REPLICA}_{slot}" for slot in job.rule.slots))


def names(job: Job) -> tuple[str, ...]:
    """Names of the vectors that each worker has for itself; empty where none has any."""
    if job.config.mode == "easgd":
        return replica_names(job)
    return kept(job.config, job.cluster.roles, job.cluster.node_of, job.shards)


def _saved(job: Job) -> list[dict[str, int]]:
    """Return the numbers saved with each worker's own state; empty where there are none."""
    if job.checkpoint is None:
        return []
    return list(job.checkpoint.state.get("own", []))


def _change(job: Job, saved: Sequence[object]) -> str:
    """Return what keeps each worker from going on with what it saved, or an empty text."""
    before, now = len(saved), len(job.cluster.roles.workers)
    if _of_means(job):
        return "those saved are of means"
    if before != now:
        return f"saved by {before} workers, now {now}"
    if job.config.mode == "easgd":
        return ""
    old = _checkpoint(job).state["world"]
    aggregated = saved_config(job).node_aggregation
    for what, a, b in (
        ("servers are ranks", old["servers"], list(job.cluster.roles.servers)),
        ("nodes of the ranks are", old["node_of"], list(job.cluster.node_of)),
        ("node_aggregation is", aggregated, job.config.node_aggregation),
    ):
        if a != b:
            return f"{what} {b}, were {a}"
    return ""


def _checkpoint(job: Job) -> Checkpoint:
    assert job.checkpoint is not None, "nothing was saved"
    return job.checkpoint


def _of_means(job: Job) -> bool:
    """Whether the saved residuals are of means, over one does not know how many gradients."""
    marked = any(SUMS in numbers for numbers in _saved(job))
    residual = job.config.mode != "easgd"
    return residual and not marked and saved_config(job).node_aggregation


def _read(job: Job, *, shared: bool) -> tuple[str, ...]:
    """Names of the vectors that are read: each worker's own, or shares of the sum."""
    saved = _saved(job)
    if not saved or shared != bool(_change(job, saved)):
        return ()
    if shared and (job.config.mode == "easgd" or _of_means(job)):
        return ()
    return tuple(name for name in names(job) if name in _checkpoint(job).worker_names)


def read_names(job: Job) -> tuple[str, ...]:
    """Names of what was saved for this mode and codec, and is read."""
    return _read(job, shared=False) + _read(job, shared=True)


def saved_numbers(job: Job) -> dict[str, int]:
    """Return the numbers that go with this worker's state; empty where it begins anew."""
    worker = job.worker_id
    assert worker is not None, "a server has none"
    return _saved(job)[worker] if _read(job, shared=False) else {}


def packed_before(job: Job) -> int:
    """Return how many messages this worker had packed before; a guess where that is not saved."""
    return saved_numbers(job).get("packed", job.base_step // len(job.cluster.roles.workers))


def resume_notes(job: Job) -> Iterator[str]:
    """Yield lines that say, in a resumed run, what becomes of the workers' own state."""
    if job.checkpoint is None or not job.base_step:
        return
    mine, saved = names(job), _saved(job)
    own, shared = _read(job, shared=False), _read(job, shared=True)
    change = _change(job, saved) if saved else unfit(job, mine)
    if own:
        yield f"each worker goes on with its own {', '.join(own)}"
    if shared:
        yield f"the sum of the workers' {', '.join(shared)} goes to those who pack now: {change}"
        cluster = job.cluster
        if none := unpacked(job.config, cluster.roles, cluster.node_of, job.shards):
            yield f"{shared[0]} of parameters {none} is left out: nobody packs them now"
    fresh = [name for name in mine if name not in own + shared]
    if fresh:
        start = "the centre" if job.config.mode == "easgd" else "zero"
        yield f"the workers' {', '.join(fresh)} begins at {start}: {change or 'none was saved'}"


def unfit(job: Job, fresh: Sequence[str]) -> str:
    """Return what was saved by those names, and cannot be read; empty if nothing was."""
    there = set(fresh) & set(_checkpoint(job).worker_names)
    saved, now = saved_config(job), job.config
    if not there or (saved.mode, saved.in_rounds) == (now.mode, now.in_rounds):
        return ""
    how = " with backup workers" if saved.backup_workers else ""
    return f"that of mode {saved.mode}{how} is left out"


def fill(job: Job, state: Mapping[str, Pieces]) -> None:
    """Fill a worker's own state from the checkpoint, where there is something for it.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    worker, workers = job.worker_id, job.cluster.roles.workers
    assert worker is not None, "a server has none"
    for name in _read(job, shared=False):
        for begin, view in state.get(name, ()):
            _checkpoint(job).read_worker(name, worker, view, begin)
    node_of = job.cluster.node_of
    senders = aggregators(job.cluster, job.config.node_aggregation)
    owners = zip(job.shards, job.cluster.roles.servers, strict=True)
    owner = {shard.begin: rank for shard, rank in owners if shard.size}
    for name in _read(job, shared=True):
        for begin, view in state.get(name, ()):
            node = node_of[owner[begin]]
            packing = len({senders[rank] for rank in workers if node_of[rank] != node})
            _checkpoint(job).read_workers_share(name, begin, view, packing)


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

    def _hold_for(self, _: int, cut: int) -> None:
        self._asked = cut

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
    found = names(job)
    if not found:
        return None
    fill(job, state)
    vectors = {name: state.get(name, ()) for name in found}
    assert job.worker_id is not None, "a server has none"
    args = job.cluster, job.worker_id, vectors, job.layout.size, job.dtype
    saver = WorkerSaver(*args, stall=False)
    return Keeper(job.cluster, saver, hold, numbers)


class Holding:
    """The coordinator's half: has the workers hold for a snapshot, and lets them go.

    Attributes:
        numbers: Those that go with each worker's state, at the last snapshot.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cut = 0
        self._held: dict[int, tuple[int, dict[str, int]]] = {}
        self._reached: set[int] = set()
        self.numbers: list[dict[str, int]] = []

    def begin(self) -> None:
        """Begin a snapshot. Blocks: no."""
        self._cut += 1
        self._held, self._reached = {}, set()
        self._tell(self._cluster.roles.workers, "hold", self._cut)

    @property
    def handlers(self) -> dict[str, Handler]:
        """What is done with each kind of message about the snapshot."""
        return {"held": self._holds, "reached": self._has_reached}

    def _holds(self, source: int, payload: tuple[int, dict[str, int]]) -> None:
        self._held[source], roles = payload, self._cluster.roles
        if len(self._held) == len(roles.workers):
            pushes, numbers = zip(*(self._held[rank] for rank in roles.workers), strict=True)
            self.numbers = list(numbers)
            self._tell(roles.servers, "cut", (self._cut, list(pushes)))

    def _has_reached(self, source: int, _: None) -> None:
        self._reached.add(source)
        if len(self._reached) == len(self._cluster.roles.servers):
            self._tell(self._cluster.roles.workers, "go", None)

    def _tell(self, ranks: Sequence[int], kind: str, payload: Any) -> None:
        for rank in ranks:
            self._cluster.send(rank, kind, payload)
