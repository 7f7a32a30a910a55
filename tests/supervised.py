"""Jobs under a supervisor that is a process of its own, and jobs that count their samples."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launch import environment
from runs import counting, is_whole, samples_file, starts_of

from mpips.checkpoint import list_checkpoints
from mpips.cluster import segments
from mpips.launch import mpirun

N = 230


class Supervised:
    """A supervisor with its job, in a process of its own."""

    def __init__(self, folder: Path, ranks: int, words: Sequence[str], *options: str) -> None:
        self.folder, self._log = folder, folder / "output.txt"
        words = ["-m", "mpips.launch", "-n", str(ranks), *options, "--", *words]
        env = {**environment(), "TMPDIR": str(folder)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=env, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.seen: set[int] = set()
        self.mapped: set[segments.Segment] = set()

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self._log.read_text(errors="replace")

    def family(self) -> list[int]:
        """Return the processes of the job, mpirun's first."""
        found = [pid for pid in mpirun.family(self.process.pid) if pid != self.process.pid]
        self.seen.update(found)
        self.mapped.update(*map(segments.mapped, found))
        return found

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, by rank."""
        return mpirun.ranks_among(self.family())

    def wait_for(self, ready: Callable[[], bool], timeout_s: float = 60) -> None:
        """Wait while the job gets somewhere."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_training(self, out: Path, starts: int) -> list[int]:
        """Wait until start number `starts` of a run has saved; returns the ranks by rank."""
        self.wait_for(lambda: starts_of(out) >= starts)
        newest = max(list_checkpoints(out), default=out)
        self.wait_for(lambda: any(is_whole(p) for p in list_checkpoints(out) if p > newest))
        return self.ranks()

    def wait(self, code: int, timeout_s: float = 60) -> str:
        """Wait for the end; returns what was printed. Nothing is left over."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            self.family()
            time.sleep(0.1)
        assert self.process.returncode == code, self.output
        self.assert_nothing_left()
        return self.output

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        """Assert that no process and no segment is left that was seen."""
        deadline = time.monotonic() + within_s
        while mpirun.running(self.seen) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert mpirun.running(self.seen) == [], self.output
        assert self.seen, "the ranks were looked at"
        assert not self.mapped & segments.present()


@contextlib.contextmanager
def supervised(*args: object, **options: object) -> Iterator[Supervised]:
    """Leave the block, and the supervisor is gone, and all that is below it."""
    job = Supervised(*args, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        for pid in [job.process.pid, *job.family()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait(10)
        print(job.output)


COUNTED = {  # samples, problem, options; in rounds for four workers
    "async": (N, "SlowCounting", "--servers 1 --batch-size 4"),
    "sync": (128, "MeanCounting", "--batch-size 8 --lr 32"),
}


def counting_words(folder: Path, epochs: int, *options: str, mode: str = "async") -> list[str]:
    """Return the words of a job that counts samples and saves often, into ``out``."""
    n, kind, how = COUNTED[mode]
    words = [*counting(samples_file(folder, n), kind=kind), "--mode", mode, *how.split()]
    words += ["--checkpoint-every", "5steps", "--epochs", f"{epochs}", "--out", str(folder / "out")]
    return [*words, *options]
