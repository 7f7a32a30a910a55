"""Records and checkpoints of a run, job by job."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import Checkpoint, list_checkpoints
from mpips.checkpoint.files import INDEX, folder_step
from mpips.checkpoint.reader import open_checkpoint
from mpips.checkpoint.run_folder import CONFIG, DONE, SUMMARY
from mpips.config import Config
from mpips.config.jobfile import from_toml, read_toml
from mpips.errors import UserError
from mpips.ps import replay_log
from mpips.tools.replay.server_file import ServerRecord, damaged, read
from mpips.tools.results import read_summary

OF_ALL = ("part", "owners", "config", "workers", "step", "resumed")  # equal in a job's files
SAVED = "of which there is a checkpoint"


@dataclass(frozen=True)
class Part:
    """Record of one job of a run.

    Attributes:
        folder: Folder of the record.
        about: Description of the job.
        servers: Record of each server; empty for a server without a shard.
        damage: Error for the first damaged or missing file; None without damage.
    """

    folder: Path
    about: dict[str, Any]
    servers: tuple[ServerRecord, ...]
    damage: UserError | None

    @property
    def records(self) -> list[np.ndarray]:
        """Records of each server's pushes, in the order of their updates."""
        return [each.records for each in self.servers]

    @property
    def stopped(self) -> bool:
        """Whether a server stopped recording before the job ended, such as on a full disk."""
        return any(each.stopped for each in self.servers)

    @property
    def number(self) -> int:
        """Number of the job in the run's record, from 1."""
        return int(self.about["part"])

    @property
    def base(self) -> int:
        """Step at the start of the job."""
        return int(self.about["step"])

    def _updates(self, pushes: int) -> int:
        return pushes // len(self.about["workers"]) if self.config.in_rounds else pushes

    @property
    def updates(self) -> int:
        """Number of recorded updates of server 0."""
        return self._updates(len(self.records[0]))

    @property
    def last(self) -> int:
        """Last update that all servers with a shard have recorded."""
        return self.base + self._updates(min(len(self.records[k]) for k in self.about["owners"]))

    @cached_property
    def config(self) -> Config:
        """Configuration of the job."""
        return from_toml(self.about["config"], str(self.folder))

    @property
    def resumed(self) -> Path | None:
        """Checkpoint that the job resumed from, which is in the record's folder; None for none."""
        name = self.about["resumed"]
        return self.folder / Path(name).name if name else None

    @property
    def started(self) -> Path | None:
        """Checkpoint or file of the initial parameters (``--init-from``); None for none."""
        return Path(self.about["started"]) if self.about["started"] else None


def read_parts(run: Path) -> list[Part]:
    """Read the records of a run's jobs, oldest first, without jobs killed before they recorded.

    Raises:
        UserError: If there are none, or a file has another format. With exit code 1, if a file is
            damaged or missing and its job cannot be replayed.
    """
    if not run.is_dir():
        raise UserError(f"no folder {run}", "the folder of a run")
    numbers = replay_log.part_numbers(run)
    if not numbers:
        remedy = "add --record --read consistent to a run that is to be replayed"
        raise UserError(f"{run} without a record", "a run made with --record", remedy)
    if numbers != list(range(1, len(numbers) + 1)):
        got = f"{run} with the records of jobs {', '.join(map(str, numbers))}"
        raise damaged(got, f"those of jobs 1 to {numbers[-1]}")
    parts = (_read_part(replay_log.part_folder(run, number)) for number in numbers)
    return [part for part in parts if part is not None]


def _read_part(folder: Path) -> Part | None:
    """Read the record of a job; None if it was killed before all its servers began to record."""
    files = {path.name: read(path) for path in sorted(folder.glob("server-*"))}
    recorded = {name: file for name, file in files.items() if file is not None}
    if not recorded:
        return None
    about = next(iter(recorded.values())).about
    if f"part-{about['part']:04d}" != folder.name:
        raise damaged(f"{folder} with the record of job {about['part']}", "its own")
    servers = len(about["world"]["servers"])
    names = {replay_log.FILE.format(k): k for k in about["owners"]}
    for name, file in recorded.items():
        alike = all(file.about[key] == about[key] for key in OF_ALL)
        if not alike or file.about["server"] != names.get(name):
            raise damaged(f"{folder / name} of another server or job", "its own")
    damage = next((file.damage for file in recorded.values() if file.damage is not None), None)
    if missing_files := sorted(set(names) - set(recorded)):
        if not any(len(file.records) for file in recorded.values()):
            return None
        damage = damaged(f"no record {folder / missing_files[0]}", "one of each server")
    by_server = {names[name]: file for name, file in recorded.items()}
    each = (by_server.get(k) or _empty(k) for k in range(servers))
    return Part(folder, about, tuple(each), damage)


def _empty(server: int) -> ServerRecord:
    """Return the record of a server without a shard."""
    records = np.zeros(0, replay_log.SHORT_DTYPE if server else replay_log.WHOLE_DTYPE)
    return ServerRecord({}, records, None, np.zeros(0, replay_log.READ_DTYPE), {}, False)


@dataclass(frozen=True)
class Saved:
    """Checkpoints of a run.

    Attributes:
        by_job: Checkpoints of each recorded job, by number of the job and step.
        others: Checkpoints of jobs without a record, by step.
        unreadable: Steps of committed checkpoints that cannot be read.
        complaints: Messages about unreadable checkpoints.
    """

    by_job: dict[int, dict[int, Checkpoint]]
    others: dict[int, Checkpoint]
    unreadable: list[int]
    complaints: list[str]

    def of(self, part: Part, stopped: bool) -> dict[int, Checkpoint]:
        """Return the checkpoints of a job that its replay reaches, by step.

        Args:
            part: Record of the job.
            stopped: Whether recording stopped before the job ended.
        """
        last = part.last if stopped else None
        saved = self.by_job.get(part.number, {}).items()
        return {k: c for k, c in saved if part.base <= k and (last is None or k <= last)}


def checkpoints_of(run: Path, parts: Sequence[Part]) -> Saved:
    """Return the checkpoints of a run, including those in the folders of its record."""
    resumed = [part.resumed for part in parts if part.resumed is not None]
    saved = Saved({}, {}, [], [])
    for folder in [*list_checkpoints(run), *resumed]:
        try:
            checkpoint = open_checkpoint(folder)
        except UserError as problem:
            saved.complaints.append(f"not compared: {problem}")
            if (folder / INDEX).exists():  # a killed job leaves folders without an index
                saved.unreadable.append(folder_step(folder) or 0)
            continue
        number = checkpoint.state.get("recorded")
        by_step = saved.by_job.setdefault(number, {}) if number else saved.others
        by_step[checkpoint.step] = checkpoint
    return saved


def stopped_parts(parts: Sequence[Part], saved: Saved) -> set[int]:
    """Return the numbers of jobs whose recording stopped before the job ended.

    The last piece of a file says so, and so do later checkpoints that name no record. Both have
    checksums. Such a record is replayed up to its end, but the exit code is 1.
    """
    stopped = {part.number for part in parts if part.stopped}
    for step, checkpoint in saved.others.items():
        before = [part for part in parts if part.base < step]
        if checkpoint.state.get("recorded") == 0 and before and step > before[-1].last:
            stopped.add(before[-1].number)
    return stopped


def damages_of(
    run: Path, parts: Sequence[Part], saved: Saved, stopped: Collection[int]
) -> dict[int, UserError]:
    """Return the errors of damaged records, by number of the job.

    Args:
        run: Folder of the run.
        parts: Records of its jobs.
        saved: Checkpoints of the run.
        stopped: Numbers of the jobs whose records may end before the job.

    Raises:
        UserError: If no job has recorded anything.
    """
    damages = {part.number: part.damage for part in parts if part.damage is not None}
    by_number = {part.number: part for part in parts}
    removed = parts[0].base if 1 in by_number else 0  # a user may have removed earlier records
    for number, steps in saved.by_job.items():
        part = by_number.get(number)
        if part is not None:
            if max(steps) > part.last and not part.stopped:
                damages.setdefault(number, _short(run, part, f"{max(steps)}, {SAVED}"))
        elif not removed or max(steps) > removed:
            got = f"{run} without the record of job {number}"
            damages[number] = damaged(got, f"it: a checkpoint of step {max(steps)} is that job's")
    if not parts and not damages:
        raise UserError(f"{run} with an empty record", "one of a job that has begun")
    if parts and parts[-1].number not in stopped:
        error = _damage_of_end(run, parts, saved)
        if error is not None:
            damages.setdefault(parts[-1].number, error)
    return damages


def _short(run: Path, part: Part, expected: str) -> UserError:
    got = f"{run}: the record of job {part.number} ends at update {part.last}"
    return damaged(got, expected, f"bring the rest back from a copy, or use --until {part.last}")


def _damage_of_end(run: Path, parts: Sequence[Part], saved: Saved) -> UserError | None:
    """Return the error if the record ends before the run, else None."""
    recorded = not (run / CONFIG).is_file() or read_toml(run / CONFIG).get("record", True)
    unreadable = max(saved.unreadable, default=0)
    if recorded and unreadable > max(part.last for part in parts):
        return _short(run, parts[-1], f"{unreadable}, {SAVED}")
    if not (run / DONE).exists():
        return None
    try:
        end = read_summary(run).get("global_step")
    except (UserError, OSError):
        end = None
    if type(end) is not int:
        if not recorded:
            return None
        got = f"{run / SUMMARY} without the end of the run"
        return damaged(got, "global_step, a whole number", "use --until with an update")
    if end <= parts[-1].last or end in saved.others:
        return None
    return _short(run, parts[-1], f"{end}, at which the run was done") if recorded else None
