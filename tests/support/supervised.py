"""Jobs under a supervisor that is a process of its own, and jobs that count their samples."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch import LIMIT_S
from runs import counting, is_whole, samples_file, starts_of

from mpips.checkpoint import list_checkpoints
from mpips.launch import mpirun
from tests.chaos.job import Job

N = 230


class Supervised(Job):
    """A supervisor with its job, in a process of its own."""

    def __init__(self, folder: Path, ranks: int, words: Sequence[str], *options: str) -> None:
        super().__init__(folder, ranks, words, options, folder)
        self.folder = folder

    def __exit__(self, *what: Any) -> None:
        super().__exit__(*what)
        print(self.output)

    def ranks(self) -> list[int]:
        return mpirun.ranks_among(self.family())

    def wait_for(self, ready: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        assert self.wait_until(ready, time.monotonic() + timeout_s), self.output

    def wait_for_training(self, out: Path, starts: int) -> list[int]:
        """Wait until start number `starts` of a run has saved; returns the ranks by rank."""
        self.wait_for(lambda: starts_of(out) >= starts)
        newest = max(list_checkpoints(out), default=out)
        self.wait_for(lambda: any(is_whole(p) for p in list_checkpoints(out) if p > newest))
        return self.ranks()

    def wait(self, code: int, timeout_s: float = LIMIT_S) -> str:
        """Wait for the end; returns what was printed. Nothing is left over."""

        def look() -> bool:
            self.family()
            return False

        self.wait_until(look, time.monotonic() + timeout_s)
        assert self.process.returncode == code, self.output
        self.assert_nothing_left()
        return self.output

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        """Assert that no process, segment or port is left of the job."""
        assert self.left(within_s) == [], self.output
        assert self.inodes, "the ranks were looked at"


def counting_words(folder: Path, epochs: int, *options: str) -> list[str]:
    """Return the words of a job that counts samples and saves often, into ``out``."""
    words = [*counting(samples_file(folder, N), kind="SlowCounting"), "--mode", "async"]
    words += ["--servers", "1", "--batch-size", "4", "--checkpoint-every", "5steps"]
    return [*words, "--epochs", f"{epochs}", "--out", str(folder / "out"), *options]
