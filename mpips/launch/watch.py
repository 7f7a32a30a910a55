"""View of a job from outside: processes, heartbeats, checkpoints, hangs."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpips.checkpoint.files import committed, folder_step
from mpips.checkpoint.run_folder import CHECKPOINTS, DONE, METRICS, Place, Tail
from mpips.health.hang_report import Quiet
from mpips.launch.heartbeat import CURRENT, DUMP, DUMP_REMOTE, LINES, STACKS, Terms
from mpips.mpi.process import GONE, TRACED, alike_once, send_signal, shown_stacks, trouble

ENDED_S = 10.0  # in which a job ends by itself if it does not go on without a rank
JOB = "job"
PAUSED_S = 10.0  # between two looks: the supervisor was stopped itself, and has seen nothing


def saved_step(out: Path) -> int:
    """Return the step of the newest checkpoint of a run; -1 where there is none."""
    return max((folder_step(path) or 0 for path in committed(out)), default=-1)


class Rank(NamedTuple):
    """A process that has told of itself.

    Attributes:
        name: The rank, as its launcher calls it.
        host: Where it is.
        pid: Its process id there.
        started: When it started, which tells it from another process of that id.
    """

    name: str
    host: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        """Whether it is of this host, so that it can be looked at."""
        return self.host == platform.node()

    @property
    def trouble(self) -> str:
        """Why nothing can come of it now, as far as that is seen from here; else empty."""
        if not self.is_here:
            return ""
        found = trouble(self.pid, self.started)
        return "" if found == TRACED else found

    def __str__(self) -> str:
        return f"rank {self.name} (process {self.pid} on {self.host})"


class Run:
    """A run that a job has begun, seen from outside.

    Args:
        begun: What its coordinator has told.

    Attributes:
        resumes: Whether a program that is started again would go on with it.
        log_every_s: Seconds between lines of ``metrics.jsonl``, if there are steps.
        spares: Names of the ranks that it goes on without if they die.
    """

    def __init__(self, begun: dict[str, Any]) -> None:
        self._out = Path(begun["run"])
        self._metrics = Tail(self._out / METRICS, int(begun["size"]))
        self._last = -1, ""
        self._epochs: int | None = None  # that it is to end after; None: after steps of each worker
        self._paces: list[tuple[float, float]] = []  # seconds and epochs: the first and the last
        self.resumes = begun["resume"] == "auto"
        self.log_every_s = float(begun["log_every_s"])
        self.spares = set(map(str, begun["spares"]))
        self._place: Place | None = None
        with contextlib.suppress(OSError):
            self._place = Place(self._out)

    @property
    def out(self) -> Path:
        """Its folder, wherever that was moved to."""
        return (self._place and self._place.where()) or self._out

    def close(self) -> None:
        """Let the folder go."""
        if self._place is not None:
            self._place.close()

    @property
    def is_done(self) -> bool:
        """Whether it is complete and saved."""
        return (self.out / DONE).is_file()

    def saving(self) -> list[tuple[str, int]]:
        """Return the files of its checkpoints with their sizes; some may go meanwhile."""
        found = []
        for folder, _, names in os.walk(self.out / CHECKPOINTS):  # which passes over what is gone
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    found.append((path, os.stat(path).st_size))
        return sorted(found)

    def last(self) -> tuple[int, str]:
        """Return the last step that this start of it has told of, and why it ended, if it has."""
        step, reason = self._last
        with contextlib.suppress(OSError):  # it is not there yet, or no longer
            for line in self._metrics.lines(self.out / METRICS):
                with contextlib.suppress(ValueError):  # as of a disk that was full
                    row = json.loads(line)
                    step = row["step"] if row.get("step") is not None else step
                    reason = row["reason"] if row.get("kind") == "end" else reason
                    if row.get("kind") == "start":
                        self._epochs = row.get("epochs")
                    elif row.get("kind") == "train" and "epoch" in row:
                        self._paces[1:] = [(float(row["time_s"]), float(row["epoch"]))]
        self._last = step, reason
        return self._last

    def rest_s(self) -> float | None:
        """Return the seconds until its last epoch at the pace of this start, as `last` has read.

        None while that is not known; 0 where the run is of so many steps of each worker, which more
        of them make no shorter.
        """
        if len(self._paces) < 2:
            return None
        (then, before), (now, epoch) = self._paces
        if self._epochs is None:
            return 0.0
        if epoch <= before:
            return None
        return max(0.0, self._epochs - epoch) * (now - then) / (epoch - before)


class Heartbeats:
    """What the ranks of a job have told, in the folder that they write to.

    Args:
        folder: Of one start of the job.

    Attributes:
        ranks: Those who have told of themselves.
        runs: Those that have begun, in that order.
        codes: Exit codes of the ranks that have come to their end, by name.
        beats: When each has told of anything last, by their own clocks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[Rank] = []
        self.runs: list[Run] = []
        self.codes: dict[str, int] = {}
        self.beats: dict[Path, int] = {}
        self._tails: dict[Path, Tail] = {}

    def read(self) -> None:
        """Read what was told since the last time."""
        begun = []
        for path in sorted(self.folder.glob(f"*{LINES}")):
            told = list[bytes]()
            tail = self._tails[path] = self._tails.get(path) or Tail(path)
            with contextlib.suppress(FileNotFoundError):  # somebody clears temporary files
                self.beats[path] = path.stat().st_mtime_ns
                told.extend(tail.lines(path))
            for line in map(json.loads, told):
                if "run" in line:
                    begun.append(line)
                elif "code" in line:
                    self.codes[path.stem] = line["code"]
                else:
                    rank = Rank(path.stem, line["host"], line["pid"], line["started"])
                    self.ranks.append(rank)
        self.runs += [Run(line) for line in sorted(begun, key=lambda line: float(line["time"]))]
        self.ranks.sort(key=lambda rank: (len(rank.name), rank.name))

    def alive(self) -> list[int]:
        """Return the process ids of the ranks that are here and are not gone."""
        return [r.pid for r in self.ranks if r.is_here and r.trouble != GONE]

    def begin(self, terms: Terms) -> None:
        """Make the folder, for ranks that are about to start, which read these terms there."""
        self.folder.mkdir(parents=True)
        (self.folder / CURRENT).write_text(json.dumps(terms._asdict()))

    def end(self) -> None:
        """Have ranks that are left end themselves, wherever they are, and read the last signs."""
        (self.folder / CURRENT).unlink(missing_ok=True)
        self.read()

    def close(self) -> None:
        """Let the folders of runs go."""
        for run in self.runs:
            run.close()

    def ask_for_stacks(self, launcher: int, wait_s: float) -> str:
        """Have each rank write the stacks of its threads; returns them, those that are alike once.

        Args:
            launcher: Process id of mpirun, which reaches other hosts.
            wait_s: How long to wait for them.
        """
        asked = [rank for rank in self.ranks if not rank.trouble]
        if all(rank.is_here for rank in self.ranks):
            for rank in asked:
                send_signal(rank.pid, DUMP)
        else:
            send_signal(launcher, DUMP_REMOTE)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not all(map(self._stacks, asked)):
            time.sleep(0.05)
        time.sleep(0.1)  # the last of them may not be whole
        silent = {rank: f"  {rank.trouble or 'does not answer'}\n" for rank in self.ranks}
        return alike_once((str(r), self._stacks(r) or text) for r, text in silent.items())

    def _stacks(self, rank: Rank) -> str:
        with contextlib.suppress(FileNotFoundError):
            return shown_stacks((self.folder / f"{rank.name}{STACKS}").read_text(errors="replace"))
        return ""


class Watch:
    """Finds what hangs: a job that does not get on, or one of its ranks here that cannot.

    A job gets on while its ranks tell of something and its checkpoints grow. Nobody knows what a
    program does when a run of its is over: then only its ranks are looked at.

    Args:
        signs: Of the job.
        timeout_s: How long nothing may happen.
        program: Whether it is a program of the user's.
        now: Seconds on a clock that the looks go by.
        survives: Whether MPI does not end the job when a rank dies; a run that needs it ends.
        gone: Process ids of ranks that are known to have died, by host; that may change.

    Attributes:
        quiet_s: How long nothing had happened at the last look.
        hung: Ranks that have been stopped for so long, and that the run goes on without.
    """

    def __init__(
        self, signs: Heartbeats, timeout_s: float, program: bool, now: float,
        survives: bool = False, gone: Mapping[str, Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        self._signs, self._timeout_s, self._program = signs, timeout_s, program
        self._gone = gone if gone is not None else {}
        self._survives, self._quiet = survives, Quiet(PAUSED_S)
        self._quiet.look({JOB: ()}, now)
        self.quiet_s = 0.0
        self.hung: set[Rank] = set()

    def look(self, now: float) -> str:
        """Look at the job; returns what hangs, empty if nothing does."""
        signs = self._signs
        signs.read()
        run = signs.runs[-1] if signs.runs else None
        found = {r: self._trouble(r) for r in signs.ranks if r.name not in signs.codes}
        states: dict[object, object] = {rank: True for rank, what in found.items() if what}
        states[JOB] = dict(signs.beats), run and run.saving()
        if failed := self._failed():
            states[failed] = True
        quiet = self._quiet.look(states, now)
        self.quiet_s = quiet[JOB]
        ended = run is not None and bool(run.last()[1])
        limit_s = max(self._timeout_s, 2 * run.log_every_s if run else 0.0)
        stands = self.quiet_s >= limit_s and not (ended and self._program)
        if quiet.get(failed, 0.0) >= ENDED_S:
            return failed
        for rank in (rank for rank in found if rank in quiet):
            may_die = run is not None and rank.name in run.spares
            gone = self._survives and found[rank] == GONE
            limit_s = ENDED_S if gone else self._timeout_s
            if may_die and not gone and (stands or quiet[rank] >= limit_s):
                self.hung.add(rank)
            elif not may_die and (stands or quiet[rank] >= limit_s):
                return f"{rank} {found[rank]} for {quiet[rank]:.0f} s"
        if self.hung:
            self._quiet.forget()  # it may go on then
        elif stands:
            where = f"in {run.out}" if run else "before a run began"
            return f"nothing has happened {where} for {self.quiet_s:.0f} s"
        return ""

    def _trouble(self, rank: Rank) -> str:
        """Return why nothing can come of a rank, as far as its own host or this one knows."""
        return GONE if rank.pid in self._gone.get(rank.host, ()) else rank.trouble

    def _failed(self) -> str:
        """Return which rank has failed, where MPI does not end the others; empty if none has."""
        codes, names = self._signs.codes, {rank.name for rank in self._signs.ranks}
        if not self._survives or not any(codes.values()) or names <= set(codes):
            return ""
        name = min(name for name, code in codes.items() if code)
        return f"rank {name} has ended with exit code {codes[name]}, and others have not"
