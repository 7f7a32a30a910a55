"""Coordinator failover: another server of its node becomes the coordinator.

The coordinator logs the state that only it has to the memory of its node
(`mpips.failover.coordinator_log`). When it dies, each server gives up the snapshot under way, and
tells the successor as soon as its shards are at rest. The successor

1. kills the remaining processes of dead servers, and takes over the shard of server 0 first
   (`mpips.failover.takeover`): its ledger contains the batches that are applied;
2. repeats the assignments in the log. It grants a batch that is logged but not granted, through the
   same ring, and assigns the batches of dead workers to others. It repeats the numbers of the
   batches that were taken back. A worker of another node reports how many batches it has received
   and how many it waits for. The successor sends lost grants again, and answers the remaining
   requests with new batches;
3. claims the run's folder and continues ``metrics.jsonl``;
4. begins another snapshot as soon as all servers are at rest. Until then it ignores their messages
   about the previous snapshot.

Workers continue meanwhile, since they have batches ahead. Workers and servers repeat messages that
the dead coordinator may have missed: a request to stop, a loss that is not finite, all pushes
applied, a shard taken over. Messages with evaluations and programs' log lines that were on their
way to the coordinator are lost. So are the losses since its last progress line, and the statistics
of its shard.
"""

from typing import TYPE_CHECKING, Any

from mpips.checkpoint.files import committed, folder_step
from mpips.checkpoint.run_folder import METRICS, RunFolder, claim, is_claimed
from mpips.errors import UserError
from mpips.failover.coordinator_log import CoordinatorLog, SurvivingDispatcher
from mpips.failover.takeover import Failover, Takeover, cannot_continue, fence_all
from mpips.health import status_board
from mpips.mpi.abort import Lost
from mpips.planning.job import Job
from mpips.ps.coordinator import Checkpoints, Coordinator
from mpips.ps.shard import Server
from mpips.snapshot.committer import Committer

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class SurvivingCoordinator(Coordinator):
    """Coordinator that continues when other ranks die.

    It may be the successor of a dead coordinator.

    Args:
        job: The run.
        server: Server of shard 0.
        dispatcher: Dispatcher of batches to workers.
        args: See `Coordinator`.

    Attributes:
        lost: Number of pushes of each dead worker, by rank.
    """

    def __init__(
        self, job: Job, server: Server, dispatcher: SurvivingDispatcher, *args: Any
    ) -> None:
        super().__init__(job, server, dispatcher, *args)
        self._take_back = dispatcher.take_back
        self._record = dispatcher.record  # for a successor; None if there is none
        self.lost: dict[int, int] = {}
        self._successors: dict[int, int] = {}  # rank of the present server, by rank of a dead one
        self._replaced: set[int] = set()  # dead servers, whose messages are ignored
        self._absent_shards: set[int] = set()  # missing from the checkpoint under way
        # Servers at rest after the death of a coordinator, until all living ones are; then None.
        self._at_rest: set[int] | None = None
        self._on |= {"asked": dispatcher.go_on_remote, "taken over": self._taken_over}
        self._on["settled"] = lambda *_: None  # late, from a server that has died meanwhile

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue the work of a dead coordinator, from the state that it saved; see `note`."""
        self.samples = self.allocator.samples_done + state["samples_more"]
        self.snapshots.saved_samples = -1
        self.lost, self._stop, self.diverged = state["lost"], state["stop"], state["diverged"]
        self._successors = state["serving"]
        self._replaced.update(self._successors)
        self._at_rest = set()
        self._log.start_at(self.samples)
        self._cluster.send(self._cluster.roles.servers, "skip", self.allocator.taken_back)
        self.note()
        if self._stop is not None:
            self._tell_stop()

    def note(self) -> None:
        """Save the state that a successor needs; assignments after this go to the log."""
        if self._record is not None:
            more = {
                "stop": self._stop, "diverged": self.diverged, "lost": self.lost,
                "serving": self._successors,
                "samples_more": self.samples - self.allocator.samples_done,
                "warnings": list(self._log.warnings), "eval": self._log.last_eval,
            }  # fmt: skip
            self._record.save(self.allocator, more)

    def handle(self, source: int, kind: str, payload: Any) -> None:
        """See `Coordinator.handle`."""
        if source in self._replaced:
            return  # sent before its death; another server has answered for it
        if self._at_rest is not None and kind in ("settled", "files", "applied"):
            if kind == "settled":  # the others are for the dead coordinator
                self._at_rest.add(source)
                self.snapshots.begun = max(self.snapshots.begun, payload)
            return
        super().handle(source, kind, payload)

    def lose(self, rank: int, pushes: int) -> None:
        """Continue without a dead worker, all of whose announced pushes are applied.

        Args:
            rank: Rank of the worker.
            pushes: Number of pushes that it announced.

        Raises:
            Lost: If it was the last worker.
        """
        workers = self._cluster.roles.workers
        worker = workers.index(rank)
        self.lost[rank] = pushes
        if rank == 0:  # it had locked the run's folder
            self._lock()
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

    def _lock(self) -> None:
        """Lock the run's folder in place of a dead rank."""
        folder = self._job.run_folder
        if folder is not None and (out := folder.path()) is not None and not is_claimed(out):
            claim(out)

    def _taken_over(self, source: int, payload: tuple[Any, ...]) -> None:
        """Continue without a dead server, whose shard another server has just taken over.

        Args:
            source: Rank of the server that has taken the shard over.
            payload: Message of `mpips.failover.takeover.Failover`: dead servers; rank of the dead
                server; number of snapshots begun for the shard, which takes part in the next one;
                its ledger; seconds that the takeover took; whether an update was under way.
        """
        dead, rank, begun, ledger, took, continued = payload
        self._replaced |= dead
        number, host = self._cluster.roles.servers.index(rank), self._cluster.hosts[rank]
        self._done.discard(rank)
        self._epochs_sent = 0  # the dead server may not have evicted its old rows
        if begun < self.snapshots.begun:
            self.snapshots.forget(number)
        elif self.snapshots.under_way:
            self._absent_shards.add(number)
            self.snapshots.hear(rank, (number, ledger))
        else:
            self._give_up(number)
        self._cluster.send(source, "open", (number, *self._still_open(ledger)))
        if self._successors.get(rank) == source:
            return  # the dead coordinator received the message as well
        self._successors[rank] = source
        self.note()
        taker = self._cluster.roles.servers.index(source)
        known = {"rank": rank, "server": number, "seconds": round(took, 6)}
        self._log.event("lost", self.step, **known, continued=continued)
        text = f"server {number} (rank {rank} on {host}) has died; server {taker} has taken its "
        self._log.warn(f"{text}{'shard' if number else 'duties'} over in {took:.3f} s")

    def _still_open(self, ledger: list[int]) -> tuple[int, list[int], list[int]]:
        """Return the arguments of `VectorClock.learn` for a shard with this ledger."""
        there, missing = self.server.ledger, list[int]()
        for worker, (ours, its) in enumerate(zip(there, ledger, strict=True)):
            missing += [
                number for _, number in self.allocator.open_to(worker)[max(0, its - ours) :]
            ]
        return self.allocator.issued, missing, there

    def _give_up(self, number: int) -> None:
        """Give up the checkpoint under way, unless the server of the shard has answered for it."""
        died = f"rank {self._cluster.roles.servers[number]} has died"
        self.snapshots.again |= self.snapshots.committer.give_up_shard(number, died)

    def snapshot_reached(self, step: int) -> None:
        """See `Coordinator.snapshot_reached`."""
        super().snapshot_reached(step)
        for number in self._absent_shards:
            self._give_up(number)
        self._absent_shards.clear()

    def advance(self) -> None:
        """See `Coordinator.advance`."""
        if self._record is not None and self._record.due:
            self.note()
        lost = self._cluster.failures.lost
        if self._at_rest is not None and {*self._cluster.roles.servers} - lost <= self._at_rest:
            self._at_rest, self.snapshots.again = None, True
            self._epochs_sent = 0  # now all servers listen to this one
        super().advance()

    def _waits(self) -> bool:
        """See `Coordinator`: waits for servers to come to rest, and for shards to be taken over."""
        serving = {self._successors.get(rank, rank) for rank in self._cluster.roles.servers}
        return self._at_rest is not None or bool(serving & self._cluster.failures.lost)

    def _dead(self) -> list[int]:
        """See `Coordinator`."""
        return sorted({*self.lost, *self._successors})


def succeed(job: Job, log: "Log", ahead: int, failover: Failover) -> tuple[Coordinator, Takeover]:
    """Become the coordinator, and take over the shard of server 0.

    Args:
        job: The run.
        log: Log of the run; this rank writes it from now on.
        ahead: See `Dispatcher`.
        failover: Failover of this server.

    Raises:
        Lost: If the job cannot continue.

    Collective: no. Blocks: until the dead processes are gone.
    """
    first, half = job.cluster.roles.servers[0], failover.half
    fence_all(job.cluster, half.window)
    record = CoordinatorLog(half.window, first)
    saved = record.load()
    if saved is None:
        raise cannot_continue(first, "its log is incomplete")
    allocator, state = saved
    home = failover.take_over(first)
    allocator.catch_up(home.served.store.ledger)
    _take_folder(job, log, state)
    snapshots = Checkpoints(job, Committer(job, log))
    folders = committed(job.out)
    snapshots.committer.saved_step = folder_step(folders[-1]) if folders else None
    dispatcher = SurvivingDispatcher(job.cluster, half.window, allocator, ahead, record=record)
    workers = job.cluster.roles.workers
    dispatcher.go_on([workers.index(rank) for rank in state["lost"]])
    coordinator = SurvivingCoordinator(job, home.served.store, dispatcher, snapshots, log)
    status_board.tell_coordinator(job.cluster.rank)
    coordinator.go_on(state)
    return coordinator, home


def _take_folder(job: Job, log: "Log", state: dict[str, Any]) -> None:
    """Claim the run's folder, and continue its log.

    Raises:
        Lost: If the folder is gone or was renamed.
    """
    try:
        if not is_claimed(job.out):  # else another rank of this job holds it
            claim(job.out)
        job.run_folder = RunFolder(job.out)
        log.reopen(job.out / METRICS)
    except (OSError, UserError) as problem:
        first = job.cluster.roles.servers[0]
        raise cannot_continue(first, f"{job.out} cannot be held ({problem})") from None
    log.warnings.extend(state["warnings"])
    log.last_eval = state["eval"]
