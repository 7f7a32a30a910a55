"""Going on for a server that has died: the chief takes its shard over, where it lies.

On one node everything that the dead server needed to know is in shared memory, or is known to the
chief as well: each push is announced to all servers by one word, and what workers send by message
they send to every server. So the chief serves a second shard by a second `Served`, and workers read
and push as before, to the same memory. In this order,

1. the dead process is killed, and is gone: nobody else writes the shard;
2. the update that it may have been in is finished, and then the ledger is exact; if that cannot be
   (`mpips.ps.journal`), the job ends for a restart; readers that it had let have read;
3. its clock becomes the chief's, but for the pushes that one of the two has not applied yet: their
   headers still lie in the workers' buffers;
4. if a cut is under way and the dead server has posted nothing for it, the chief does, so that the
   others come to its end. The shard is in the next cut: unless the dead server's answer has come,
   the chief gives this checkpoint up, and begins another one at once.

A second server that dies is adopted after the first. So is one that dies meanwhile; a worker that
dies has announced what it has, whoever serves. The chief itself is needed: its death, also in the
middle of all this, ends the job for a restart, as does any death behind the chief's "end". What the
dead server alone knew, its statistics, is lost. Where workers have frozen arrays the job ends too:
from which push on they hold for the dead server is not known.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from mpips.cluster.failures import Lost
from mpips.cluster.process import GONE, trouble
from mpips.cut.agreement import Cut
from mpips.cut.saver import Saver
from mpips.kernels.atomics import observe
from mpips.planning.job import Job
from mpips.ps.assemble import ServerHalf
from mpips.ps.journal import process_of, process_space
from mpips.ps.served import Served
from mpips.ps.shard import Server
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


def adopt(job: Job, half: ServerHalf, own: Served, rank: int, cuts: int) -> Adoption:
    """Take over the shard of a server of this node that has died.

    Args:
        job: The run.
        half: The chief's half of the store.
        own: Its own shard.
        rank: Of the server that has died.
        cuts: How many cuts the chief has begun.

    Raises:
        Lost: If the job cannot go on.

    Collective: no. Blocks: until the process is gone.
    """
    start, number = time.perf_counter(), job.cluster.roles.servers.index(rank)
    if not own.store.told.nothing:
        raise _cannot(rank, "arrays are frozen")
    process = process_of(half.window, rank)
    if process.space != process_space():
        raise _cannot(rank, "its process was of another container")
    if not ended(process.pid, process.started):
        raise _cannot(rank, "its process does not end")
    store, receiver = half.adopt(number)
    if not store.recover(receiver.find):
        raise _cannot(rank, "in the middle of an update, with others waiting behind it")
    _set_clocks(store, own, receiver)
    maximum = half.posted(number)
    maximum.catch_up(cuts, [observe(store.applied, w) for w in range(store.applied.size)])
    cut = Cut(maximum, store.applied, store.shard.size == 0, beyond=False)
    slots = dict(zip(job.slots, store.slots, strict=True))
    stall = job.config.snapshot == "stall"
    saver = Saver(job.cluster, store.shard, store.params, slots, stall, number)
    served = Served(rank, store, receiver, cut, saver, cuts - own.cut.begun)
    seconds = time.perf_counter() - start
    return Adoption(rank, number, served, seconds, store.version, store.continued)


def _cannot(rank: int, why: str) -> Lost:
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


def _set_clocks(store: Server, own: Served, receiver: Receiver) -> None:
    """Give an adopted shard the clocks of the own one, less and more what differs."""
    less, more = list[int](), list[int]()
    for worker in range(store.applied.size if store.shard.size else 0):
        mine, its = observe(own.store.applied, worker), observe(store.applied, worker)
        differ = range(1 + min(mine, its), 1 + max(mine, its))
        numbers = [receiver.find(worker, seq).number for seq in differ]
        (less if mine > its else more).extend(numbers)
    store.clocks.adopt(own.store.clocks, less, more)
