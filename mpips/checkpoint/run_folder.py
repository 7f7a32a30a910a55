"""Files, lock and location of a run folder on disk.

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
    was renamed to Y while the job ran: The run is saved there. ``--resume`` continues there.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from mpips.checkpoint.files import sync
from mpips.errors import UserError

CONFIG, METRICS, CHECKPOINTS = "config.toml", "metrics.jsonl", "checkpoints"
SUMMARY, DONE = "summary.json", "DONE"
EVALUATION = "evaluation.json"  # results of --eval-only
LOCK = ".lock"
DATA = "data.json"  # index of a dataset of many files
TRACE = "trace"  # has a folder for each job, with a timeline file of each rank
RECORD = "record"  # has a folder for each job, with its servers' replay logs
BEST = "best"  # link to the checkpoint with the lowest held-out loss
TENSORBOARD = "tensorboard"  # folder of event files
PLACES = re.compile(r"(test_)?dataset\.places\.\d+")  # beside DATA: positions of samples in files
# Files that a job may leave if it stops before its first step; each may also exist as *.tmp.
EARLY = {
    *(CONFIG, METRICS, CHECKPOINTS, SUMMARY, LOCK, DATA, TRACE, f"{TRACE}.json", RECORD),
    *(BEST, TENSORBOARD),
}
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give another --out, or the right to write there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or give another --out"),
}
LINE_BYTES = 4096  # `Tail` compares at most so many bytes before its position
PAUSES_S = 0.01, 0.1, 0.3  # between attempts to lock a file
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_held: list[IO[str]] = []


class RunFolder:
    """A run's folder, which the coordinator holds open to notice that it is renamed or removed.

    Attributes:
        moved: Message that the folder was renamed or removed while the job ran, or empty.
    """

    def __init__(self, out: Path) -> None:
        self.moved = ""
        self._hold(out)

    def _hold(self, out: Path) -> None:
        self._out, self._handle = out, os.open(out, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Close the folder's descriptor."""
        os.close(self._handle)

    def path(self) -> Path | None:
        """Return the current path of the folder, or None if it was removed."""
        for path in (self._out, Path(os.readlink(f"/proc/self/fd/{self._handle}"))):
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(self._handle)):
                    if path != self._out:
                        self.moved = f"{self._out} was renamed to {path} while the job ran"
                        self._out = path
                    return path
        return None

    def recreate(self) -> Path:
        """Create and lock a new folder at the path of the removed one, for further checkpoints.

        Raises:
            OSError: If the folder cannot be created, or its path exists and is no empty folder.
            UserError: If another job uses the folder.
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
    """Return whether a job that stopped before its first step may have left a file of this name."""
    name = name.removesuffix(".tmp")
    return name in EARLY or PLACES.fullmatch(name) is not None


def claim(out: Path) -> None:
    """Lock a run's folder against other jobs, until `release` or the end of this process.

    Raises:
        UserError: If another job uses the folder, or it cannot be written.
    """
    with writing_to(out):
        lock = open(out / LOCK, "a")  # noqa: SIM115  (held until release)
    try:
        _lock(lock)
    except BlockingIOError:
        lock.close()
        got, remedy = f"--out {out} is in use by a running job", "choose another --out"
        raise UserError(got, "a run at rest", f"wait until it has ended, or {remedy}") from None
    except OSError as problem:
        if problem.errno not in NO_LOCKS:  # a file system without locks
            raise
    _held.append(lock)


def _lock(file: IO[str]) -> None:
    """Lock a file. Another process may hold its lock for a moment, in `is_claimed`.

    Raises:
        BlockingIOError: If it is locked for longer.
    """
    for pause_s in PAUSES_S:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        else:
            return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_ranks(out: Path, where: Sequence[tuple[str, int, int]]) -> None:
    """Write the location of each rank's status board to the lock file; errors are ignored.

    Args:
        out: The run's folder.
        where: Host, process id and file descriptor of each rank's board.
    """
    with contextlib.suppress(OSError):
        (out / LOCK).write_text(json.dumps(where))


def read_ranks(out: Path) -> list[tuple[str, int, int]]:
    """Read what the last job in a run's folder wrote by `write_ranks`; [] without such a job."""
    try:
        ranks = json.loads((out / LOCK).read_text())
        return [(str(host), int(pid), int(file)) for host, pid, file in ranks]
    except (OSError, ValueError, TypeError):
        return []


def is_claimed(out: Path) -> bool:
    """Return whether a job has locked a run's folder. False also if the file system has no locks.

    The lock is left as it is. For a moment it is shared with others that look.
    """
    if not os.path.isfile(out / LOCK):  # to open a pipe would block
        return False
    try:
        with open(out / LOCK) as lock:  # which another user may read
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks
        return False
    return False


def release() -> None:
    """Unlock all folders that this process has locked."""
    while _held:
        _held.pop().close()


class Tail:
    """Reader of the lines of a growing file.

    If the file was replaced, the reader starts again at its beginning. It detects a new file by the
    bytes that it read last: they are no longer at their position. So it needs neither size nor
    inode number, which may repeat if a run's folder is removed and created again.

    Args:
        path: The file.
        begin: Byte at which to begin to read.

    Attributes:
        rest: Bytes after the last complete line.
        replaced: Whether the last call of `lines` found a new file.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._at, self._last = begin, b""  # on NFS the file may look shorter for a while
        self.rest, self.replaced = b"", False
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, begin - LINE_BYTES))
            before = file.read(min(begin, LINE_BYTES))
            if file.tell() == begin:
                self._last = before

    def lines(self, path: Path) -> Iterator[bytes]:
        """Yield the complete lines that were added since the last call.

        Args:
            path: Current path of the file.

        Raises:
            OSError: If the file cannot be read.
        """
        with open(path, "rb") as file:
            file.seek(self._at - len(self._last))
            self.replaced = file.read(len(self._last)) != self._last
            self.rest = b""
            if self.replaced:
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
    """Turn an OSError of the block into an error that the run's folder cannot be written.

    Raises:
        UserError: This error, with a remedy.
    """
    try:
        yield
    except OSError as problem:
        got, remedy = f"--out {out}: {problem.strerror}", "give another --out"
        remedy = REMEDIES.get(problem.errno or 0, remedy)
        raise UserError(got, "a folder that can be written", remedy) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file by renaming a temporary one, so that readers never see a part of it.

    Raises:
        OSError: If the file cannot be written; an old file of this name stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, "utf-8")  # as TOML has to be, in any locale
        sync(temporary)  # or it may be empty after a power failure
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
