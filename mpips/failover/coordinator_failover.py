"""Coordinator failover: the next server of its node takes its place.

What the coordinator alone knows of its second duty, it notes in the memory of its node
(`mpips.failover.coordinator_log`). When it has died, each server gives up the snapshot under way,
and tells the next one when it is at rest. That one

1. kills what is left of dead servers, and takes over server 0's shard first
   (`mpips.failover.takeover`): its ledger says which of the batches assigned are applied;
2. repeats the assignments from the notes. A batch that is noted and not given is given now, to
   the same ring; batches of workers that have died go to the others. Numbers that were taken back
   are told once more. A worker of another node says how many batches have come to it and how many
   it waits for: what was on its way is given again, and the rest anew;
3. opens the run's folder and goes on with ``metrics.jsonl``;
4. when all servers have told, begins another snapshot at once. Until then it drops what they say of
   the one before.

Workers go on meanwhile: they have batches ahead. What they and the servers have told the dead
coordinator and it may not have heard (the run is to be stopped, the loss is not finite, all is
applied, a shard is taken over) they tell again. What is lost: lines of evaluations, and of
programs' logs, that were on their way to the coordinator; the losses since its last progress line;
and statistics of its shard.
"""

from typing import TYPE_CHECKING, Any

from mpips.checkpoint.files import committed, folder_step
from mpips.checkpoint.run_folder import METRICS, Place, claim, is_claimed
from mpips.errors import UserError
from mpips.failover.coordinator_log import CoordinatorLog, SurvivingDispatcher
from mpips.failover.takeover import Failover, Takeover, cannot, fence_all
from mpips.health import status_board
from mpips.mpi.abort import Lost
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.ps.coordinator import Coordinator, Snapshots
from mpips.ps.shard import Server
from mpips.snapshot.committer import Committer

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class SurvivingCoordinator(Coordinator):
    """A coordinator that goes on when other ranks die.

    It may itself be the successor of one that has died.

    Args:
        job: The run.
        server: Server 0's shard.
        dispatcher: Gives batches to workers.
        args: See `Coordinator`.
    """

    def __init__(
        self, job: Job, server: Server, dispatcher: SurvivingDispatcher, *args: Any
    ) -> None:
        super().__init__(job, server, dispatcher, *args)
        self._take_back = dispatcher.take_back
        self._record = dispatcher.record  # of what a successor has to know, if there may be one
        self.lost: dict[int, int] = {}
        self._serving: dict[int, int] = {}  # by rank of a server that has died, that of who serves
        self._gone: set[int] = set()  # servers of which nothing is heard any more
        self._absent: set[int] = set()  # shards without which a checkpoint is being made
        self._settling: Settling | None = None  # the servers, behind the death of a coordinator
        self._on |= {"asked": dispatcher.go_on_remote, "taken over": self._taken_over}
        self._on["settled"] = lambda *_: None  # late, of a server that has died meanwhile

    def go_on(self, state: dict[str, Any], settling: "Settling") -> None:
        """Go on where a coordinator has died.

        Args:
            state: What it has noted beside the sample allocator.
            settling: Brings what it had under way to an end.
        """
        self.samples = self.allocator.samples_done + state["samples_more"]
        self.snapshots.saved_samples = -1
        self.lost, self._stop, self.diverged = state["lost"], state["stop"], state["diverged"]
        self._serving = state["serving"]
        self._gone.update(self._serving)
        self._settling = settling
        self._log.start_at(self.samples)
        self._cluster.send(self._cluster.roles.servers, "skip", self.allocator.taken_back)
        self.note()
        if self._stop is not None:
            self._tell_stop()

    def note(self) -> None:
        """Note what a successor has to know, but for what is assigned from now on."""
        if self._record is not None:
            more = {
                "stop": self._stop, "diverged": self.diverged, "lost": self.lost,
                "serving": self._serving,
                "samples_more": self.samples - self.allocator.samples_done,
                "warnings": list(self._log.warnings), "eval": self._log.last_eval,
            }  # fmt: skip
            self._record.save(self.allocator, more)

    def handle(self, source: int, kind: str, payload: Any) -> None:
        """See `Coordinator.handle`."""
        if source in self._gone:
            return  # sent before it died, and answered for
        if self._settling is None or not self._settling.handle(source, kind, payload):
            super().handle(source, kind, payload)

    def lose(self, rank: int, pushes: int) -> None:
        """Go on without a worker that has died, all of whose pushes are applied in the end.

        Raises:
            Lost: If it was the last one.
        """
        workers = self._cluster.roles.workers
        worker = workers.index(rank)
        self.lost[rank] = pushes
        if len(self.lost) == len(workers) and not self._ended:
            got, remedy = "every worker has died", "the run goes on by --resume"
            raise Lost(got, "one that goes on", remedy)
        numbers = self._take_back(worker, pushes)
        self.note()
        self._cluster.send(self._cluster.roles.servers, "skip", numbers)
        host = self._cluster.hosts[rank]
        text = f"worker {worker} (rank {rank} on {host}) has died; its {len(numbers)} open batches "
        self._log.warn(text + "go to the others")
        self._log.event("lost", self.step, rank=rank, worker=worker, batches=len(numbers))

    def _taken_over(self, source: int, payload: tuple[Any, ...]) -> None:
        """Go on without a server whose shard has just been taken over.

        Args:
            source: By whom.
            payload: What `mpips.failover.takeover.Failover` tells: servers that have died; the
                rank of this one; snapshots begun for the shard, which is in the next one; its
                pushes of each worker; seconds that it took; whether an update was under way.
        """
        dead, rank, begun, ledger, took, continued = payload
        self._gone |= dead
        number, host = self._cluster.roles.servers.index(rank), self._cluster.hosts[rank]
        self._done.discard(rank)
        if begun < self.snapshots.begun:
            self.snapshots.forget(number)
        elif self.snapshots.under_way:
            self._absent.add(number)
            self.snapshots.hear(rank, (number, ledger))
        else:
            self._give_up(number)
        self._cluster.send(source, "open", (number, *self._still_open(ledger)))
        if self._serving.get(rank) == source:
            return  # which the coordinator before has heard as well
        self._serving[rank] = source
        self.note()
        its = self._cluster.roles.servers.index(source)
        known = {"rank": rank, "server": number, "seconds": round(took, 6)}
        self._log.event("lost", self.step, **known, continued=continued)
        text = f"server {number} (rank {rank} on {host}) has died; server {its} has taken its "
        self._log.warn(f"{text}{'shard' if number else 'duties'} over in {took:.3f} s")

    def _still_open(self, ledger: list[int]) -> tuple[int, list[int], list[int]]:
        """Return what `VectorClock.learn` takes, for a shard of that ledger."""
        there, missing = self.server.ledger, list[int]()
        for worker, (ours, its) in enumerate(zip(there, ledger, strict=True)):
            missing += [
                number for _, number in self.allocator.open_to(worker)[max(0, its - ours) :]
            ]
        return self.allocator.issued, missing, there

    def _give_up(self, number: int) -> None:
        """Have the checkpoint under way fail, if the server of a shard has not answered for it."""
        died = f"rank {self._cluster.roles.servers[number]} has died"
        self.snapshots.again |= self.snapshots.committer.give_up_shard(number, died)

    def snapshot_reached(self, step: int) -> None:
        """See `Coordinator.snapshot_reached`."""
        super().snapshot_reached(step)
        for number in self._absent:
            self._give_up(number)
        self._absent.clear()

    def advance(self) -> None:
        """See `Coordinator.advance`."""
        if self._record is not None and self._record.due:
            self.note()
        if self._settling is not None:
            self._settle(self._settling)
        super().advance()

    def _settle(self, settling: "Settling") -> None:
        if settling.done():
            self._settling, self.snapshots.again = None, True
            self.snapshots.begun = settling.begun

    def _waits(self) -> bool:
        """See `Coordinator`: servers that settle, or a shard that is to be taken over still."""
        serving = {self._serving.get(rank, rank) for rank in self._cluster.roles.servers}
        return self._settling is not None or bool(serving & self._cluster.failures.lost)

    def _dead(self) -> list[int]:
        """See `Coordinator`."""
        return sorted({*self.lost, *self._serving})


class Settling:
    """Notes which servers are at rest behind the death of a coordinator. Collective: no.

    Attributes:
        begun: Number of the last snapshot that any of them has begun.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._at_rest: set[int] = set()
        self.begun = 0

    def handle(self, source: int, kind: str, payload: Any) -> bool:
        """Act on a message; returns whether it was one for this, or for the dead coordinator."""
        if kind == "settled":
            self._at_rest.add(source)
            self.begun = max(self.begun, payload)
        return kind in ("settled", "files", "applied")

    def done(self) -> bool:
        """Return whether all servers that live are at rest."""
        return set(self._cluster.roles.servers) - self._cluster.failures.lost <= self._at_rest


def succeed(job: Job, log: "Log", ahead: int, failover: Failover) -> tuple[Coordinator, Takeover]:
    """Become the coordinator, and take the shard of server 0 over.

    Args:
        job: The run.
        log: Where the run is told from now on.
        ahead: See `Dispatcher`.
        failover: Of this server.

    Raises:
        Lost: If the job cannot go on.

    Collective: no. Blocks: until the dead processes are gone.
    """
    first, half = job.cluster.roles.servers[0], failover.half
    fence_all(job.cluster, half.window)
    record = CoordinatorLog(half.window, first)
    found = record.load()
    if found is None:
        raise cannot(first, "its notes are not whole")
    allocator, state = found
    home = failover.take_over(first)
    allocator.catch_up(home.served.store.ledger)
    _take_folder(job, log, state)
    snapshots = Snapshots(job, Committer(job, log))
    snapshots.committer.saved_step = _saved_step(job)
    dispatcher = SurvivingDispatcher(job.cluster, half.window, allocator, ahead, record=record)
    workers = job.cluster.roles.workers
    dispatcher.go_on([workers.index(rank) for rank in state["lost"]])
    coordinator = SurvivingCoordinator(job, home.served.store, dispatcher, snapshots, log)
    status_board.tell_coordinator(job.cluster.rank)
    coordinator.go_on(state, Settling(job.cluster))
    return coordinator, home


def _take_folder(job: Job, log: "Log", state: dict[str, Any]) -> None:
    """Hold the run's folder, and go on with what is told there.

    Raises:
        Lost: If it is gone, or was renamed.
    """
    try:
        if not is_claimed(job.out):  # else by another rank of this job
            claim(job.out)
        job.place = Place(job.out)
        log.reopen(job.out / METRICS)
    except (OSError, UserError) as problem:
        first = job.cluster.roles.servers[0]
        raise cannot(first, f"{job.out} cannot be held ({problem})") from None
    log.warnings.extend(state["warnings"])
    log.last_eval = state["eval"]


def _saved_step(job: Job) -> int | None:
    folders = committed(job.out)
    return folder_step(folders[-1]) if folders else None
