"""Records and checkpoints of a run, job by job."""

import json
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
from mpips.library.start import DATASET
from mpips.ps import replay_log
from mpips.tools.replay.server_file import Recorded, damaged, read

ABOUT = {"part", "owners", "config", "world", "workers", "spares", "block", "step", "resumed",
         "started", "numpy", "samples", "tables"}  # fmt: skip
OF_ALL = ("part", "owners", "config", "workers", "step", "resumed")  # alike in a job's files
SAVED = "of which there is a checkpoint"
WORLD = {"servers", "ranks", "node_of", "threads", "cpu"}


@dataclass(frozen=True)
class Part:
    """What one job of a run has recorded.

    Attributes:
        folder: Of its record.
        about: What is known of it.
        servers: What each server has recorded; nothing for empty shards.
        damage: The error for what is not as it was written, or missing; None where nothing is.
    """

    folder: Path
    about: dict[str, Any]
    servers: tuple[Recorded, ...]
    damage: UserError | None

    @property
    def records(self) -> list[np.ndarray]:
        """Of each server, in the order in which it applied pushes."""
        return [each.records for each in self.servers]

    @property
    def stopped(self) -> bool:
        """Whether a server's recording stopped before the job, as on a full disk."""
        return any(each.stopped for each in self.servers)

    @property
    def number(self) -> int:
        """Of the job in the run's record, from 1."""
        return int(self.about["part"])

    @property
    def base(self) -> int:
        """The step that it began at."""
        return int(self.about["step"])

    @property
    def in_rounds(self) -> bool:
        """Whether an update is a round of one push of each worker."""
        return self.config.in_rounds

    def _updates(self, pushes: int) -> int:
        return pushes // len(self.about["workers"]) if self.in_rounds else pushes

    @property
    def updates(self) -> int:
        """Updates of server 0 that are recorded."""
        return self._updates(len(self.records[0]))

    @property
    def last(self) -> int:
        """The last update that all servers with a shard have recorded."""
        return self.base + self._updates(min(len(self.records[k]) for k in self.about["owners"]))

    @property
    def of_program(self) -> bool:
        """Whether it was a program's, and not one of a model that the configuration names."""
        return self.config.dataset == DATASET

    @cached_property
    def config(self) -> Config:
        """Its configuration."""
        return from_toml(self.about["config"], str(self.folder))

    @property
    def resumed(self) -> Path | None:
        """The checkpoint that it went on from, which its record keeps; None if it did not."""
        name = self.about["resumed"]
        return self.folder / Path(name).name if name else None

    @property
    def started(self) -> Path | None:
        """The checkpoint or file that its parameters came from, if they did."""
        return Path(self.about["started"]) if self.about["started"] else None


def read_parts(run: Path) -> list[Part]:
    """Read what a run has recorded, the oldest job first; not those killed before they recorded.

    Raises:
        UserError: If it has not, or a file is none of a record; with exit code 1 where one is
            damaged or missing so that its job cannot be replayed.
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
    """Read what a job has recorded; None where it was killed before all its servers had begun."""
    files = {path.name: read(path) for path in sorted(folder.glob("server-*"))}
    found = {name: recorded for name, recorded in files.items() if recorded is not None}
    if not found:
        return None
    about = next(iter(found.values())).about
    if missing := (ABOUT - set(about)) | (WORLD - set(about.get("world", ()))):
        raise UserError(f"{folder} without {', '.join(sorted(missing))}", "a record of mpips")
    if f"part-{about['part']:04d}" != folder.name:
        raise damaged(f"{folder} with the record of job {about['part']}", "its own")
    servers = len(about["world"]["servers"])
    names = {replay_log.FILE.format(k): k for k in about["owners"]}
    for name, recorded in found.items():
        alike = all(recorded.about[key] == about[key] for key in OF_ALL)
        if not alike or recorded.about["server"] != names.get(name):
            raise damaged(f"{folder / name} of another server or job", "its own")
    damage = next((each.damage for each in found.values() if each.damage is not None), None)
    if lacking := sorted(set(names) - set(found)):
        if not any(len(each.records) for each in found.values()):
            return None
        damage = damaged(f"no record {folder / lacking[0]}", "one of each server")
    by_server = {names[name]: recorded for name, recorded in found.items()}
    each = (by_server.get(k) or _nothing(k) for k in range(servers))
    return Part(folder, about, tuple(each), damage)


def _nothing(server: int) -> Recorded:
    """Return what a server without a shard has recorded."""
    records = np.zeros(0, replay_log.SHORT_DTYPE if server else replay_log.WHOLE_DTYPE)
    return Recorded({}, records, None, np.zeros(0, replay_log.READ_DTYPE), {}, False)


@dataclass(frozen=True)
class Saved:
    """The checkpoints of a run.

    Attributes:
        by_job: Those of each recorded job, by its number and their steps.
        others: Those without a record, by step.
        unreadable: The steps of those that were committed and cannot be read.
        complaints: What is wrong with checkpoints.
    """

    by_job: dict[int, dict[int, Checkpoint]]
    others: dict[int, Checkpoint]
    unreadable: list[int]
    complaints: list[str]

    def of(self, part: Part, stopped: bool) -> dict[int, Checkpoint]:
        """Return the checkpoints that a job's replay comes to.

        Args:
            part: The job.
            stopped: Whether its recording stopped before the job.
        """
        last = part.last if stopped else None
        saved = self.by_job.get(part.number, {}).items()
        return {k: c for k, c in saved if part.base <= k and (last is None or k <= last)}


def checkpoints_of(run: Path, parts: Sequence[Part]) -> Saved:
    """Return the checkpoints of a run, those that its record keeps as well."""
    kept = [part.resumed for part in parts if part.resumed is not None]
    saved = Saved({}, {}, [], [])
    for folder in [*list_checkpoints(run), *kept]:
        try:
            checkpoint = open_checkpoint(folder)
        except UserError as problem:
            saved.complaints.append(f"not compared: {problem}")
            if (folder / INDEX).exists():  # a kill leaves folders without
                saved.unreadable.append(folder_step(folder) or 0)
            continue
        number = checkpoint.state.get("recorded")
        found = saved.by_job.setdefault(number, {}) if number else saved.others
        found[checkpoint.step] = checkpoint
    return saved


def stopped_parts(parts: Sequence[Part], saved: Saved) -> set[int]:
    """Return the numbers of the jobs after whose record the run went on without one.

    The piece that ends a file tells it, and checkpoints of a job that could not record. Both are in
    sums. They decide whether a record that ends early is replayed; the exit code is 1 either way.
    """
    found = {part.number for part in parts if part.stopped}
    for step, checkpoint in saved.others.items():
        before = [part for part in parts if part.base < step]
        if checkpoint.state.get("recorded") == 0 and before and step > before[-1].last:
            found.add(before[-1].number)
    return found


def damages_of(
    run: Path, parts: Sequence[Part], saved: Saved, stopped: Collection[int] = ()
) -> dict[int, UserError]:
    """Return what is wrong with the records of jobs, by their numbers.

    Args:
        run: The run's folder.
        parts: Its jobs.
        saved: Its checkpoints.
        stopped: The jobs whose records may end before the job.

    Raises:
        UserError: If no job has recorded anything.
    """
    found = {part.number: part.damage for part in parts if part.damage is not None}
    by_number = {part.number: part for part in parts}
    anew = parts[0].base if 1 in by_number else 0  # up to there a user may have removed the record
    for number, steps in saved.by_job.items():
        part = by_number.get(number)
        if part is not None:
            if max(steps) > part.last and not part.stopped:
                found.setdefault(number, _short(run, part, f"{max(steps)}, {SAVED}"))
        elif not anew or max(steps) > anew:
            got = f"{run} without the record of job {number}"
            found[number] = damaged(got, f"it: a checkpoint of step {max(steps)} is that job's")
    if not parts and not found:
        raise UserError(f"{run} with an empty record", "one of a job that has begun")
    if parts and parts[-1].number not in stopped:
        error = _damage_of_end(run, parts, saved)
        if error is not None:
            found.setdefault(parts[-1].number, error)
    return found


def _short(run: Path, part: Part, expected: str) -> UserError:
    got = f"{run}: the record of job {part.number} ends at update {part.last}"
    return damaged(got, expected, f"bring the rest back from a copy, or use --until {part.last}")


def _damage_of_end(run: Path, parts: Sequence[Part], saved: Saved) -> UserError | None:
    """Return the error for a record that ends before the run; None if it does not."""
    recorded = not (run / CONFIG).is_file() or read_toml(run / CONFIG).get("record", True)
    unreadable = max(saved.unreadable, default=0)
    if recorded and unreadable > max(part.last for part in parts):
        return _short(run, parts[-1], f"{unreadable}, {SAVED}")
    if not (run / DONE).exists():
        return None
    try:
        end = json.loads((run / SUMMARY).read_text())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        end = None
    if type(end) is not int:
        if not recorded:
            return None
        got = f"{run / SUMMARY} without the end of the run"
        return damaged(got, "global_step, a whole number", "use --until with an update")
    if end <= parts[-1].last or end in saved.others:
        return None
    return _short(run, parts[-1], f"{end}, at which the run was done") if recorded else None
