"""What a run has recorded: of each of its jobs the order of pushes, and what it began with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import Checkpoint, list_checkpoints
from mpips.checkpoint.place import CONFIG, DONE, SUMMARY
from mpips.checkpoint.reader import open_checkpoint
from mpips.config import Config
from mpips.config.jobfile import from_toml, read_toml
from mpips.errors import UserError
from mpips.library.start import DATASET
from mpips.ps import recording

ABOUT = {"part", "owners", "config", "world", "workers", "spares", "block", "step", "resumed",
         "started", "numpy", "samples", "tables"}  # fmt: skip
OF_ALL = ("part", "owners", "config", "workers", "step", "resumed")  # alike in a job's files
WORLD = {"servers", "ranks", "node_of", "threads", "cpu"}


@dataclass(frozen=True)
class Part:
    """What one job of a run has recorded.

    Attributes:
        folder: Of its record.
        about: What is known of it.
        records: Of each server, in the order in which it applied pushes; empty for empty shards.
        damage: The error for what is not as it was written, or missing; None where nothing is.
        reads: Who read rows of each server, and when; see `Recorded.reads`.
        evicted: After how many of its updates each server has evicted rows; see `Recorded`.
    """

    folder: Path
    about: dict[str, Any]
    records: tuple[np.ndarray, ...]
    damage: UserError | None
    reads: tuple[np.ndarray, ...]
    evicted: tuple[dict[int, int], ...]

    @property
    def number(self) -> int:
        """Of the job in the run's record, from 1."""
        return int(self.about["part"])

    @property
    def base(self) -> int:
        """The step that it began at."""
        return int(self.about["step"])

    @property
    def updates(self) -> int:
        """Updates of server 0 that are recorded."""
        return len(self.records[0])

    @property
    def last(self) -> int:
        """The last update that all servers with a shard have recorded."""
        return self.base + min(len(self.records[k]) for k in self.about["owners"])

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
    numbers = recording.part_numbers(run)
    if not numbers:
        remedy = "add --record --read consistent to a run that is to be replayed"
        raise UserError(f"{run} without a record", "a run made with --record", remedy)
    if numbers != list(range(1, len(numbers) + 1)):
        got = f"{run} with the records of jobs {', '.join(map(str, numbers))}"
        raise recording.damaged(got, f"those of jobs 1 to {numbers[-1]}")
    parts = (_read_part(recording.part_folder(run, number)) for number in numbers)
    return [part for part in parts if part is not None]


def _read_part(folder: Path) -> Part | None:
    """Read what a job has recorded; None where it was killed before all its servers had begun."""
    files = {path.name: recording.read(path) for path in sorted(folder.glob("server-*"))}
    found = {name: recorded for name, recorded in files.items() if recorded is not None}
    if not found:
        return None
    about = next(iter(found.values())).about
    if missing := (ABOUT - set(about)) | (WORLD - set(about.get("world", ()))):
        raise UserError(f"{folder} without {', '.join(sorted(missing))}", "a record of mpips")
    if f"part-{about['part']:04d}" != folder.name:
        raise recording.damaged(f"{folder} with the record of job {about['part']}", "its own")
    servers = len(about["world"]["servers"])
    names = {recording.FILE.format(k): k for k in about["owners"]}
    for name, recorded in found.items():
        alike = all(recorded.about[key] == about[key] for key in OF_ALL)
        if not alike or recorded.about["server"] != names.get(name):
            raise recording.damaged(f"{folder / name} of another server or job", "its own")
    damage = next((each.damage for each in found.values() if each.damage is not None), None)
    if lacking := sorted(set(names) - set(found)):
        if not any(len(each.records) for each in found.values()):
            return None
        damage = recording.damaged(f"no record {folder / lacking[0]}", "one of each server")
    by_server = {names[name]: recorded for name, recorded in found.items()}
    each = [by_server.get(k) or _nothing(k) for k in range(servers)]
    records, reads = tuple(one.records for one in each), tuple(one.reads for one in each)
    return Part(folder, about, records, damage, reads, tuple(one.evicted for one in each))


def _nothing(server: int) -> recording.Recorded:
    """Return what a server without a shard has recorded."""
    records = np.zeros(0, recording.SHORT_DTYPE if server else recording.WHOLE_DTYPE)
    return recording.Recorded({}, records, None, np.zeros(0, recording.READ_DTYPE), {})


Saved = dict[int, dict[int, Checkpoint]]


def checkpoints_of(run: Path, parts: list[Part]) -> tuple[Saved, list[str]]:
    """Return the checkpoints that each job has saved, by job and step, and what is damaged."""
    kept = [part.resumed for part in parts if part.resumed is not None]
    folders = [*list_checkpoints(run), *kept]
    found: Saved = {part.number: {} for part in parts}
    complaints = []
    for folder in folders:
        try:
            checkpoint = open_checkpoint(folder)
        except UserError as problem:
            complaints.append(f"not compared: {problem}")
            continue
        if number := checkpoint.state.get("recorded"):
            found.setdefault(number, {})[checkpoint.step] = checkpoint
    return found, complaints


def check_parts(run: Path, parts: Sequence[Part], saved: Mapping[int, Mapping[int, Any]]) -> None:
    """Check that records are sound, and go as far as the run is known to have gone.

    Args:
        run: The run's folder.
        parts: Its jobs.
        saved: What is saved of each, by number and step.

    Raises:
        UserError: If not, with exit code 1. If no job has recorded anything.
    """
    for part in parts:
        if part.damage is not None:
            raise part.damage
    lasts = {part.number: part.last for part in parts}
    for number, steps in saved.items():
        if number not in lasts:
            got = f"{run} without the record of job {number}"
            raise recording.damaged(got, f"it: a checkpoint of step {max(steps)} is that job's")
        if steps and max(steps) > lasts[number]:
            got = f"{run}: the record of job {number} ends at update {lasts[number]}"
            raise recording.damaged(got, f"{max(steps)}, of which there is a checkpoint")
    if not parts:
        raise UserError(f"{run} with an empty record", "one of a job that has begun")
    end = _end_of(run)
    if end is not None and end > parts[-1].last:
        got = f"{run}: the record ends at update {parts[-1].last}"
        raise recording.damaged(got, f"{end}, at which the run was done")


def _end_of(run: Path) -> int | None:
    """Return the update at which a run was done; None where it is not, or that is not recorded."""
    if not (run / DONE).exists():
        return None
    if (run / CONFIG).is_file() and not read_toml(run / CONFIG).get("record"):
        return None
    try:
        found: int = json.loads((run / SUMMARY).read_text())["global_step"]
    except (OSError, ValueError, KeyError):
        return None
    return found
