"""Starts real jobs: mpirun of either MPI, under a time limit, with nothing left behind."""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mpips.cluster import segments
from mpips.launch import mpirun as launch
from mpips.launch.mpirun import TREE as ROOT
from mpips.launch.mpirun import environment

__all__ = ["ROOT", "Finished", "Running", "environment", "file_in_shared_memory", "run", "train"]

LIMIT_S = 120  # of a job that takes seconds, where many others run


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


def run(
    ranks: int,
    args: Sequence[str],
    cwd: Path,
    timeout_s: float = LIMIT_S,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run ``mpirun -n ranks python *args`` in `cwd`."""
    with Running(ranks, args, cwd, env) as job:
        return job.wait(timeout_s)


def train(ranks: int, *options: str, cwd: Path, timeout_s: float = LIMIT_S) -> Finished:
    """Run ``mpirun -n ranks python -m mpips.train *options``."""
    return run(ranks, ["-m", "mpips.train", *options], cwd, timeout_s)
