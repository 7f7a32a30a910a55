"""Reading of a server's record, with a check of every sum.

See `mpips.ps.replay_log` for the format.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mpips.errors import Failure, UserError
from mpips.ps import replay_log


@dataclass(frozen=True)
class Recorded:
    """What a server has written.

    Attributes:
        about: What is known of the job, and of the server.
        records: In the order in which pushes were applied, of `SHORT_DTYPE` or `WHOLE_DTYPE`.
        damage: The error for the first piece that is not as it was written, which ends the records.
        reads: Of rows: see `decoded`.
        evicted: Likewise.
        stopped: Whether recording stopped before the job, as on a full disk.
    """

    about: dict[str, Any]
    records: np.ndarray
    damage: UserError | None
    reads: np.ndarray
    evicted: dict[int, int]
    stopped: bool


def damaged(
    got: str, expected: str, remedy: str = "the record is damaged: bring it back from a copy"
) -> UserError:
    """Return the error for a record that is not all that was written, with exit code 1."""
    return Failure(got, expected, remedy)


def read(path: Path) -> Recorded | None:
    """Read a file as far as it is sound; None where a kill has left less than its first piece.

    Raises:
        UserError: If it is of another format, or, with exit code 1, its first line is damaged.
    """
    first, newline, data = path.read_bytes().partition(b"\n")
    about, damage = _about_of(path, first), None
    try:
        found = _piece_at(data, 0, 0, crc32(first))
    except ValueError:
        about, found = None, (b"", b"", 0, 0)
    if found is None and (about is not None or not (newline or _begins_with_json(first))):
        return None
    if found is None or about is None:
        raise damaged(f"{path} without a sound first line", "the record of a server")
    whole = about["server"] == 0
    dtype = replay_log.line_dtype(whole, len(about["workers"]))
    lines, codes, stopped, (_, _, total, at) = bytearray(), bytearray(), False, found
    try:
        while (found := _piece_at(data, at, dtype.itemsize, total)) is not None:
            stopped = not (found[0] or found[1])
            lines += found[0]
            codes += found[1]
            total, at = found[2:]
    except ValueError:
        got = f"{path}: byte {len(first) + 1 + at} begins a piece whose sum is wrong"
        damage = damaged(got, "what the server wrote")
    records = _records_of(np.frombuffer(lines, dtype), whole, max(1, about["samples"][0]))
    workers = records["worker"] if about.get("tables") else records["worker"][:0]
    return Recorded(about, records, damage, *replay_log.decoded(bytes(codes), workers), stopped)


def _begins_with_json(text: bytes) -> bool:
    """Return whether a whole value of JSON is at the beginning, as where its newline is damaged."""
    try:
        json.JSONDecoder().raw_decode(text.decode("latin-1"))
    except ValueError:
        return False
    return True


def _about_of(path: Path, first: bytes) -> dict[str, Any] | None:
    """Return what a file's first line says; None where that is nothing.

    Raises:
        UserError: If it is of another format.
    """
    try:
        about = json.loads(first)
        found = about["format"]
    except (ValueError, KeyError, TypeError):
        return None
    if found != replay_log.FORMAT:
        got = f"{path}: format {found}"
        raise UserError(got, str(replay_log.FORMAT), "use the version of mpips that wrote it")
    return dict(about)


def _piece_at(
    data: bytes, at: int, width: int, before: int
) -> tuple[bytes, bytes, int, int] | None:
    """Return lines, reads, sum and end of the piece at `at`; None where the data ends within it.

    Args:
        data: What is behind the file's first line.
        at: Where it begins.
        width: Bytes of a line.
        before: Sum of the head before.

    Raises:
        ValueError: If a sum is wrong.
    """
    begin = at + replay_log.HEAD.size + replay_log.SUM.size
    if begin > len(data):
        return None
    count, reads, of_body = replay_log.HEAD.unpack_from(data, at)
    (total,) = replay_log.SUM.unpack_from(data, at + replay_log.HEAD.size)
    if crc32(data[at : at + replay_log.HEAD.size], before) != total:
        raise ValueError(at)
    middle = begin + count * width
    end = middle + reads
    if end > len(data):
        return None
    if crc32(data[begin:end]) != of_body:
        raise ValueError(at)
    return data[begin:middle], data[middle:end], total, end


def _records_of(lines: np.ndarray, whole: bool, epoch: int) -> np.ndarray:
    """Return the pushes that lines of a file are, where an epoch has so many samples."""
    higher = np.flatnonzero(lines["worker"] == np.iinfo(lines["worker"].dtype).max)
    found = np.zeros(len(lines), replay_log.WHOLE_DTYPE if whole else replay_log.SHORT_DTYPE)
    for name in ("worker", "stale", "line", *("samples", "loss")[: 2 * whole]):
        found[name] = lines[name]
    found["stale"][higher + 1] += found["stale"][higher] << replay_log.STALE_BITS
    if whole:
        found["epoch"], found["begin"] = np.divmod(lines["position"], np.uint64(epoch))
    return np.delete(found, higher)
