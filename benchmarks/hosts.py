"""Rate over time of a job under ``mpips.launch --elastic`` whose host fails and returns.

The job has ranks on this host and on another one, a network namespace behind a link, which needs
root. A gradient sleeps for 10 ms, so the ranks do not compete for cores. The other host crashes,
and the job continues without it. Then the host answers again, and the job moves back to it.
``--plot FILE`` draws the rate over time.
"""

import json
import platform
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import recovery
from benchmarks.curves import drawing
from benchmarks.options import BenchmarkOptions
from mpips.checkpoint.run_folder import METRICS, Tail
from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import Failed, temporary_folder
from mpips.tools.bench.measure import Row
from mpips.tools.report.figures import COLOURS
from tests.chaos.hosts import RSH, crash, join, revive
from tests.chaos.job import Job

OTHER, RATE = "west", "1gbit"  # name of the other host, and rate of its link
EACH = 3  # ranks on each host
TRAINED_S, QUICK_S = 15.0, 2.0  # seconds of training in each part of the job
LIMIT_S, POLL_S = 180.0, 0.05
REACH = 2.0  # aim for 5 workers beside 2 workers; 2.5 would be ideal
WORDS = (
    "--mode", "async", "--servers", "1", "--optimizer", "sgd", "--batch-size", "8", "--hidden",
    "100000", "--epochs", "1000000", "--eval-every", "0", "--log-every", "0.5",
    "--checkpoint-every", "5", "--quiet",
)  # fmt: skip


class Part(NamedTuple):
    """One start of the job.

    Attributes:
        ranks: Number of ranks.
        speeds: Times in seconds since the launcher's start, each with the rate from then on in
            samples/s.
    """

    ranks: int
    speeds: list[tuple[float, float]]

    def trained_s(self) -> float:
        """Return the seconds of training so far."""
        return self.speeds[-1][0] - self.speeds[0][0] if self.speeds else 0.0

    def rate(self) -> float:
        """Return the rate in samples/s, the median of all lines but the first."""
        return statistics.median(rate for _, rate in self.speeds[1:])


class Timeline:
    """Output of a job, with times in seconds since the launcher's start."""

    def __init__(self, job: Job, out: Path) -> None:
        self._job, self._path, self._tail = job, out / METRICS, Tail(out / METRICS)
        self._begin = time.monotonic()
        self.parts: list[Part] = []
        self.marks: list[tuple[float, str]] = []

    def mark(self, text: str) -> None:
        """Add an event at the current time."""
        self.marks.append((time.monotonic() - self._begin, text))

    def until(self, ready: Callable[[], bool]) -> None:
        """Read the job's output until `ready()` returns True.

        Raises:
            Failed: If it takes too long, or the job ends.
        """
        deadline = time.monotonic() + LIMIT_S
        while not ready():
            if time.monotonic() > deadline or self._job.process.poll() is not None:
                raise Failed(f"the job gets no further:\n{self._job.output[-jobs.TAIL :]}")
            time.sleep(POLL_S)
            now = time.monotonic() - self._begin
            for row in map(json.loads, self._tail.lines(self._path) if self._path.exists() else ()):
                if row["kind"] == "start":
                    self.parts.append(Part(row["world"], []))
                elif row["kind"] == "train":
                    self.parts[-1].speeds.append((now, row["samples_per_s"]))

    def trains(self, ranks: int, seconds: float) -> bool:
        """Return whether the last start has `ranks` ranks, and has trained for `seconds`."""
        last = self.parts[-1] if self.parts else Part(0, [])
        return last.ranks == ranks and last.trained_s() >= seconds


def run(options: BenchmarkOptions) -> list[Row]:
    """Compare the rate after the host has returned with the rate without it.

    Raises:
        UserError: If the other host cannot be created.
        Failed: If the job does not continue or move as expected.
    """
    join([OTHER], RATE)
    with temporary_folder() as folder:
        timeline = _timeline(folder, QUICK_S if options.quick else TRAINED_S)
    alone, again = (part.rate() for part in timeline.parts[-2:])
    if options.plot:
        _draw(timeline, options.plot)
    lost, back = (
        f"{text}: trains after {part.speeds[0][0] - at:.1f} s"
        for (at, text), part in zip(timeline.marks, timeline.parts[-2:], strict=True)
    )
    case, beside = f"{2 * EACH} ranks; {lost}; {back}", f"{EACH} ranks"
    return [Row("hosts", case, again, "samples/s", beside, alone, again / alone, REACH)]


def _timeline(folder: Path, seconds: float) -> Timeline:
    rsh, out = folder / "rsh", folder / "out"
    rsh.write_text(RSH)
    rsh.chmod(0o700)
    both = 2 * EACH
    hosts = f"{platform.node()}:{EACH},{OTHER}:{EACH}"
    options = ["--hosts", hosts, "--elastic", "--rsh", str(rsh), "--timeout", "60"]
    words = ["--problem", f"{recovery.__file__}:Large", *WORDS, "--out", str(out)]
    with Job(folder, both, words, options, folder) as job:
        found = Timeline(job, out)
        found.until(lambda: found.trains(both, seconds))
        found.mark(f"{OTHER} crashes")
        crash(rsh, OTHER)
        found.until(lambda: found.trains(EACH, seconds))
        found.mark(f"{OTHER} answers again")
        revive(rsh, OTHER)
        found.until(lambda: found.trains(both, seconds))
        job.process.send_signal(signal.SIGTERM)
        job.wait_until(lambda: False, time.monotonic() + LIMIT_S)
    return found


def _draw(timeline: Timeline, path: Path) -> None:
    with drawing(path, 1, 1) as (axes,):
        for part in timeline.parts:
            x, y = zip(*part.speeds, strict=True)
            colour = COLOURS[part.ranks == EACH]
            axes.plot(x, y, color=colour, linewidth=1.2)
            name, late = f"{part.ranks} ranks", (x[3 * len(x) // 4], max(y))  # away from marks
            offset = (0, 4)
            axes.annotate(name, late, offset, textcoords="offset points", color=colour, ha="center")
        for at, text in timeline.marks:
            axes.axvline(at, color="0.6", linewidth=0.8)
            axes.annotate(f" {text}", (at, 0), rotation=90, va="bottom", ha="right")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.set_xlabel("seconds since the launcher's start")
        axes.set_ylabel("samples/s")
