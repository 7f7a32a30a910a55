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
from mpips.checkpoint.run_folder import CHECKPOINTS, DONE, METRICS, RunFolder, Tail
from mpips.health.hang_report import Quiet, alike_once, shown_stacks
from mpips.launch.heartbeat import CURRENT, DUMP, DUMP_REMOTE, LINES, STACKS, Terms, explained
from mpips.mpi.process import GONE, TRACED, send_signal, trouble

ENDED_S = 10.0  # time in which a job that cannot continue without a rank ends by itself
JOB = "job"
TOUCH_S = 3600.0
PAUSED_S = 10.0  # between two checks; if they are further apart, the supervisor itself was stopped


def saved_step(out: Path) -> int:
    """Return the step of a run's newest checkpoint; -1 if there is none."""
    return max((folder_step(path) or 0 for path in committed(out)), default=-1)


class Rank(NamedTuple):
    """Process that has reported to the supervisor.

    Attributes:
        name: Rank number as the launcher gives it.
        host: Name of its host.
        pid: Process id on that host.
        started: Start time, which distinguishes it from another process with this id.
    """

    name: str
    host: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        """Whether the process is on this host, so that its state is visible."""
        return self.host == platform.node()

    @property
    def trouble(self) -> str:
        """Why the process cannot make progress; empty if it can, or it is on another host."""
        if not self.is_here:
            return ""
        found = trouble(self.pid, self.started)
        return "" if found == TRACED else found

    def __str__(self) -> str:
        return f"rank {self.name} (process {self.pid} on {self.host})"


class Run:
    """A run that a job has begun, seen from outside.

    Args:
        begun: Report of its coordinator.

    Attributes:
        resumes: Whether a program that is restarted would continue it.
        log_every_s: Seconds between lines of ``metrics.jsonl``, as long as there are steps.
        spares: Names of the ranks whose death the run survives.
    """

    def __init__(self, begun: dict[str, Any]) -> None:
        self._out = Path(begun["run"])
        self._metrics = Tail(self._out / METRICS, int(begun["size"]))
        self._last = -1, ""
        self._epochs: int | None = None  # None if each worker makes a number of steps
        self._paces: list[tuple[float, float]] = []  # first and last report of seconds and epochs
        self.resumes = begun["resume"] == "auto"
        self.log_every_s = float(begun["log_every_s"])
        self.spares = set(map(str, begun["spares"]))
        self._folder: RunFolder | None = None
        with contextlib.suppress(OSError):
            self._folder = RunFolder(self._out)

    @property
    def out(self) -> Path:
        """Folder of the run, even if it was moved."""
        return (self._folder and self._folder.path()) or self._out

    def close(self) -> None:
        """Close the folder."""
        if self._folder is not None:
            self._folder.close()

    @property
    def is_done(self) -> bool:
        """Whether the run is complete and saved."""
        return (self.out / DONE).is_file()

    def saving(self) -> list[tuple[str, int]]:
        """Return the files of its checkpoints, with their sizes in bytes.

        Files may vanish meanwhile.
        """
        found = []
        for folder, _, names in os.walk(self.out / CHECKPOINTS):  # skips files that have vanished
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    found.append((path, os.stat(path).st_size))
        return sorted(found)

    def last(self) -> tuple[int, str]:
        """Return the last step that this start of the run reported, and why it ended, if it has."""
        step, reason = self._last
        with contextlib.suppress(OSError):  # the file does not exist yet, or no longer
            for line in self._metrics.lines(self.out / METRICS):
                with contextlib.suppress(ValueError):  # a line cut off by a full disk
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
        """Return the estimated seconds until its last epoch, from the lines that `last` has read.

        None as long as it is unknown. 0 if each worker makes a number of steps: more workers do not
        shorten such a run.
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
    """Reports of a job's ranks, in the folder that they write to.

    Args:
        folder: Folder of one start of the job.

    Attributes:
        ranks: Ranks that have reported.
        runs: Runs that have begun, in this order.
        codes: Exit codes that ranks have reported, by name.
        beats: Time of each file's last change, in ns, by the clock of its host.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[Rank] = []
        self.runs: list[Run] = []
        self.codes: dict[str, int] = {}
        self.beats: dict[Path, int] = {}
        self._tails: dict[Path, Tail] = {}

    def read(self) -> None:
        """Read the reports since the last call."""
        begun, paths = [], list[Path]()
        with contextlib.suppress(OSError):  # cleared, or the file server does not answer
            paths = sorted(self.folder.glob(f"*{LINES}"))
            current = self.folder / CURRENT
            if time.time() - current.stat().st_mtime > TOUCH_S:
                os.utime(current)  # else systemd-tmpfiles removes it after some days
        for path in paths:
            for line in self._new_lines(path):
                if "run" in line:
                    begun.append(line)
                elif "code" in line:
                    self.codes[path.stem] = line["code"]
                else:
                    self.ranks.append(Rank(path.stem, line["host"], line["pid"], line["started"]))
        self.runs += [Run(line) for line in sorted(begun, key=lambda line: float(line["time"]))]
        self.ranks.sort(key=lambda rank: (len(rank.name), rank.name))

    def _new_lines(self, path: Path) -> list[dict[str, Any]]:
        """Return the lines that a rank has added to its file, and note the file's time."""
        found = list[dict[str, Any]]()
        tail = self._tails[path] = self._tails.get(path) or Tail(path)
        with contextlib.suppress(OSError):  # as above
            self.beats[path] = path.stat().st_mtime_ns
            for line in tail.lines(path):
                with contextlib.suppress(ValueError):  # a line cut off by a full disk
                    found.append(json.loads(line))
        return found

    def alive(self) -> list[int]:
        """Return the process ids of the live ranks on this host."""
        return [r.pid for r in self.ranks if r.is_here and r.trouble != GONE]

    def begin(self, terms: Terms) -> None:
        """Create the folder for ranks that are about to start, and write the terms there."""
        with explained(self.folder):
            self.folder.mkdir(parents=True)
            (self.folder / CURRENT).write_text(json.dumps(terms._asdict()))

    def end(self) -> None:
        """Remove the terms, and read the last reports. Ranks on any host end when they see that."""
        with contextlib.suppress(OSError):
            (self.folder / CURRENT).unlink()
        self.read()

    def close(self) -> None:
        """Close the folders of runs."""
        for run in self.runs:
            run.close()

    def ask_for_stacks(self, launcher: int, wait_s: float) -> str:
        """Ask each rank to write the stacks of its threads, and return them.

        Equal stacks appear once.

        Args:
            launcher: Process id of mpirun, which forwards a signal to other hosts.
            wait_s: Seconds to wait for the stacks.
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
        time.sleep(0.1)  # the last stacks may be incomplete
        silent = {rank: f"  {rank.trouble or 'does not answer'}\n" for rank in self.ranks}
        return alike_once((str(r), self._stacks(r) or text) for r, text in silent.items())

    def _stacks(self, rank: Rank) -> str:
        with contextlib.suppress(OSError):
            return shown_stacks((self.folder / f"{rank.name}{STACKS}").read_text(errors="replace"))
        return ""


class Watch:
    """Finds hangs: a job without progress, or a rank on this host that cannot make progress.

    A job makes progress while its ranks report, and its checkpoints grow. After the end of a
    program's run, only the ranks' states are checked: the program may do other work.

    Args:
        heartbeats: Heartbeats of the job.
        timeout_s: Limit of the time without progress.
        program: Whether the job is a user's program.
        now: Seconds on the clock of all calls.
        survives: Whether MPI lets a job continue when a rank dies. A run that needs the rank ends
            itself.
        gone: Process ids of dead ranks, by host; the caller may change it.

    Attributes:
        quiet_s: Seconds without progress at the last check.
        hung: Ranks that are stopped for longer than the limit, and that the run does not need.
    """

    def __init__(
        self, heartbeats: Heartbeats, timeout_s: float, program: bool, now: float,
        survives: bool = False, gone: Mapping[str, Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        self._heartbeats, self._timeout_s, self._program = heartbeats, timeout_s, program
        self._gone = gone if gone is not None else {}
        self._survives, self._quiet = survives, Quiet(PAUSED_S)
        self._quiet.look({JOB: ()}, now)
        self.quiet_s = 0.0
        self.hung: set[Rank] = set()

    def look(self, now: float) -> str:
        """Check the job. Return what hangs; empty if nothing does."""
        heartbeats = self._heartbeats
        heartbeats.read()
        run = heartbeats.runs[-1] if heartbeats.runs else None
        running = (rank for rank in heartbeats.ranks if rank.name not in heartbeats.codes)
        troubles = {rank: trouble for rank in running if (trouble := self._trouble(rank))}
        failed = self._failed()
        # A trouble and a failure have one state: they last as long as they are seen.
        states: dict[object, object] = dict.fromkeys([failed, *troubles])
        states[JOB] = dict(heartbeats.beats), run and run.saving()
        quiet = self._quiet.look(states, now)
        if failed and quiet[failed] >= ENDED_S:
            return failed
        self.quiet_s = quiet[JOB]
        ended = run is not None and bool(run.last()[1])
        limit_s = max(self._timeout_s, 2 * run.log_every_s if run else 0.0)
        stands = self.quiet_s >= limit_s and not (ended and self._program)
        for rank, trouble in troubles.items():
            is_dead = self._survives and trouble == GONE
            if not stands and quiet[rank] < (ENDED_S if is_dead else self._timeout_s):
                continue
            if run is None or rank.name not in run.spares:
                return f"{rank} {trouble} for {quiet[rank]:.0f} s"
            if not is_dead:
                self.hung.add(rank)
        if self.hung:
            self._quiet.forget()  # the job may continue without them
        elif stands:
            where = f"in {run.out}" if run else "before a run began"
            return f"nothing has happened {where} for {self.quiet_s:.0f} s"
        return ""

    def _trouble(self, rank: Rank) -> str:
        """Return why a rank cannot make progress, as far as its host or this one knows."""
        return GONE if rank.pid in self._gone.get(rank.host, ()) else rank.trouble

    def _failed(self) -> str:
        """Return which rank has failed while MPI lets the others run; empty if none has."""
        codes, names = self._heartbeats.codes, {rank.name for rank in self._heartbeats.ranks}
        if not self._survives or not any(codes.values()) or names <= set(codes):
            return ""
        name = min(name for name, code in codes.items() if code)
        return f"rank {name} has ended with exit code {codes[name]}, and others have not"
