"""Reader of a server's record file, which checks every checksum.

`mpips.ps.replay_log` describes the format.
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
class ServerRecord:
    """Content of a server's record file.

    Attributes:
        about: First line of the file, which describes the job and the server.
        records: Records of pushes in the order of their updates, of `SHORT_DTYPE` or `WHOLE_DTYPE`.
        damage: Error for the first damaged piece, which ends the records; None without damage.
        reads: Reads of rows, as `replay_log.decoded` returns them.
        evicted: Evictions of rows, as `replay_log.decoded` returns them.
        stopped: Whether recording stopped before the job ended, such as on a full disk.
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
    """Return the error for a damaged or incomplete record, with exit code 1."""
    return Failure(got, expected, remedy)


def read(path: Path) -> ServerRecord | None:
    """Read a file up to its first damaged piece; None if a kill left less than its first piece.

    Raises:
        UserError: If the file has another format, or its first line is damaged (exit code 1).
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
    return ServerRecord(about, records, damage, *replay_log.decoded(bytes(codes), workers), stopped)


def _begins_with_json(text: bytes) -> bool:
    """Return whether a text begins with a complete JSON value, such as before a damaged newline."""
    try:
        json.JSONDecoder().raw_decode(text.decode("latin-1"))
    except ValueError:
        return False
    return True


def _about_of(path: Path, first: bytes) -> dict[str, Any] | None:
    """Return the content of a file's first line; None if the line is damaged.

    Raises:
        UserError: If the file has another format.
    """
    try:
        about = json.loads(first)
        version = about["format"]
    except (ValueError, KeyError, TypeError):
        return None
    if version != replay_log.FORMAT:
        got = f"{path}: format {version}"
        raise UserError(got, str(replay_log.FORMAT), "use the version of mpips that wrote it")
    return dict(about)


def _piece_at(
    data: bytes, at: int, width: int, before: int
) -> tuple[bytes, bytes, int, int] | None:
    """Return lines, reads, checksum and end of the piece at `at`; None if the piece is incomplete.

    Args:
        data: Content of the file after its first line.
        at: Begin of the piece in `data`.
        width: Bytes of a line.
        before: Checksum of the previous head, which the head's checksum continues.

    Raises:
        ValueError: If a checksum is wrong.
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
    """Return the records of pushes in lines of a file.

    Args:
        lines: Lines of the file, of `replay_log.line_dtype`.
        whole: Whether the lines have the batches and losses, as those of server 0.
        epoch: Number of samples of an epoch.
    """
    higher = np.flatnonzero(lines["worker"] == np.iinfo(lines["worker"].dtype).max)
    records = np.zeros(len(lines), replay_log.WHOLE_DTYPE if whole else replay_log.SHORT_DTYPE)
    for name in ("worker", "stale", "line", *("samples", "loss")[: 2 * whole]):
        records[name] = lines[name]
    records["stale"][higher + 1] += records["stale"][higher] << replay_log.STALE_BITS
    if whole:
        records["epoch"], records["begin"] = np.divmod(lines["position"], np.uint64(epoch))
    return np.delete(records, higher)
