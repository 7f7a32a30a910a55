"""Trace of one rank, and its file in the run's folder.

A trace is a line of JSON about the rank, and then pieces. A piece has the number of changes, their
times, float64, and their codes, int64. The lowest eight bits of a code are the kind of the change;
the other bits are its value. A rank keeps at most `PIECE` changes in memory, and its file ends at
`MOST` bytes.

A thread writes the new changes and a heartbeat every second. So the trace of a job that is killed
or hangs is nearly complete. Beside the ranks' files, the first rank writes `CLOCKS`: by how much
the hosts' clocks are ahead of its own, at the beginning and at the end of the job.

Loads no MPI.
"""

import contextlib
import errno
import json
import os
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpips.checkpoint import run_folder
from mpips.errors import complain
from mpips.health import status_board

EVERY_S = 1.0
PIECE = 1 << 14  # changes
MOST = 256 << 20
CODE_BITS = 8
HEAD = struct.Struct("<q")
CLOCKS = "clocks"


class RankFile:
    """A file with a line of JSON and then pieces of bytes.

    If the file cannot be written, a warning is printed once, and the run continues.

    Args:
        path: The file; an old one is overwritten.
        about: Contents of the line.
        what: Name of the kind of file, for warnings.
        most: Number of bytes of pieces at which the file ends; None for no limit.

    Attributes:
        open: Whether pieces are written.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], what: str, most: int | None = None
    ) -> None:
        self._path, self._what, self._most, self._size = path, what, most, 0
        self.open = False
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (held until close)
            self._write(json.dumps(about).encode() + b"\n")
        except OSError as problem:
            complain(f"warning: no {what} {path}: {problem.strerror}")
            return
        self.open = True

    def append(self, data: bytes, end: bytes = b"") -> None:
        """Write a piece, if the file is open. Blocks: until the system has taken it.

        Args:
            data: The piece.
            end: A shorter piece, which replaces it if it cannot be written. On a full disk, the
                file's last block often has room for it.
        """
        if not self.open:
            return
        self._size += len(data)
        at = self._file.tell()
        try:
            self._write(data)
            if self._most is not None and self._size >= self._most:
                raise OSError(0, "it is full")
        except OSError as problem:
            if end:
                with contextlib.suppress(OSError):
                    file = self._file.fileno()
                    os.ftruncate(file, at + os.pwrite(file, end, at))
            self.close()
            complain(f"warning: the {self._what} {self._path} ends here: {problem.strerror}")

    def _write(self, data: bytes) -> None:
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self.open:
            self.open = False
            self._file.close()


class Trace:
    """Writes the changes of this process's status board to a file.

    Args:
        path: The file; an old one is overwritten.
        about: Description of the rank; its clock is added.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._times, self._codes = array("d"), array("q")
        self._written = 0  # number of these changes in the file
        self._epoch = time.time() - time.perf_counter()
        self._file = RankFile(path, {**about, "epoch": self._epoch}, "trace", MOST)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="trace", daemon=True)
        if self._file.open:
            self._thread.start()
            status_board.trace_by(self.note)

    def now(self) -> float:
        """Return the time by this rank's clock, in seconds since 1970, as in the trace."""
        return self._epoch + time.perf_counter()

    def note(self, what: int, now: float, value: int) -> None:
        """Keep a change.

        Args:
            what: Kind of the change.
            now: Time of `time.perf_counter`.
            value: Value of the change.
        """
        self._times.append(now)
        self._codes.append(value << CODE_BITS | what)
        if len(self._times) >= PIECE:
            with self._lock:  # other threads may write these arrays, or add to them
                self._write()
                del self._times[: self._written], self._codes[: self._written]
                self._written = 0
            if not self._file.open:
                status_board.trace_by(None)

    def _keep_up(self) -> None:
        """Write new changes and a heartbeat every second, until the end."""
        alive = array("d", [0.0]), array("q", [status_board.WORDS + status_board.BEAT])
        while not self._ended.wait(EVERY_S):
            with self._lock:
                self._write()
                alive[0][0] = time.perf_counter()
                self._append(*alive)

    def _write(self) -> None:
        """Write the new changes; the caller holds the lock.

        Other threads may add changes meanwhile. Each adds a change's time before its code, so the
        number of codes is the number of complete changes. Each slice of an array is one step of the
        interpreter.
        """
        begin, end = self._written, len(self._codes)
        if end > begin:
            self._append(self._times[begin:end], self._codes[begin:end])
            self._written = end

    def _append(self, times: "array[float]", codes: "array[int]") -> None:
        self._file.append(HEAD.pack(len(codes)) + times.tobytes() + codes.tobytes())

    def close(self) -> None:
        """Write the last changes, and close the file. May be called twice."""
        if self._thread.ident is not None and not self._ended.is_set():
            status_board.trace_by(None)
            self._ended.set()
            self._thread.join()
            self._write()
            self._file.close()


class Traced(NamedTuple):
    """Contents of a rank's trace.

    Attributes:
        about: Description of the rank.
        times: Time of each change, in seconds since 1970 by the clock of rank 0's host, shape (n,),
            float64. The times of phases do not decrease; a heartbeat may be later than changes
            after it.
        whats: Kind of each change, one of `status_board.PHASES` or of the codes beside them, shape
            (n,), int64.
        values: Value of each change, shape (n,), int64.
    """

    about: dict[str, Any]
    times: np.ndarray
    whats: np.ndarray
    values: np.ndarray


def read(path: Path) -> Traced:
    """Read the complete pieces of a trace.

    Raises:
        ValueError: If the file is not a trace.
    """
    first, _, data = path.read_bytes().partition(b"\n")
    about = json.loads(first)
    pieces = list(_pieces(data))
    none = np.zeros(0)
    times = np.concatenate([none, *(piece for piece, _ in pieces)])
    codes = np.concatenate([none.astype("i8"), *(piece for _, piece in pieces)])
    times += about["epoch"]
    times -= _ahead(path.with_name(CLOCKS), about["host"], times)
    return Traced(about, times, codes & ((1 << CODE_BITS) - 1), codes >> CODE_BITS)


def _ahead(path: Path, host: str, times: np.ndarray) -> np.ndarray:
    """Return by how many seconds a host's clock was ahead of rank 0's at its own times.

    The difference is interpolated between two comparisons. The trace of a killed job has only one.
    """
    known = [(0.0, 0.0)]
    if path.exists():
        lines = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True)
                 if line.endswith(b"\n")]  # fmt: skip
        known = [(line["at"], line["ahead"].get(host, 0.0)) for line in lines] or known
    ats, aheads = np.array(known).T
    return np.interp(times, ats + aheads, aheads)


def folder_of(run: Path, job: int) -> Path:
    """Return the folder of a job's traces, given its number in the run."""
    return run / run_folder.TRACE / f"job-{job:04d}"


def jobs_of(run: Path) -> list[int]:
    """Return the numbers of a run's jobs with a trace, oldest first."""
    found = (run / run_folder.TRACE).glob("job-*/rank-*")
    names = {path.parent.name.removeprefix("job-") for path in found}
    return sorted(int(name) for name in names if name.isdecimal())


def _pieces(data: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    at = 0
    while at + HEAD.size <= len(data):
        (n,) = HEAD.unpack_from(data, at)
        at += HEAD.size
        if n < 0 or at + 16 * n > len(data):
            return  # the job was killed during this write

        yield np.frombuffer(data, "f8", n, at), np.frombuffer(data, "i8", n, at + 8 * n)
        at += 16 * n
