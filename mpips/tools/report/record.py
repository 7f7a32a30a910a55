"""Reading of a run for a report, damaged or not.

What is damaged or missing is told, and left out.
"""

import itertools
import json
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpips.checkpoint.run_folder import CONFIG, METRICS, SUMMARY, Tail, is_claimed
from mpips.config.jobfile import read_toml
from mpips.errors import UserError
from mpips.tools.report.curves import Curve, Point

MEASURES = {  # by the kind of line and its field
    ("train", "loss"): "training loss",
    ("eval", "loss"): "held-out loss",
    ("eval", "accuracy"): "accuracy",
    ("train", "staleness"): "staleness",
}
RATE = "samples/s"
EVENTS = 200  # of a kind that are kept, the last ones
CONFIG_BYTES = 100_000
RUNNING = "running"
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Event(NamedTuple):
    """What happened to a run beside training.

    Attributes:
        kind: ``begun``, ``resumed``, ``checkpoint``, ``stop``, ``death``, ``failure``, ``warning``
            or ``end``.
        seconds: When, as of `Point`.
        updates: Applied until then.
        text: What is known of it.
    """

    kind: str
    seconds: float
    updates: float
    text: str


@dataclass
class Record:
    """A run.

    Attributes:
        name: By which it is called; no two of a report are called the same.
        path: Its folder.
        config: Its options; empty where they cannot be read.
        text: Its job file.
        summary: ``summary.json``; empty where there is none.
        running: Whether a job is in its folder.
        unfinished: Whether its last job has not told of its end.
        curves: What was measured as it went on, by the names of `MEASURES`, and `RATE`.
        checkpoints: When they were committed.
        events: All else that happened.
        jobs: When each of its jobs began and ended, in seconds.
        samples_per_epoch: NaN where it is not known.
        missing: What cannot be read or is not there.
    """

    name: str
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    running: bool = False
    unfinished: bool = False
    curves: dict[str, Curve] = field(default_factory=dict)
    checkpoints: Curve = field(default_factory=Curve)
    events: list[Event] = field(default_factory=list)
    jobs: list[tuple[float, float]] = field(default_factory=list)
    samples_per_epoch: float = math.nan
    missing: list[str] = field(default_factory=list)

    def part(self, name: str) -> list[Mapping[str, Any]]:
        """Return a list of tables in the summary, such as ``per_worker``."""
        found = self.summary.get(name)
        rows = found if isinstance(found, list) else []
        return [row for row in rows if isinstance(row, dict)]

    def last(self, measure: str) -> float | None:
        """Return the last value of a curve, None where it has none that is finite."""
        point = self.curves[measure].last if measure in self.curves else None
        return point.value if point and math.isfinite(point.value) else None

    def samples_at(self, points: Any) -> np.ndarray:
        """Return the samples before points of a curve; NaN where they are not known."""
        known = np.isfinite(points.samples)
        return np.where(known, points.samples, points.epoch * self.samples_per_epoch)

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The totals of its summary; where its last job has left none, how far its curves go."""
        train = self.curves.get("training loss")
        point = train.last if train else None
        if point is None or (self.summary and not self.unfinished):
            return self.summary
        return {
            "global_step": int(point.updates), "epochs": point.epoch,
            "loss": self.last("training loss"), "eval_loss": self.last("held-out loss"),
            "accuracy": self.last("accuracy"), "samples_per_s": self.last(RATE),
            "wall_s": self.jobs[-1][1] - self.jobs[-1][0] if self.jobs else None,
        }  # fmt: skip


def read(path: Path, name: str) -> Record:
    """Read what a run has left.

    Args:
        path: Its folder.
        name: By which it is called.

    Returns:
        What is known of it; what is damaged is in `Record.missing`, and raises nothing.
    """
    record = Record(name, path, running=is_claimed(path))
    if not path.is_dir():
        record.missing.append("it has left no run")
        return record
    _read_config(record)
    _read_summary(record)
    lines = Lines(record)
    try:
        lines.read()
    except OSError as problem:
        record.missing.append(f"{METRICS}: {problem.strerror}; no curves")
    lines.finish()
    return record


def _read_config(record: Record) -> None:
    file = record.path / CONFIG
    try:
        record.config = read_toml(file)
        with file.open(errors="replace") as text:
            record.text = text.read(CONFIG_BYTES)
    except (UserError, OSError) as problem:
        record.missing.append(f"{CONFIG}: {problem}; its options are left out")


def _read_summary(record: Record) -> None:
    try:
        found = json.loads((record.path / SUMMARY).read_text())
        if not isinstance(found, dict):
            raise ValueError("no table")
        record.summary = found
    except FileNotFoundError:
        why = "the job has not ended" if record.running else "no job has ended by itself"
        record.missing.append(f"no {SUMMARY}: {why}, so that nothing is known of each rank")
    except (OSError, ValueError) as problem:
        record.missing.append(f"{SUMMARY}: {problem}; nothing is known of each rank")


class Lines:
    """Reads ``metrics.jsonl`` into a record, line by line.

    Args:
        record: Of the run.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._offset = self._now = 0.0
        self._updates, self._bad = 0.0, 0
        self._tail = Tail(record.path / METRICS)
        self._before: tuple[float, float] | None = None  # seconds and samples of the last line
        self._events = defaultdict[str, deque[Event]](lambda: deque(maxlen=EVENTS))

    def read(self) -> bool:
        """Read what has come since the last time; a line that is not whole is left.

        Returns:
            Whether the file is the one that was read before: else the record is of a run that is
            no longer there, and stays as it is.

        Raises:
            OSError: If the file cannot be read.
        """
        for line in self._tail.lines(self._record.path / METRICS):
            if self._tail.anew:
                break
            self._line(line)
        self._close_job()
        return not self._tail.anew

    def finish(self) -> None:
        """Bring the record to its end, and say in it what is damaged."""
        record = self._record
        self._line(self._tail.rest)
        if not (record.curves or any(text.startswith(METRICS) for text in record.missing)):
            record.missing.append(f"{METRICS}: no line of training yet; no curves")
        if self._bad:
            lines = "1 line is" if self._bad == 1 else f"{self._bad} lines are"
            record.missing.append(f"{METRICS}: {lines} damaged or cut off, and left out")
        if record.unfinished and not record.running:
            self._keep("failure", "the last job has ended without a word")
        if record.unfinished and record.summary:
            record.missing.append(f"{SUMMARY} is of an earlier job: what is said of each rank, too")
        self._close_job()
        events = itertools.chain(*self._events.values())
        record.events = sorted(events, key=lambda event: event.seconds)
        self._count_samples()

    def _line(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            kind, seconds = str(row["kind"]), float(row["time_s"])
            updates = self._updates if row.get("step") is None else float(row["step"])
            if not math.isfinite(seconds + updates):
                raise ValueError("no place")
        except DAMAGED:
            self._bad += bool(line.strip())
            return
        if kind == "start":
            self._start(row, seconds, updates)
        self._now = max(self._now, self._offset + seconds)
        self._updates = updates
        try:
            self._note(kind, row)
        except DAMAGED:
            self._bad += 1

    def _start(self, row: Mapping[str, Any], seconds: float, updates: float) -> None:
        """Begin the next job of the run."""
        if self._record.unfinished:
            self._keep("failure", "the job ended without a word")
        self._close_job()
        self._offset, self._before = self._now - seconds, None
        self._record.unfinished = True
        self._record.jobs.append((self._now, self._now))
        how, self._updates = "resumed" if row.get("resumed") else "begun", updates
        text = f"{how} with {row.get('world', '?')} ranks in mode {row.get('mode', '?')}"
        self._keep(how, f"{text}, {seconds:.1f} s after its start")

    def _close_job(self) -> None:
        if self._record.jobs:
            self._record.jobs[-1] = (self._record.jobs[-1][0], self._now)

    def _note(self, kind: str, row: Mapping[str, Any]) -> None:
        """Take what a line says.

        Raises:
            ValueError, TypeError, OverflowError: If a value is none.
        """
        now, updates = self._now, self._updates
        if kind in ("train", "eval"):
            epoch, samples = float(row.get("epoch", "nan")), float(row.get("samples", "nan"))
            for (of, name), measure in MEASURES.items():
                if of == kind and row.get(name) is not None:
                    self._add(measure, Point(now, updates, epoch, samples, float(row[name])))
            if kind == "train":
                self._rate(Point(now, updates, epoch, samples, math.nan))
        elif kind == "checkpoint":
            self._record.checkpoints.add(Point(now, updates, math.nan, math.nan, now))
        elif kind in ("stop", "end"):
            self._record.unfinished = self._record.unfinished and kind != "end"
            self._keep(kind, f"{kind}: {row.get('reason', '?')}")
        elif kind == "lost":
            others = (name for name in ("server", "evaluator") if row.get(name) is not None)
            what = next(others, "worker")
            dead = f"{what} {row.get(what, '?')} (rank {row.get('rank', '?')})"
            self._keep("death", f"{dead} died; the others went on")
        elif kind == "warning":
            self._keep(kind, str(row.get("text", "")))

    def _rate(self, point: Point) -> None:
        """Add the samples a second since the line before, in the same job."""
        if self._before is not None and point.seconds > self._before[0]:
            rate = (point.samples - self._before[1]) / (point.seconds - self._before[0])
            self._add(RATE, point._replace(value=rate))
        self._before = point.seconds, point.samples

    def _add(self, measure: str, point: Point) -> None:
        self._record.curves.setdefault(measure, Curve()).add(point)

    def _keep(self, kind: str, text: str) -> None:
        """Keep an event that has happened now, one of the last of its kind."""
        self._events[kind].append(Event(kind, self._now, self._updates, text))

    def _count_samples(self) -> None:
        """Say of evaluations how many samples came before: their lines have only the epoch."""
        train = self._record.curves.get("training loss")
        if train and train.last and train.last.epoch > 0:
            self._record.samples_per_epoch = train.last.samples / train.last.epoch


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each folder: as few of its last parts as tell it from the others."""
    whole = [path.absolute().parts for path in paths]
    for parts in range(1, max(map(len, whole)) + 1):
        names = ["/".join(each[-parts:]) for each in whole]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
