"""Starts real jobs: mpirun of either MPI, under a time limit, with nothing left behind."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpips import launch
from mpips.launch import TREE as ROOT
from mpips.launch import environment

__all__ = ["ROOT", "Finished", "Running", "environment", "run", "train"]


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


def run(
    ranks: int,
    args: Sequence[str],
    cwd: Path,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run ``mpirun -n ranks python *args`` in `cwd`."""
    with Running(ranks, args, cwd, env) as job:
        return job.wait(timeout_s)


def train(ranks: int, *options: str, cwd: Path, timeout_s: float = 60) -> Finished:
    """Run ``mpirun -n ranks python -m mpips.train *options``."""
    return run(ranks, ["-m", "mpips.train", *options], cwd, timeout_s)
