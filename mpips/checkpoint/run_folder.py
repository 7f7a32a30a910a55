"""Files, lock and location of a run folder on the disk.

Files of a run:
    config.toml: The job with all its options, by the coordinator at the start. It runs as it is.
    metrics.jsonl: A line for each event, by the coordinator.
    summary.json: The results, by the coordinator at the end of each job.
    DONE: The run is complete, and why it ended; by the coordinator, last of all. The run succeeded
        if the exit code is also 0.
    checkpoints/: A folder for each checkpoint. Owners write their shards, and the coordinator the
        index, last.
    best: Link to the checkpoint with the lowest held-out loss, by the coordinator with
        ``--keep-best``.
    data.json, dataset.places.N, test_dataset.places.N: Index of a dataset of many files, by the
        coordinator, and where samples lie in its text files.
    evaluation.json: Results of ``--eval-only``, by the coordinator.
    trace/, trace.json: With ``--trace``: a folder for each job with a file of each rank, and the
        timeline that ``mpips trace`` makes of them.
    record/: With ``--record``: a folder for each job with a file of each server, for
        ``mpips replay``.
    tensorboard/: With ``--tensorboard``: event files, by the coordinator.
    report.html: Page that ``mpips report -o`` draws, or a job script at its end.
    .lock: Locked by the coordinator while a job runs. It has the hosts and processes of the ranks,
        for ``mpips ps``.

Messages:
    --out X is in use by a running job: Wait for that job, or choose another ``--out``.
    was renamed to Y while the job ran: The run is saved there. ``--resume`` goes on there.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from mpips.errors import UserError

CONFIG, METRICS, CHECKPOINTS, SUMMARY, DONE = (
    *("config.toml", "metrics.jsonl", "checkpoints"),
    *("summary.json", "DONE"),
)
EVALUATION = "evaluation.json"  # what --eval-only has found
LOCK = ".lock"
DATA = "data.json"  # the index of a dataset of many files
TRACE = "trace"  # a folder a job, in it a file a rank: what it did when
RECORD = "record"  # a folder a job: what its servers applied, for mpips replay
BEST = "best"  # points to the checkpoint with the lowest held-out loss
TENSORBOARD = "tensorboard"  # a folder of event files
PLACES = re.compile(r"(test_)?dataset\.places\.\d+")  # beside DATA: where samples lie in files
# What a job may leave that is stopped before its first step; each may have been written as *.tmp.
EARLY = {
    *(CONFIG, METRICS, CHECKPOINTS, SUMMARY, LOCK, DATA, TRACE, f"{TRACE}.json", RECORD),
    *(BEST, TENSORBOARD),
}
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give another --out, or the right to write there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or give another --out"),
}
LINE_BYTES = 4096  # of the end of a file that are compared
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_held: list[IO[str]] = []


class Place:
    """A run's folder, held open by the coordinator: renamed it is found, removed it is missed.

    Attributes:
        moved: What became of it while the job ran, or empty.
    """

    def __init__(self, out: Path) -> None:
        self.moved = ""
        self._hold(out)

    def _hold(self, out: Path) -> None:
        self._out, self._handle = out, os.open(out, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._handle)

    def where(self) -> Path | None:
        """Return where the folder is now, or None if it is removed."""
        for path in (self._out, Path(os.readlink(f"/proc/self/fd/{self._handle}"))):
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(self._handle)):
                    if path != self._out:
                        self.moved = f"{self._out} was renamed to {path} while the job ran"
                        self._out = path
                    return path
        return None

    def make_anew(self) -> Path:
        """Make a folder in place of one that was removed: a checkpoint in it can be resumed.

        Raises:
            OSError: If it cannot be made, or there is something in its place but an empty folder.
            UserError: If another job is in it.
        """
        self._out.mkdir(parents=True, exist_ok=True)
        if any(path.name != LOCK for path in self._out.iterdir()):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._out))
        claim(self._out)
        self.close()
        self._hold(self._out)
        self.moved = f"{self._out} was removed while the job ran"
        return self._out


def is_early(name: str) -> bool:
    """Return whether a job that ends before its first step may have left a file of that name."""
    name = name.removesuffix(".tmp")
    return name in EARLY or PLACES.fullmatch(name) is not None


def claim(out: Path) -> None:
    """Keep other jobs out of a run's folder until `release`, or until this process is gone.

    Raises:
        UserError: If another job is in it.
    """
    with writing_to(out):
        lock = open(out / LOCK, "a")  # noqa: SIM115  (held until release)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        got, remedy = f"--out {out} is in use by a running job", "choose another --out"
        raise UserError(got, "a run at rest", f"wait until it has ended, or {remedy}") from None
    except OSError as problem:
        if problem.errno not in NO_LOCKS:  # a file system without locks goes without
            raise
    _held.append(lock)


def note_ranks(out: Path, where: Sequence[tuple[str, int, int]]) -> None:
    """Note where the words of a job's ranks are: hosts, process ids and file descriptors.

    It goes with the lock. No job fails for it.
    """
    with contextlib.suppress(OSError):
        (out / LOCK).write_text(json.dumps(where))


def noted_ranks(out: Path) -> list[tuple[str, int, int]]:
    """Return what the last job in a run's folder has noted; [] where there is nothing."""
    try:
        found = json.loads((out / LOCK).read_text())
        return [(str(host), int(pid), int(file)) for host, pid, file in found]
    except (OSError, ValueError, TypeError):
        return []


def is_claimed(out: Path) -> bool:
    """Return whether a job is in a run's folder, as far as its file system knows; claim nothing."""
    try:
        with open(out / LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or no locks
        return False
    return False


def release() -> None:
    """Let other jobs into the folders that this process has claimed."""
    while _held:
        _held.pop().close()


class Tail:
    """Reads a file of lines as it grows; a file that replaces it is read from its beginning.

    A file is a new one if the bytes that were read last are no longer at their place. This finds
    the file of a run whose folder was removed and made again, whatever its size and inode number.

    Args:
        path: Of the file.
        begin: Where to begin to read.

    Attributes:
        rest: What follows the last whole line.
        anew: Whether the last read has found another file.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._at, self._last = begin, b""  # NFS may show less of the file for a while
        self.rest, self.anew = b"", False
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, begin - LINE_BYTES))
            before = file.read(min(begin, LINE_BYTES))
            if file.tell() == begin:
                self._last = before

    def lines(self, path: Path) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last read.

        Args:
            path: Where the file is now.

        Raises:
            OSError: If it cannot be read.
        """
        with open(path, "rb") as file:
            file.seek(self._at - len(self._last))
            self.anew = file.read(len(self._last)) != self._last
            self.rest = b""
            if self.anew:
                self._at, self._last = 0, b""
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    self.rest = line
                    return
                self._at, self._last = self._at + len(line), line[-LINE_BYTES:]
                yield line


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn an OSError of the block into the error of a folder that cannot be written.

    Raises:
        UserError: That error, with what to do.
    """
    try:
        yield
    except OSError as problem:
        got, remedy = f"--out {out}: {problem.strerror}", "give another --out"
        remedy = REMEDIES.get(problem.errno or 0, remedy)
        raise UserError(got, "a folder that can be written", remedy) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: If it cannot be written; then what was there stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
