"""What the servers of a run apply, in which order: a compact record, for `mpips.replay`.

Each server writes a file of its own: a line of JSON, what is known of the job, and then pieces: the
number of records, their sum (CRC-32), and the records, one a push, in the order in which they were
applied. A record says whose push it was, and how old: the version that its worker had read is the
one before the update less the staleness. That of server 0 says as well which samples it was made
of, and its loss. So the whole order of a run is known, and what each gradient was computed from.

Where there are tables it notes as well who has read rows of them between which updates, in the same
pieces: a word a read, with the worker's number, and a word `APPLIED` an update.

By the loss, and by a sum of one cache line of the shard after each update, another one each time, a
replay sees at which push it goes another way. A piece is of `PIECE` records: as many are lost at
most when a job is killed, and none of those in a checkpoint.
"""

import json
import os
import shutil
import struct
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from mpips.checkpoint import place
from mpips.cluster.collectives import broadcast_polled
from mpips.cluster.rank_file import RankFile
from mpips.config import OPTIONS
from mpips.config.jobfile import to_toml
from mpips.errors import UserError, complain
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.ps.assemble import ServerHalf
from mpips.transport.push import Push

FORMAT = 2
PIECE = 64  # records
LINE_BYTES = 64
APPLIED = 0xFFFF  # among the words of reads
HEAD = struct.Struct("<III")  # records, words of reads, the sum of both
SHORT = struct.Struct("<HII")  # worker, staleness, sum of a line of the shard
WHOLE = struct.Struct("<HIIIQId")  # ... epoch, begin, samples, loss
SHORT_DTYPE: Final = np.dtype([("worker", "<u2"), ("stale", "<u4"), ("line", "<u4")])
WHOLE_DTYPE: Final = np.dtype(
    [*SHORT_DTYPE.descr, ("epoch", "<u4"), ("begin", "<u8"), ("samples", "<u4"), ("loss", "<f8")]
)
SPREAD = 0x9E3779B1  # odd: versions that follow each other have lines far from each other


def lines_of(params: np.ndarray) -> tuple[memoryview, int]:
    """Return a shard as bytes, and how many lines they are."""
    return params.view("u1").data, -(-params.nbytes // LINE_BYTES)


def line_of(version: int, lines: int) -> int:
    """Return which byte of a shard of `lines` the line begins at that is summed at `version`."""
    return ((version * SPREAD & 0xFFFFFFFF) * lines >> 32) * LINE_BYTES


def line_sum(shard: memoryview, lines: int, version: int) -> int:
    """Return the sum of the line of a shard that is at `version`; the last one may be shorter."""
    at = line_of(version, lines)
    return crc32(shard[at : at + LINE_BYTES])


class Recorder:
    """Writes down what a server applies. Collective: no. Blocks: for the disk, now and then.

    Args:
        path: Its file, which is made anew.
        about: What is known of the job, and of the server.
        params: Its shard, shape (shard.size,).
        whole: Whether it says which samples a push was made of.

    Attributes:
        part: Number of the job in the run's record.
    """

    def __init__(self, path: Path, about: dict[str, Any], params: np.ndarray, whole: bool) -> None:
        self.part = int(about["part"])
        self._file = RankFile(path, about, "record")
        self._bytes, self._lines = lines_of(params)
        self._whole, self._size = whole, (WHOLE if whole else SHORT).size
        self._records = bytearray(PIECE * self._size)
        self._count = 0
        self._reads, self._notes_reads = array("H"), bool(about.get("tables"))

    def note_read(self, worker: int) -> None:
        """Note that a worker reads rows of tables at this version."""
        self._reads.append(worker)

    def note(self, push: Push, staleness: int, version: int) -> None:
        """Note a push, applied or dropped, of that staleness; the shard is at `version` now."""
        line = line_sum(self._bytes, self._lines, version)
        at = self._count * self._size
        if self._whole:
            epoch, begin, end = push.batch
            more = epoch, begin, end - begin, push.loss
            WHOLE.pack_into(self._records, at, push.worker, staleness, line, *more)
        else:
            SHORT.pack_into(self._records, at, push.worker, staleness, line)
        self._count += 1
        if self._notes_reads:
            self._reads.append(APPLIED)
        if self._count == PIECE:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._count:
            records = bytes(self._records[: self._count * self._size])
            body = records + np.array(self._reads, "<u2").tobytes()
            self._file.append(HEAD.pack(self._count, len(self._reads), crc32(body)) + body)
            self._count = 0
            self._reads = array("H")

    def close(self) -> None:
        """Write what is left, and let the shard go."""
        self.flush()
        self._file.close()
        self._bytes.release()


def recorder_of(job: Job, half: ServerHalf) -> Recorder | None:
    """Return what records a server's shard; None where the job does not ask, or cannot be.

    Collective: over the servers.
    """
    if not job.config.record:
        return None
    number = np.array([_begin_part(job) if job.cluster.is_chief else 0])
    broadcast_polled(half.servers, number, 0, job.cluster.wait_request)
    part = int(number[0])
    if not part or half.server.idle:
        return None
    server = job.cluster.roles.servers.index(job.cluster.rank)
    path = part_folder(job.out, part) / f"server-{server:05d}"
    return Recorder(path, _about(job, part, server), half.server.params, whole=server == 0)


def part_folder(out: Path, part: int) -> Path:
    """Return the folder of a job in a run's record."""
    return out / place.RECORD / f"part-{part:04d}"


def part_numbers(out: Path) -> list[int]:
    """Return the numbers of the jobs in a run's record, the oldest first."""
    names = (path.name.removeprefix("part-") for path in (out / place.RECORD).glob("part-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _begin_part(job: Job) -> int:
    """Make the folder of this job's record, with what it begins with; returns its number, or 0.

    The checkpoint that a resumed run begins with may be removed while it goes on: links keep it.
    """
    part = max(part_numbers(job.out), default=0) + 1
    folder = part_folder(job.out, part)
    try:
        folder.mkdir(parents=True)
        if job.checkpoint is not None:
            path = job.checkpoint.path
            shutil.copytree(path, folder / path.name, copy_function=_link)
    except OSError as problem:
        complain(f"warning: no record {folder}: {problem.strerror or problem}")
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    return part


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without
        shutil.copy2(source, target)


def _about(job: Job, part: int, server: int) -> dict[str, Any]:
    defaults = {name: OPTIONS[name].default for name in ("out", "resume")}
    started = job.initial.path if job.initial is not None and job.checkpoint is None else None
    return {
        "format": FORMAT, "part": part, "server": server, "shard": [job.shard.begin, job.shard.end],
        "config": to_toml(replace(job.config, **defaults, lr=job.config.learning_rate)),
        "world": job.world(), "workers": list(job.cluster.roles.workers),
        "spares": job.cluster.roles.spares, "block": job.block, "step": job.base_step,
        "resumed": job.checkpoint.path.name if job.checkpoint is not None else None,
        "started": str(started) if started is not None else None, "numpy": np.__version__,
        "samples": [job.info.n_train, job.info.n_test],
        "tables": [table.name for table in tables_of(job)],
    }  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """What a server has written.

    Attributes:
        about: What is known of the job, and of the server.
        records: In the order in which pushes were applied, of `SHORT_DTYPE` or `WHOLE_DTYPE`.
        whole: Whether the file ends with a piece, and not within one.
        reads: Of rows: the number of a worker, or `APPLIED` for an update, shape (n,), uint16.
    """

    about: dict[str, Any]
    records: np.ndarray
    whole: bool
    reads: np.ndarray


def read(path: Path) -> Recorded:
    """Read a file as far as it is whole.

    Raises:
        UserError: If it is no such file, or of another format.
    """
    first, _, data = path.read_bytes().partition(b"\n")
    try:
        about = json.loads(first)
        found, server = about["format"], about["server"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}", "the record of a server", "remove it") from None
    if found != FORMAT:
        got = f"{path}: format {found}"
        raise UserError(got, str(FORMAT), "use the version of mpips that wrote it")
    dtype = WHOLE_DTYPE if server == 0 else SHORT_DTYPE
    pieces, reads, at = [np.zeros(0, dtype)], [np.zeros(0, "<u2")], 0
    while at + HEAD.size <= len(data):
        count, words, total = HEAD.unpack_from(data, at)
        begin, middle = at + HEAD.size, at + HEAD.size + count * dtype.itemsize
        end = middle + 2 * words
        if end > len(data) or crc32(data[begin:end]) != total:
            break
        pieces.append(np.frombuffer(data, dtype, count, begin))
        reads.append(np.frombuffer(data, "<u2", words, middle))
        at = end
    return Recorded(about, np.concatenate(pieces), at == len(data), np.concatenate(reads))
