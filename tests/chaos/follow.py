"""A disturbed job: its attempts, its ranks, what it tells and saves, and the faults injected."""

import contextlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpips.checkpoint import list_checkpoints, open_checkpoint
from mpips.checkpoint.files import INDEX
from mpips.checkpoint.run_folder import METRICS, Tail
from mpips.errors import UserError
from mpips.launch.watch import Heartbeats, Rank
from mpips.mpi.process import GONE, trouble
from tests.chaos.job import Job
from tests.chaos.plan import Fault
from tests.chaos.rank import RAISE

LOOK_S = 0.2  # between two looks at all processes of this host
SAVING_S, SAVING_POLL_S = 20.0, 0.002  # how long to wait for a file that is there for milliseconds
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exception": RAISE}
FULL_BYTES = 4096  # that a file may have on a disk that is full
FULL_S = 10.0  # that it is full, at most
FAILED = "no checkpoint of step"
SHRUNK = "shrunk"  # kind of the line on a dead rank whose round the others have made
ANEW = ("start", "lost", SHRUNK)


class Row(NamedTuple):
    """A line of ``metrics.jsonl``."""

    seen: float
    kind: str
    step: int


class Moment(NamedTuple):
    """Where a job is: at which start, and how many lines it has told, on the monotonic clock."""

    time: float
    start: int
    rows: int


class Follower:
    """Follows a job; see `wait`."""

    def __init__(self, job: Job, deadline: float) -> None:
        self.job, self._deadline = job, deadline
        self.rows: list[Row] = []
        self.out: Path | None = None
        self._heartbeats: Heartbeats | None = None
        self._metrics: Tail | None = None
        self._looked = 0.0

    def close(self) -> None:
        """Let the folder of the run go."""
        if self._heartbeats is not None:
            self._heartbeats.close()

    @property
    def now(self) -> Moment:
        """Where the job is."""
        start = int(self._heartbeats.folder.name) if self._heartbeats is not None else 0
        return Moment(time.monotonic(), start, len(self.rows))

    @property
    def step(self) -> int:
        """The last step that was told; -1 where there is none."""
        return next((row.step for row in reversed(self.rows) if row.step >= 0), -1)

    def since(self, moment: Moment, begun_anew: bool) -> list[Row]:
        """Return the lines after a moment, or of what began anew after it, without a dead one."""
        rows = self.rows[moment.rows :]
        if begun_anew:
            starts = [k for k, row in enumerate(rows) if row.kind in ANEW]
            rows = rows[starts[0] + 1 :] if starts else []
        return rows

    def starts_again(self, moment: Moment) -> bool:
        """Whether ranks start, or a run goes on without one, since a moment."""
        rows = self.rows[moment.rows :]
        return self.now.start > moment.start or any(row.kind in ANEW[1:] for row in rows)

    def saves(self, moment: Moment, begun_anew: bool) -> int:
        """Return how many checkpoints came since; see `since`."""
        return [row.kind for row in self.since(moment, begun_anew)].count("checkpoint")

    def wait(self, ready: Callable[[], bool]) -> bool:
        """Wait until something holds; returns whether it does before the job is over."""

        def look() -> bool:
            self.look()
            return ready()

        return self.job.wait_until(look, self._deadline)

    def look(self) -> None:
        if time.monotonic() - self._looked > LOOK_S:
            self.job.family()
            self._looked = time.monotonic()
        with contextlib.suppress(OSError):  # the supervisor removes its folder in the end
            starts = self.job.starts()
            if starts and (self._heartbeats is None or self._heartbeats.folder != starts[-1]):
                self.close()
                self._heartbeats = Heartbeats(starts[-1])
            if self._heartbeats is not None:
                self._heartbeats.read()
        if self._heartbeats is not None and self._heartbeats.runs:
            self.out = self._heartbeats.runs[-1].out
        if self.out is not None:
            self._read_metrics(self.out / METRICS)

    def _read_metrics(self, path: Path) -> None:
        self._metrics = self._metrics or Tail(path)
        with contextlib.suppress(OSError):  # it is not there yet
            for line in self._metrics.lines(path):
                with contextlib.suppress(ValueError):  # as of a disk that was full
                    row = json.loads(line)
                    step = -1 if row["step"] is None else row["step"]
                    kind = SHRUNK if "first" in row else row["kind"]
                    self.rows.append(Row(time.monotonic(), kind, step))

    def wait_for_saving(self) -> bool:
        """Wait until another checkpoint is being written; returns whether that comes soon."""
        deadline, before = min(self._deadline, time.monotonic() + SAVING_S), self._unwritten()
        try:
            return self.job.wait_until(
                lambda: bool(self._unwritten() - before), deadline, SAVING_POLL_S
            )
        except TimeoutError:
            return not self.job.is_over

    def _unwritten(self) -> set[Path]:
        """Return the checkpoints that are not whole: under way, or left by who was killed."""
        folders = list_checkpoints(self.out) if self.out is not None else []
        return {folder for folder in folders if not (folder / INDEX).exists()}

    def ranks(self, role: str = "") -> list[Rank]:
        """Return the ranks that live, by rank."""
        found = [] if self._heartbeats is None else self._heartbeats.ranks
        alive = [rank for rank in found if trouble(rank.pid, rank.started) != GONE]
        servers = self._servers() if role else None
        if servers is None or (role == "server" and not servers):
            return alive
        return [rank for rank in alive if (int(rank.name) in servers) == (role == "server")]

    def _servers(self) -> list[int] | None:
        """Return the ranks that are servers, if that is known."""
        for folder in reversed(list_checkpoints(self.out) if self.out is not None else []):
            with contextlib.suppress(UserError):
                servers: list[int] = open_checkpoint(folder).state["world"]["servers"]
                return servers
        return None


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
    """Let no rank write much (EFBIG in place of ENOSPC) until a checkpoint has failed by it."""
    ranks, before = follower.ranks(), follower.job.output.count(FAILED)
    limits = {rank.pid: _limit(rank.pid, None) for rank in ranks}
    end = time.monotonic() + FULL_S
    follower.wait(lambda: follower.job.output.count(FAILED) > before or time.monotonic() >= end)
    for pid, limit in limits.items():
        if limit is not None:
            _limit(pid, limit)
    failed = follower.job.output.count(FAILED) - before
    return [f"{len(ranks)} ranks", f"{failed} checkpoints failed"] if ranks else []


def _limit(pid: int, soft: int | None) -> int | None:
    """Limit the files of a process, to `FULL_BYTES` by default; returns the limit before."""
    with contextlib.suppress(ProcessLookupError):
        before, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES if soft is None else soft, hard))
        return before
    return None
