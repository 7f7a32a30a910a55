"""Trace of one rank, and its file in the run's folder.

A trace is a line of JSON, what is known of the rank, and then pieces: the number of changes, their
times, float64, and their codes, int64. A code's lowest eight bits say what, the others hold a
value. A rank keeps `PIECE` changes in memory at the most, and its file ends at `MOST` bytes.

A thread writes what is new every second, and a mark that the rank lives: of a job that is killed or
stands still, the trace is there. Beside the ranks' files the first rank's `CLOCKS` says how far the
hosts' clocks are ahead of its own, at the beginning of the job and at its end.

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
    """Writes a line of JSON, and then pieces of bytes, until it is closed.

    Args:
        path: The file, which is made anew.
        about: What the line says.
        what: What the file is called.
        most: Bytes of pieces at which it ends; None for no end.

    A file that cannot be written is told of once, and ends no run.

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
        """Write a piece, if the file is open. Blocks: until the system has it.

        Args:
            data: The piece.
            end: A shorter one that replaces it if it cannot be written: of a full disk, what is
                left of the file's last block often has room for it.
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
        """Write no more. May be called twice."""
        if self.open:
            self.open = False
            self._file.close()


class Trace:
    """Writes what this process tells `mpips.health.status_board`, until it is closed.

    Args:
        path: The file, which is made anew.
        about: What is known of the rank; its clock is added.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._times, self._codes = array("d"), array("q")
        self._written = 0  # of these changes
        self._epoch = time.time() - time.perf_counter()
        self._file = RankFile(path, {**about, "epoch": self._epoch}, "trace", MOST)
        self._turn, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="trace", daemon=True)
        if self._file.open:
            self._thread.start()
            status_board.trace_by(self.note)

    def now(self) -> float:
        """Return the time by this rank's clock, as the trace has it: seconds since 1970."""
        return self._epoch + time.perf_counter()

    def note(self, what: int, now: float, value: int) -> None:
        """Keep a change or a mark: what, when by `time.perf_counter`, and its value."""
        self._times.append(now)
        self._codes.append(value << CODE_BITS | what)
        if len(self._times) >= PIECE:
            with self._turn:  # another thread of the rank notes, too
                self._write()
                self._times, self._codes, self._written = array("d"), array("q"), 0
            if not self._file.open:
                status_board.trace_by(None)

    def _keep_up(self) -> None:
        """Write what is new, and that the rank lives, every second until the end."""
        alive = array("d", [0.0]), array("q", [status_board.WORDS + status_board.BEAT])
        while not self._ended.wait(EVERY_S):
            with self._turn:
                self._write()
                alive[0][0] = time.perf_counter()
                self._append(*alive)

    def _write(self) -> None:
        """Write what is new; its turn is this thread's.

        The rank may note more meanwhile: a change counts once its code is there, behind its time,
        and each slice of an array is one step of the interpreter.
        """
        begin, end = self._written, len(self._codes)
        if end > begin:
            self._append(self._times[begin:end], self._codes[begin:end])
            self._written = end

    def _append(self, times: "array[float]", codes: "array[int]") -> None:
        self._file.append(HEAD.pack(len(codes)) + times.tobytes() + codes.tobytes())

    def close(self) -> None:
        """Write what is left, and close the file. May be called twice."""
        if self._thread.ident is not None and not self._ended.is_set():
            status_board.trace_by(None)
            self._ended.set()
            self._thread.join()
            self._write()
            self._file.close()


class Traced(NamedTuple):
    """What a rank has written.

    Attributes:
        about: What is known of it.
        times: Of each change, seconds since 1970 by the clock of rank 0's host, shape (n,). Those
            of phases do not decrease; a mark that the rank lives may be ahead of some.
        whats: One of `status_board.PHASES`, or of the marks beside them, shape (n,), int64.
        values: Shape (n,), int64.
    """

    about: dict[str, Any]
    times: np.ndarray
    whats: np.ndarray
    values: np.ndarray


def read(path: Path) -> Traced:
    """Read a file as far as it is whole.

    Raises:
        ValueError: If it is no such file.
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
    """Return how far a host's clock was ahead of rank 0's at times of its own.

    Between two comparisons it went at one speed; a job that was killed has one.
    """
    known = [(0.0, 0.0)]
    if path.exists():
        lines = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True)
                 if line.endswith(b"\n")]  # fmt: skip
        known = [(line["at"], line["ahead"].get(host, 0.0)) for line in lines] or known
    ats, aheads = np.array(known).T
    return np.interp(times, ats + aheads, aheads)


def folder_of(run: Path, job: int) -> Path:
    """Return where the ranks of a run's job, by its number, write their traces."""
    return run / run_folder.TRACE / f"job-{job:04d}"


def jobs_of(run: Path) -> list[int]:
    """Return the numbers of a run's jobs of which there is a trace, the oldest first."""
    found = (run / run_folder.TRACE).glob("job-*/rank-*")
    names = {path.parent.name.removeprefix("job-") for path in found}
    return sorted(int(name) for name in names if name.isdecimal())


def _pieces(data: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    at = 0
    while at + HEAD.size <= len(data):
        (n,) = HEAD.unpack_from(data, at)
        at += HEAD.size
        if n < 0 or at + 16 * n > len(data):
            return  # it was killed as it wrote
        yield np.frombuffer(data, "f8", n, at), np.frombuffer(data, "i8", n, at + 8 * n)
        at += 16 * n
