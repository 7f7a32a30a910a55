"""Starts real jobs: mpirun of either MPI, under a time limit, with nothing left behind."""

import contextlib
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from mpips.launch import mpirun as launch
from mpips.launch.mpirun import TREE as ROOT
from mpips.launch.mpirun import environment
from mpips.mpi import segments

__all__ = [
    "ROOT", "Finished", "Running", "ends_soon", "environment", "executable",
    "file_in_shared_memory", "python", "run", "shown", "train", "until",
]  # fmt: skip

LIMIT_S = 120  # of a job that takes seconds, where many others run
TIMES = 3
# The others are of Open MPI's, as a rank ends by an exit code while others are killed.
LAUNCHER_TOLD = re.compile(
    r"^-{70,}\nprterun .*?^-{70,}\n|^\[warn\] Epoll [^\n]*\n|^\[[^\n]*\] pmix_ptl_base: [^\n]*\n",
    re.MULTILINE | re.DOTALL,
)
T = TypeVar("T")


class Finished(launch.Finished):
    """A job that has ended: its exit code, its output (both streams, as they came)."""

    def check(self, code: int = 0) -> "Finished":
        assert self.code == code, f"exit code {self.code}, expected {code}:\n{self.output[-8000:]}"
        return self


class Running(launch.Running):
    """A job under way; leave the ``with`` block and it is gone, ranks and all."""

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end; a job that outlasts the limit is killed, and that is a failure."""
        try:
            done = super().wait(timeout_s)
        except TimeoutError as error:
            raise AssertionError(str(error)) from None
        return Finished(done.code, done.output)


@contextlib.contextmanager
def file_in_shared_memory() -> Iterator[Path]:
    """A user's array in shared memory, in use, by a name that an MPI might choose."""
    path = segments.SHARED_MEMORY / f"mpich_shm_{secrets.token_hex(4)}_9"
    with path.open("xb") as file:
        np.save(file, np.array([1.0, 2.0]))
        file.flush()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def executable(path: Path, text: str) -> Path:
    """Write a script that can be run; returns its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(
    ranks: int,
    args: Sequence[str],
    cwd: Path,
    timeout_s: float = LIMIT_S,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run ``mpirun -n ranks python *args`` in `cwd`; a line that is flushed is written whole."""
    with Running(ranks, args, cwd, {"PYTHONUNBUFFERED": "", **(env or {})}) as job:
        return job.wait(timeout_s)


def python(
    *args: str,
    cwd: Path | None = None,
    code: int | None = 0,
    timeout_s: float = LIMIT_S,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *args`` without mpirun; `code` is the exit code expected, None for any."""
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**environment(), **env}, timeout=timeout_s,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def train(ranks: int, *options: str, cwd: Path, timeout_s: float = LIMIT_S) -> Finished:
    """Run ``mpirun -n ranks python -m mpips.train *options``."""
    return run(ranks, ["-m", "mpips.train", *options], cwd, timeout_s)


def until(ready: Callable[[], bool], timeout_s: float = 60, told: Callable[[], str] = str) -> None:
    """Wait until `ready()`; fails with what `told()` says after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"after {timeout_s} s: {told()}"
        time.sleep(0.1)


def ends_soon(job: Callable[[Mapping[str, str]], T], folder: Path, within_s: float = 5.0) -> T:
    """Run a job in which a rank raises, and notes when, until it ends soon; returns what it did."""
    noted, took = folder / "raised.txt", []
    for _ in range(TIMES):
        done = job({"RAISED_AT": str(noted)})
        took.append(time.monotonic() - float(noted.read_text()))
        if took[-1] <= within_s:
            return done
    raise AssertionError(f"it ended {took} seconds after an exception")


def shown(output: str) -> list[str]:
    """Return the lines of a job, without what the launcher and a supervisor say of its end."""
    kept = LAUNCHER_TOLD.sub("", output).replace("\0", "")  # of Open MPI's, as a rank is killed
    return [line for line in kept.splitlines() if line and not line.startswith("mpips.launch: ")]
