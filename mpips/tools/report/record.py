"""Reader of a run's files for a report.

Damaged or missing files are listed in the report, and their data is left out.
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
from mpips.tools.results import read_summary

MEASURES = {  # name of each curve, by kind of line and field
    ("train", "loss"): "training loss",
    ("eval", "loss"): "held-out loss",
    ("eval", "accuracy"): "accuracy",
    ("train", "staleness"): "staleness",
}
RATE = "samples/s"
EVENTS = 200  # most events of a kind; the last ones stay
CONFIG_BYTES = 100_000  # most bytes of a job file that the report shows
RUNNING = "running"
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Event(NamedTuple):
    """An event of a run, such as a start, a checkpoint or the death of a rank.

    Attributes:
        kind: ``begun``, ``resumed``, ``checkpoint``, ``stop``, ``death``, ``failure``, ``warning``
            or ``end``.
        seconds: Time of the event, as in `Point`.
        updates: Updates applied before it.
        text: Description.
    """

    kind: str
    seconds: float
    updates: float
    text: str


@dataclass
class Record:
    """Data of a run.

    Attributes:
        name: Name of the run, unique in a report.
        path: Folder of the run.
        config: Options by name; empty if they cannot be read.
        text: Text of the job file.
        summary: Content of ``summary.json``; empty without it.
        running: Whether a job has locked the folder.
        unfinished: Whether the last job has not written its end.
        curves: Measured values over time, by a name in `MEASURES`, or `RATE`.
        checkpoints: Points at which checkpoints were committed.
        events: All other events.
        jobs: Begin and end of each job, in seconds as in `Point`.
        samples_per_epoch: Samples of one epoch; NaN if unknown.
        missing: Messages about missing and damaged files.
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
        rows = self.summary.get(name)
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def last(self, measure: str) -> float | None:
        """Return the last value of a curve; None if it is not finite, or there is no curve."""
        point = self.curves[measure].last if measure in self.curves else None
        return point.value if point and math.isfinite(point.value) else None

    def samples_at(self, points: Any) -> np.ndarray:
        """Return the number of samples at each point of a curve, NaN if unknown, shape (n,)."""
        known = np.isfinite(points.samples)
        return np.where(known, points.samples, points.epoch * self.samples_per_epoch)

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The summary; if the last job has written none, the last values of the curves."""
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
    """Read the files of a run.

    Args:
        path: Folder of the run.
        name: Name for the report.

    Returns:
        The record. Damaged files raise nothing; `Record.missing` names them.
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
        record.summary = read_summary(record.path)
    except (UserError, OSError) as problem:
        record.missing.append(f"{SUMMARY}: {problem}; nothing is known of each rank")
        return
    if not record.summary:
        why = "the job has not ended" if record.running else "no job has ended by itself"
        record.missing.append(f"no {SUMMARY}: {why}, so that nothing is known of each rank")


class Lines:
    """Reader of ``metrics.jsonl``, which adds each line to a record.

    Args:
        record: Record of the run.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._offset = self._now = 0.0
        self._updates, self._bad = 0.0, 0
        self._tail = Tail(record.path / METRICS)
        self._before: tuple[float, float] | None = None  # seconds and samples of the last line
        self._events = defaultdict[str, deque[Event]](lambda: deque(maxlen=EVENTS))

    def read(self) -> bool:
        """Read the lines that were added since the last call, except an incomplete last line.

        Returns:
            Whether the file is still the same. If not, another run has replaced the record's run,
            and the record stays as it is.

        Raises:
            OSError: If the file cannot be read.
        """
        for line in self._tail.lines(self._record.path / METRICS):
            if self._tail.replaced:
                break
            self._line(line)
        self._close_job()
        return not self._tail.replaced

    def finish(self) -> None:
        """Complete the record after the last line, and add messages about damage to it."""
        record = self._record
        self._line(self._tail.rest)
        if not (record.curves or any(text.startswith(METRICS) for text in record.missing)):
            record.missing.append(f"{METRICS}: no line of training yet; no curves")
        if self._bad:
            lines = "1 line is" if self._bad == 1 else f"{self._bad} lines are"
            record.missing.append(f"{METRICS}: {lines} damaged or cut off, and left out")
        if record.unfinished and not record.running:
            self._add_event("failure", "the last job has ended without a word")
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
            self._add_line(kind, row)
        except DAMAGED:
            self._bad += 1

    def _start(self, row: Mapping[str, Any], seconds: float, updates: float) -> None:
        """Begin the next job of the run."""
        if self._record.unfinished:
            self._add_event("failure", "the job ended without a word")
        self._close_job()
        self._offset, self._before = self._now - seconds, None
        self._record.unfinished = True
        self._record.jobs.append((self._now, self._now))
        kind, self._updates = "resumed" if row.get("resumed") else "begun", updates
        text = f"{kind} with {row.get('world', '?')} ranks in mode {row.get('mode', '?')}"
        self._add_event(kind, f"{text}, {seconds:.1f} s after its start")

    def _close_job(self) -> None:
        if self._record.jobs:
            self._record.jobs[-1] = (self._record.jobs[-1][0], self._now)

    def _add_line(self, kind: str, row: Mapping[str, Any]) -> None:
        """Add a line's values or its event to the record.

        Raises:
            ValueError, TypeError, OverflowError: If a value is not a number.
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
            self._add_event(kind, f"{kind}: {row.get('reason', '?')}")
        elif kind == "lost":
            others = (name for name in ("server", "evaluator") if row.get(name) is not None)
            role = next(others, "worker")
            dead = f"{role} {row.get(role, '?')} (rank {row.get('rank', '?')})"
            self._add_event("death", f"{dead} died; the others went on")
        elif kind == "warning":
            self._add_event(kind, str(row.get("text", "")))

    def _rate(self, point: Point) -> None:
        """Add the rate in samples/s since the last line of the same job."""
        if self._before is not None and point.seconds > self._before[0]:
            rate = (point.samples - self._before[1]) / (point.seconds - self._before[0])
            self._add(RATE, point._replace(value=rate))
        self._before = point.seconds, point.samples

    def _add(self, measure: str, point: Point) -> None:
        self._record.curves.setdefault(measure, Curve()).add(point)

    def _add_event(self, kind: str, text: str) -> None:
        """Add an event at the current time; only the last `EVENTS` of a kind stay."""
        self._events[kind].append(Event(kind, self._now, self._updates, text))

    def _count_samples(self) -> None:
        """Compute the samples of an epoch, for lines of evaluations, which have only the epoch."""
        train = self._record.curves.get("training loss")
        if train and train.last and train.last.epoch > 0:
            self._record.samples_per_epoch = train.last.samples / train.last.epoch


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Return a unique name for each folder, made of as few of its last parts as possible."""
    texts = [str(path.absolute()).encode(errors="backslashreplace").decode() for path in paths]
    split = [Path(text).parts for text in texts]
    for count in range(1, max(map(len, split)) + 1):
        names = ["/".join(parts[-count:]) for parts in split]
        if len(set(names)) == len(names):
            return names
    return texts
