"""Going on for a chief that has died: the next server of its node becomes the chief.

What the chief alone knows of its second duty, it notes in the memory of its node
(`mpips.ps.record`). When it has died, each server tells the next one how many cuts have begun with
it. That one

1. kills what is left of dead servers, and adopts server 0's shard first (`mpips.ps.adoption`): its
   ledger says which of the batches handed out are applied;
2. repeats the hand-out from the notes. A batch that is noted and not given is given now, to the
   same ring; batches of workers that have died go to the others. Numbers that were taken back are
   told once more. A worker of another node says how many batches have come to it and how many it
   waits for: what was on its way is given again, and the rest anew;
3. opens the run's folder and goes on with ``metrics.jsonl``;
4. when all servers have told, has them come to the end of the last cut that any has begun. Its
   checkpoint is given up, as there may be answers that went to the dead; another begins at once.

Workers go on meanwhile: they have batches ahead. What they and the servers have told the dead chief
and it may not have heard (the run is to be stopped, the loss is not finite, all is applied, a shard
is taken over) they tell again. What is lost: lines of evaluations, and of programs' logs, that were
on their way to the chief; the losses since its last progress line; and statistics of its shard.
"""

from typing import TYPE_CHECKING, Any

from mpips.checkpoint import list_checkpoints
from mpips.checkpoint.files import INDEX, folder_step
from mpips.checkpoint.place import METRICS, Place, claim, is_claimed
from mpips.cluster import words
from mpips.cluster.world import Cluster
from mpips.cut.committer import Committer
from mpips.datasets.ledger import HandOut
from mpips.errors import UserError
from mpips.planning.job import Job
from mpips.ps.adoption import Adoption, Failover, cannot, fence_all
from mpips.ps.assemble import ServerHalf
from mpips.ps.coordinator import Chief
from mpips.ps.feed import Granter
from mpips.ps.record import Record
from mpips.ps.served import Served

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class Settling:
    """Has all servers come to rest behind the last cut of a chief that has died. Collective: no.

    Attributes:
        cuts: How many have begun; None until all servers have told.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begun: dict[int, int] = {}
        self._at_rest: set[int] = set()
        self.cuts: int | None = None

    def handle(self, source: int, kind: str, payload: Any) -> bool:
        """Act on a message; returns whether it was one for this, or for the dead chief."""
        if kind == "begun":
            self._begun[source] = payload
        elif kind == "settled":
            self._at_rest.add(source)
        return kind in ("begun", "settled", "shard")

    def done(self) -> bool:
        """Whether all servers that live are at rest. Blocks: no; gets on."""
        living = set(self._cluster.roles.servers) - self._cluster.failures.lost
        if self.cuts is None:
            if not living <= set(self._begun):
                return False
            self.cuts = max(self._begun.values())
            for rank in living:
                self._cluster.send(rank, "settle", self.cuts)
        return living <= self._at_rest


def succeed(job: Job, log: "Log", ahead: int, failover: Failover) -> tuple[Chief, Adoption]:
    """Become the chief, and take the shard of server 0 over.

    Args:
        job: The run.
        log: Where the run is told from now on.
        ahead: See `Granter`.
        failover: Of this server.

    Raises:
        Lost: If the job cannot go on.

    Collective: no. Blocks: until the dead processes are gone.
    """
    first, half = job.cluster.roles.servers[0], failover.half
    fence_all(job.cluster, half.window)
    record = Record(half.window, first)
    found = record.load()
    if found is None:
        raise cannot(first, "its notes are not whole")
    handout, state = found
    home = failover.adopt(first)
    handout.catch_up(home.served.store.ledger)
    chief = _chief(job, half, home.served, (handout, state), log, (record, ahead))
    chief.cuts = failover.own.cut.begun
    return chief, home


def _chief(
    job: Job,
    half: ServerHalf,
    home: Served,
    found: tuple[HandOut, dict[str, Any]],
    log: "Log",
    how: tuple[Record, int],
) -> Chief:
    handout, state = found
    record, ahead = how
    _take_folder(job, log, state)
    assert job.place is not None, "it is held now"
    committer = Committer(job, job.place, log)
    granter = Granter(job.cluster, half.window, handout, ahead, takes_back=True, record=record)
    workers = job.cluster.roles.workers
    granter.go_on([workers.index(rank) for rank in state["lost"]])
    chief = Chief(job, home.store, granter, handout, committer, log, None, record)
    committer.saved_step = _saved_step(job)
    words.tell_chief(job.cluster.rank)
    chief.go_on(state, Settling(job.cluster))
    return chief


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
    folders = [path for path in list_checkpoints(job.out) if (path / INDEX).exists()]
    return folder_step(folders[-1]) if folders else None
