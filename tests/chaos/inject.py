"""What is done to a running job: processes are killed or stopped, made to raise, kept from writing.

All of it needs no more rights than the job's own, and reaches the processes of this host alone.
"""

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator

from tests.chaos.follow import Follower
from tests.chaos.plan import Fault
from tests.chaos.rank import RAISE

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exception": RAISE}
FULL_BYTES = 4096  # that a file may have on a disk that is full
FULL_S = 10.0  # that it is full, at most
FAILED = "no checkpoint of step"


def strike(follower: Follower, fault: Fault) -> list[str]:
    """Do what a fault says; returns what was hit, nothing if there was nobody left."""
    if fault.action == "disk":
        return _fill_disk(follower)
    hit = []
    for name, pid in _victims(follower, fault):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[fault.action])
            hit.append(name)
    return hit


def _victims(follower: Follower, fault: Fault) -> list[tuple[str, int]]:
    """Return the names and process ids of those whom a fault hits, in that order."""
    if fault.target == "job":
        return [("mpirun", pid) for pid in follower.job.mpirun()]
    if fault.target == "all":
        family = follower.job.family()
        random.Random(fault.pick).shuffle(family)
        return [(f"process {pid}", pid) for pid in family]
    ranks = follower.ranks(fault.role)
    return [(f"rank {r.name}", r.pid) for r in ranks[int(fault.pick * len(ranks)) :][:1]]


def _fill_disk(follower: Follower) -> list[str]:
    """Let no rank write more than a little to a file, until a checkpoint has failed by it.

    Writing fails as on a full disk, but with EFBIG in place of ENOSPC.
    """
    ranks = follower.ranks()
    before, end = follower.job.output.count(FAILED), time.monotonic() + FULL_S

    def done() -> bool:
        return follower.job.output.count(FAILED) > before or time.monotonic() >= end

    with _limited([rank.pid for rank in ranks]):
        follower.wait(done)
    failed = follower.job.output.count(FAILED) - before
    return [f"{len(ranks)} ranks", f"{failed} checkpoints failed"] if ranks else []


@contextlib.contextmanager
def _limited(pids: list[int]) -> Iterator[None]:
    """Limit the files of processes within the block."""
    with contextlib.ExitStack() as undo:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                full = FULL_BYTES, before[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, full)
                undo.callback(_set_limit(pid, before))
        yield


def _set_limit(pid: int, limit: tuple[int, int]) -> Callable[[], None]:
    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

    return undo
