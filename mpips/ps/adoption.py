"""Going on for a server that has died: another one of its node takes its shard over, where it lies.

That is the chief on its node, and elsewhere a spare, or the first server that lives (the
**adopter**). All that the dead server needed to know is in the memory of its node, or comes once
more: each push is announced to all servers by one word, what workers send by message they send to
every server, and those of other nodes keep their pushes until they are applied
(`mpips.transport.kept`). So the adopter serves a second shard by a second `Served`, and workers of
the node read and push as before, to the same memory. In this order,

1. the dead process is killed, and is gone: nobody else writes the shard, and its rows of tables;
2. the update that it may have been in is finished (`mpips.ps.journal`), and then the ledger is
   exact; that of a far worker's push, when this comes again: until then nothing else is applied,
   and nobody let read. Where rows of a table were just being evicted that cannot be
   (`mpips.ps.table_journal`), and the job ends for a restart. Readers that it had let have read;
3. its clock stays as it was shown. The chief says which batches are open, and it becomes theirs
   when all is applied here that the chief's shard has;
4. if a cut is under way and the dead server has posted nothing for it, the adopter does, so that
   the others come to its end. The shard is in the next cut: unless the dead server's answer has
   come, the chief gives this checkpoint up, and begins another one at once;
5. far workers are told how many of their pushes are applied, by which they see who serves: they
   send what is open again, and ask again for what they wanted to read. For those that have died
   their trustee is asked (`mpips.ps.bequest`);
6. the chief is told, which from the death until then begins no cut and does not end the run.

An adopter that dies is followed by the next one, for all that it served. A worker that dies has
announced what it has, whoever serves. A death behind the chief's "end" ends the job for a restart,
and so does that of the last server of a node. What the dead server alone knew, its statistics, is
lost. Where workers have frozen arrays the job ends too: from which push on they hold for the dead
server is not known.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mpips.cluster.failures import Lost
from mpips.cluster.process import GONE, trouble
from mpips.cluster.window import Window
from mpips.cluster.world import Cluster
from mpips.cut.agreement import Cut
from mpips.cut.saver import Saver
from mpips.kernels.atomics import observe
from mpips.planning.job import Job
from mpips.ps.assemble import ServerHalf
from mpips.ps.bequest import Afar
from mpips.ps.journal import process_of, process_space
from mpips.ps.served import Served
from mpips.ps.shard import Server
from mpips.ps.survival import adopter_of
from mpips.ps.table_server import TableServer, row_saver

GONE_S = 10.0  # in which a process that is killed is gone


@dataclass
class Adoption:
    """A shard that was taken over.

    Attributes:
        rank: Of the server that has died.
        server: Its number.
        served: The shard.
        seconds: How long that took, from the news of the death on.
        version: Of the shard then.
        continued: Whether an update was under way, and was finished.
    """

    rank: int
    server: int
    served: Served
    seconds: float
    version: int
    continued: bool

    def told(self, dead: set[int]) -> tuple[Any, ...]:
        """Return what the chief is told.

        Args:
            dead: The servers that have died, as far as this rank knows.
        """
        begun, ledger = self.served.cut.begun, ledger_of(self.served.store)
        return dead, self.rank, begun, ledger, self.seconds, self.continued


class Adopter:
    """Takes the shards over that are this server's to take. Collective: no.

    Args:
        job: The run.
        half: This server's half of the store.
        shards: All that this server serves; its own is the first.
        afar: Asks for what far workers leave that have died.

    Attributes:
        adoptions: So far.
    """

    def __init__(self, job: Job, half: ServerHalf, shards: list[Served], afar: Afar) -> None:
        self._job, self._half, self._shards, self._afar = job, half, shards, afar
        self.adoptions: list[Adoption] = []

    def take_dead(self, rank: int, final: Mapping[int, int]) -> None:
        """Take over what a server has served that has died, if that is for this one to do.

        Args:
            rank: Of the server.
            final: Pushes of each worker that has finished, by rank.

        Raises:
            Lost: If the job cannot go on.
        """
        ranks, taken = self._job.cluster, {adoption.rank for adoption in self.adoptions}
        if adopter_of(self._job, rank) != ranks.rank:
            return
        for one in fence_all(ranks, self._half.window, taken):
            self.take(adopt(self._job, self._half, self._shards[0], one), final)

    def take(self, adoption: Adoption, final: Mapping[int, int]) -> None:
        """Serve a shard that was just taken over; see `take_dead`."""
        self.adoptions.append(adoption)
        self._shards.append(adoption.served)
        self._tell(adoption)
        self._afar.catch_up(adoption.served, final)

    def tell(self) -> None:
        """Tell the chief, which is another one now, of all."""
        for adoption in self.adoptions:
            self._tell(adoption)

    def _tell(self, adoption: Adoption) -> None:
        ranks = self._job.cluster
        dead = ranks.failures.lost.intersection(ranks.roles.servers)
        ranks.send(ranks.roles.chief, "adopted", adoption.told(dead))


def adopt(job: Job, half: ServerHalf, own: Served, rank: int) -> Adoption:
    """Take over the shard of a server of this node that has died.

    Args:
        job: The run.
        half: This server's half of the store.
        own: Its own shard.
        rank: Of the server that has died.

    Raises:
        Lost: If the job cannot go on.

    Collective: no. Blocks: until the process is gone.
    """
    start, number = time.perf_counter(), job.cluster.roles.servers.index(rank)
    if not own.store.frozen.nothing:
        raise cannot(rank, "arrays are frozen")
    fence(half.window, rank)
    store, receiver = half.adopt(number)
    if not store.recover(receiver.find):
        raise cannot(rank, "in the middle of what no other can finish")
    store.clocks.adopt(own.store.clocks)
    cut = Cut(half.posted(number), store.applied, store.idle, beyond=False)
    cut.catch_up(own.cut.begun)
    served = Served(rank, store, receiver, cut, saver_of(job, store, number))
    receiver.tell_all()
    seconds = time.perf_counter() - start
    return Adoption(rank, number, served, seconds, store.version, store.continued)


def saver_of(job: Job, server: Server, owner: int | None = None) -> Saver:
    """Return what saves a shard, and its rows of tables.

    Args:
        job: The run.
        server: Serves the shard.
        owner: Its number; by default this rank's.
    """
    slots = dict(zip(job.slots, server.slots, strict=True))
    saved = job.cluster, server.shard, server.params, slots, job.config.snapshot == "stall", owner
    if not isinstance(server, TableServer):
        return Saver(*saved)
    return row_saver(job, server.tables, *saved)


def fence(window: Window, rank: int) -> None:
    """See to it that whoever served the shard of a dead server is gone.

    Raises:
        Lost: If that cannot be.

    Blocks: until it is.
    """
    process = process_of(window, rank)
    if process.space != process_space():
        raise cannot(rank, "its process was of another container")
    if not ended(process.pid, process.started):
        raise cannot(rank, "its process does not end")


def fence_all(ranks: Cluster, window: Window, taken: Collection[int] = ()) -> list[int]:
    """See `fence`, for all servers of this node that have died: one may have served another's.

    Args:
        ranks: The job's ranks.
        window: Of the store.
        taken: Those whose shards this process serves itself.

    Returns:
        The ranks of the others.
    """
    dead = [r for r in ranks.roles.servers if r in ranks.failures.lost and ranks.near(r)]
    left = [rank for rank in dead if rank not in taken]
    for rank in left:
        fence(window, rank)
    return left


def ledger_of(store: Server) -> list[int]:
    """Return how many pushes of each worker are applied to a shard."""
    return [observe(store.applied, worker) for worker in range(store.applied.size)]


def cannot(rank: int, why: str) -> Lost:
    """Return the error for a server that has died, and that the job cannot go on without."""
    return Lost(
        f"rank {rank} has died, and {why}", "all that this job needs", "it goes on by --resume"
    )


def ended(pid: int, started: int, within_s: float = GONE_S) -> bool:
    """Kill a process of this host; returns whether it is gone. Blocks: until it is.

    Args:
        pid: Its process id.
        started: When it was started: another one of that id is left alone.
        within_s: How long to wait.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if trouble(pid, started) == GONE:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(1e-3)
    return False
