"""What a rank does when, in a file of its own: each change of its phase, and marks beside them.

A file is a line of JSON, what is known of the rank, and then pieces: the number of changes, their
times, float64, and their codes, int64. A code's lowest eight bits say what, the others hold a
value. A rank keeps one piece in memory, and its file ends at `MOST` bytes.

Loads no MPI.
"""

import json
import struct
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpips.cluster import words
from mpips.cluster.rank_file import RankFile

PIECE = 1 << 14  # changes
MOST = 256 << 20
CODE_BITS = 8
HEAD = struct.Struct("<q")


class Trace:
    """Writes what this process tells `mpips.cluster.words`, until it is closed.

    Args:
        path: The file, which is made anew.
        about: What is known of the rank; its clock is added.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._times, self._codes = array("d"), array("q")
        epoch = time.time() - time.perf_counter()
        self._file = RankFile(path, {**about, "epoch": epoch}, "trace", MOST)
        if self._file.open:
            words.trace_by(self.note)

    def note(self, what: int, now: float, value: int) -> None:
        """Keep a change or a mark: what, when by `time.perf_counter`, and its value."""
        self._times.append(now)
        self._codes.append(value << CODE_BITS | what)
        if len(self._times) == PIECE:
            self._write()

    def _write(self) -> None:
        data = HEAD.pack(len(self._times)) + self._times.tobytes() + self._codes.tobytes()
        self._times, self._codes = array("d"), array("q")
        self._file.append(data)
        if not self._file.open:
            words.trace_by(None)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if words.is_traced():
            self._write()
            words.trace_by(None)
            self._file.close()


class Traced(NamedTuple):
    """What a rank has written.

    Attributes:
        about: What is known of it.
        times: Of each change, seconds since 1970 by the clock of rank 0's host, shape (n,).
        whats: One of `words.PHASES`, or of the marks beside them, shape (n,), int64.
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
    times += about["epoch"] - about["ahead"]
    return Traced(about, times, codes & ((1 << CODE_BITS) - 1), codes >> CODE_BITS)


def _pieces(data: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    at = 0
    while at + HEAD.size <= len(data):
        (n,) = HEAD.unpack_from(data, at)
        at += HEAD.size
        if n < 0 or at + 16 * n > len(data):
            return  # it was killed as it wrote
        yield np.frombuffer(data, "f8", n, at), np.frombuffer(data, "i8", n, at + 8 * n)
        at += 16 * n
