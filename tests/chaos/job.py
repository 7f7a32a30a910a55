"""A job under its supervisor, in processes of its own, and what is left of it in the end."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from mpips.launch import mpirun
from mpips.launch.supervise import PREFIX
from mpips.mpi import segments
from mpips.mpi.process import ancestors, environment_of, ids, send_signal

MARK = "MPIPS_CHAOS"  # variable of all processes of a job, which tells them from others
GONE_S, POLL_S = 10.0, 0.05
LISTENS = "0A"  # state of a socket in /proc/net/tcp


def marked(mark: str) -> list[int]:
    """Return this user's processes on this host, but for zombies, that have a mark."""
    return sorted(pid for pid in ids() if environment_of(pid).get(MARK) == mark)


def sockets(pids: Iterable[int]) -> set[str]:
    """Return the inodes of the sockets of processes."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(entry.path)
                    if link.startswith("socket:["):
                        found.add(link[len("socket:[") : -1])
    return found


def ports(inodes: set[str]) -> list[int]:
    """Return the TCP ports on which any of some sockets listens."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == LISTENS and rest[5] in inodes:
                    found.add(int(local.rpartition(":")[2], 16))
    return sorted(found)


class Job:
    """A supervisor with its job; leave the ``with`` block and both are gone."""

    def __init__(
        self, folder: Path, ranks: int, words: Sequence[str], options: Sequence[str], cwd: Path
    ) -> None:
        self._log, self.size = folder / "output.txt", ranks
        self._temporary = tempfile.TemporaryDirectory(
            prefix="mpips-chaos-", ignore_cleanup_errors=True
        )
        self.temporary = Path(self._temporary.name)
        # Where a launcher or hosts are named, these share the current folder.
        self._parent = cwd if {"--mpirun", "--hosts"} & {*options} else self.temporary
        self._before = set(self._parent.glob(f"{PREFIX}*"))
        command = ["-m", "mpips.launch", "-n", str(ranks), *options, "--", *words]
        marks = {MARK: self._temporary.name, "TMPDIR": self._temporary.name}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=cwd, env={**mpirun.environment(), **marks},
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=mpirun.when_orphaned(signal.SIGTERM),
            )  # fmt: skip
        self.mapped: set[segments.Segment] = set()
        self.inodes: set[str] = set()

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._temporary.cleanup()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def family(self) -> list[int]:
        """Return the processes of the job that are here, without the supervisor."""
        found = [pid for pid in marked(self._temporary.name) if pid != self.process.pid]
        self.mapped.update(*map(segments.mapped, found))
        self.inodes |= sockets(found)
        return found

    def mpirun(self) -> list[int]:
        """Return the process id of mpirun, if it is there."""
        above = ((pid, next(ancestors(pid), None)) for pid in self.family())
        return [pid for pid, parent in above if parent and parent[0] == self.process.pid]

    def starts(self) -> list[Path]:
        """Return the folders by which the ranks of each start tell the supervisor what they do."""
        found = set(self._parent.glob(f"{PREFIX}*")) - self._before
        folders = [path for parent in found for path in parent.glob("[0-9]*")]
        return sorted(folders, key=lambda path: int(path.name))

    def left(self, within_s: float = GONE_S) -> list[str]:
        """Return what is left of a job that is over, on this host; waits a little for its end."""
        deadline = time.monotonic() + within_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def _left(self) -> list[str]:
        processes = [f"process {pid}" for pid in self.family()]
        files = [f"{path}" for path, _ in sorted(self.mapped & segments.present())]
        return [*processes, *files, *(f"port {port}" for port in ports(self.inodes))]

    def kill(self) -> None:
        """SIGKILL the supervisor and then all that is below it, and remove its segments."""
        if not self.is_over:
            self.process.kill()
        self.process.wait(GONE_S)
        deadline = time.monotonic() + GONE_S
        while (found := self.family()) and time.monotonic() < deadline:
            for pid in found:
                send_signal(pid)
            time.sleep(POLL_S)
        segments.remove(self.mapped)

    def wait_until(
        self, ready: Callable[[], bool], deadline: float, poll_s: float = POLL_S
    ) -> bool:
        """Wait until something holds; returns whether it does before the job is over."""
        while True:
            over = self.is_over
            if ready():
                return True
            if over:
                return False
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(poll_s)
