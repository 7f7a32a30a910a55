"""What a run has recorded: of each of its jobs the order of pushes, and what it began with."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import Checkpoint, list_checkpoints
from mpips.checkpoint.reader import open_checkpoint
from mpips.config import Config
from mpips.config.jobfile import from_toml
from mpips.errors import UserError
from mpips.library.start import DATASET
from mpips.ps import recording

ABOUT = {"part", "shard", "config", "world", "workers", "spares", "block", "step", "resumed",
         "started", "numpy", "samples", "tables"}  # fmt: skip
WORLD = {"servers", "ranks", "node_of", "threads", "cpu"}


@dataclass(frozen=True)
class Part:
    """What one job of a run has recorded.

    Attributes:
        folder: Of its record.
        about: What is known of it.
        records: Of each server, in the order in which it applied pushes; empty for empty shards.
        whole: Whether no file ends within a piece.
        reads: Who read rows of each server, and when; see `Recorded.reads`.
        evicted: After how many of its updates each server has evicted rows; see `Recorded`.
    """

    folder: Path
    about: dict[str, Any]
    records: tuple[np.ndarray, ...]
    whole: bool
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
        UserError: If it has not, or a file is none of a record.
    """
    numbers = recording.part_numbers(run)
    if not numbers:
        remedy = "add --record --read consistent to a run that is to be replayed"
        raise UserError(f"{run} without a record", "a run made with --record", remedy)
    parts = (_read_part(recording.part_folder(run, number)) for number in numbers)
    return [part for part in parts if part is not None]


def _read_part(folder: Path) -> Part | None:
    begun = [path for path in sorted(folder.glob("server-*")) if path.stat().st_size]
    files = {path.name: recording.read(path) for path in begun}
    if not files:
        return None
    about = next(iter(files.values())).about
    if missing := (ABOUT - set(about)) | (WORLD - set(about.get("world", ()))):
        raise UserError(f"{folder} without {', '.join(sorted(missing))}", "a record of mpips")
    servers = len(about["world"]["servers"])
    found = {recorded.about["server"]: recorded for recorded in files.values()}
    dtypes = (recording.SHORT_DTYPE if k else recording.WHOLE_DTYPE for k in range(servers))
    none = [np.zeros(0, dtype) for dtype in dtypes]
    records = [found[k].records if k in found else none[k] for k in range(servers)]
    none_read = np.zeros(0, recording.READ_DTYPE)
    reads = [found[k].reads if k in found else none_read for k in range(servers)]
    evicted = tuple(found[k].evicted if k in found else {} for k in range(servers))
    whole = all(recorded.whole for recorded in found.values())
    return Part(folder, about, tuple(records), whole, tuple(reads), evicted)


Saved = dict[int, dict[int, Checkpoint]]


def checkpoints_of(run: Path, parts: list[Part]) -> tuple[Saved, list[str]]:
    """Return the checkpoints that each part has saved, by part and step, and what is damaged."""
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
        found.get(checkpoint.state.get("recorded", 0), {})[checkpoint.step] = checkpoint
    return found, complaints
