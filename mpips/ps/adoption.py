"""Going on for a server that has died: the chief takes its shard over, where it lies.

On one node everything that the dead server needed to know is in shared memory, or is known to the
chief as well: each push is announced to all servers by one word, and what workers send by message
they send to every server. So the chief serves a second shard by a second `Served`, and workers read
and push as before, to the same memory. In this order,

1. the dead process is killed, and is gone: nobody else writes the shard, and its rows of tables;
2. the update that it may have been in is finished (`mpips.ps.journal`), and then the ledger is
   exact; where rows of a table were just being evicted that cannot be (`mpips.ps.table_journal`),
   and the job ends for a restart; readers that it had let have read;
3. its clock becomes that of the batches handed out, but for those that the shard is without;
4. if a cut is under way and the dead server has posted nothing for it, the chief does, so that the
   others come to its end. The shard is in the next cut: unless the dead server's answer has come,
   the chief gives this checkpoint up, and begins another one at once.

A second server that dies is adopted after the first, and an adopted shard again if the chief dies
(`mpips.ps.succession`). A worker that dies has announced what it has, whoever serves. A death
behind the chief's "end" ends the job for a restart. What the dead server alone knew, its
statistics, is lost. Where workers have frozen arrays the job ends too: from which push on they hold
for the dead server is not known.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpips.cluster.failures import Lost
from mpips.cluster.process import GONE, trouble
from mpips.cluster.window import Window
from mpips.cut.agreement import Cut
from mpips.cut.saver import Saver
from mpips.datasets.ledger import HandOut
from mpips.kernels.atomics import observe
from mpips.planning.job import Job
from mpips.ps.assemble import ServerHalf
from mpips.ps.journal import process_of, process_space
from mpips.ps.served import Served
from mpips.ps.shard import Server
from mpips.ps.table_server import TableServer, row_saver
from mpips.transport.channel import Receiver

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


def adopt(
    job: Job,
    half: ServerHalf,
    own: Served,
    rank: int,
    cuts: int,
    still_open: Callable[[Server, Receiver], tuple[int, set[int]]],
) -> Adoption:
    """Take over the shard of a server of this node that has died.

    Args:
        job: The run.
        half: This server's half of the store.
        own: Its own shard.
        rank: Of the server that has died.
        cuts: How many cuts have begun.
        still_open: Returns how many batches were handed out, and the numbers of those that the
            shard is without.

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
    store.clocks.adopt(own.store.clocks, *still_open(store, receiver))
    cut = Cut(half.posted(number), store.applied, store.idle, beyond=False)
    cut.catch_up(cuts)
    served = Served(rank, store, receiver, cut, saver_of(job, store, number))
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


def ledger_of(store: Server) -> list[int]:
    """Return how many pushes of each worker are applied to a shard."""
    return [observe(store.applied, worker) for worker in range(store.applied.size)]


def open_on(
    store: Server, receiver: Receiver, handout: HandOut, chief: Server
) -> tuple[int, set[int]]:
    """Return how many batches were handed out, and the numbers of those that a shard is without.

    Args:
        store: The shard, of a server that has died.
        receiver: Where its pushes come from.
        handout: What was handed out; its open batches are those that the chief's shard is without.
        chief: That shard. Headers of pushes that one of the two has not applied yet still lie in
            the workers' buffers.
    """
    missing, ledgers = set[int](), zip(ledger_of(chief), ledger_of(store), strict=True)
    for worker, (there, its) in enumerate(() if store.idle else ledgers):
        beyond = handout.open_to(worker)[max(0, its - there) :]
        missing.update(number for _, number in beyond)
        missing.update(receiver.find(worker, seq).number for seq in range(its + 1, there + 1))
    return handout.issued, missing


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
