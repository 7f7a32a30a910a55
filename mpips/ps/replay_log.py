"""Log of the pushes that servers apply, for `mpips replay`.

Each server writes a file of its own: a line of JSON, what is known of the job, and then pieces: a
head, and lines, one a push, in the order in which they were applied (`line_dtype`), with the bytes
of reads. The first piece has no lines, and seals the JSON. A head has the numbers of lines and of
bytes of reads, their sum (CRC-32), and the sum of these three, which goes on from that of the piece
before. So each bit of a file is in a sum, and a piece has one place. If a write fails,
as on a full disk, recording stops: a piece without lines replaces what was written of the last one,
if there is room, and the checkpoints saved after that say ``recorded = 0``.

A line says whose push it was, and how old: the version that its worker had read is the one before
the update less the staleness. Where that has more than 16 bits, the higher ones are in a line of
nobody's before. That of server 0 says as well which samples it was made of, and its loss. So the
whole order of a run is known, and what each gradient was computed from.

Where there are tables each push has as well which reads of rows its worker has made of the server
since its push before: a byte a read, how many updates before this one it was. Where old rows were
evicted between that update and the one before, it has by how many epochs that were over.

By the loss, and by a sum of one cache line of the shard after each update, another one each time, a
replay sees at which push it goes another way. Where no shard is updated by pushes, as in mode
hybrid, the line is of a push's gradients of rows; there each push is of the next round of its
worker, and reads of parameters need no record. A piece is of `PIECE` lines, and is one `write`: a
kill leaves whole pieces and the beginning of one more, and loses as many lines at most, none of
those in a checkpoint. Nothing is synced: a power cut can lose more, and leave a wrong sum.
"""

import json
import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from mpips.checkpoint import run_folder
from mpips.config import OPTIONS
from mpips.config.jobfile import to_toml
from mpips.errors import complain
from mpips.health.trace_file import RankFile
from mpips.kernels.compiled import Vector, kernel
from mpips.mpi.collectives import broadcast_polled, gather_polled
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.ps.assemble import ServerHalf
from mpips.transport.push import Push

WORDS = 16  # of 4 bytes, of a shard that are summed at a time: a cache line
SPREAD = 0x9E3779B1  # odd: versions that follow each other have lines far from each other
WORD = 0xFFFFFFFF
STALE_BITS = 16
STALE_MOST = (1 << STALE_BITS) - 1


@kernel(quick=True)
def place_of(n_words: int, version: int) -> int:
    """Return which word of a shard the line begins at that is summed at `version`."""
    lines = (n_words + WORDS - 1) // WORDS
    return ((version * SPREAD & WORD) * lines >> 32) * WORDS


@kernel(quick=True)
def line_sum(words: Vector, version: int) -> int:
    """Return a byte that depends on each bit of the line of a shard that is at `version`.

    Args:
        words: The shard, shape (n,), uint32; the last line may be shorter.
        version: How many updates it has.
    """
    begin, total = place_of(words.size, version), 0
    for i in range(begin, min(begin + WORDS, words.size)):
        total = (total ^ int(words[i])) * SPREAD & WORD
        total ^= total >> 15
    return (total * SPREAD & WORD) >> 24


def warm() -> None:
    """Compile, or load from the cache on disk, what a recorder needs."""
    line_sum(np.zeros(1, np.uint32), 0)


FORMAT = 6
FILE = "server-{:05d}"
PIECE = 64  # lines
HEAD = struct.Struct("<III")  # lines, bytes of reads, the sum of both; and the sum of the head:
SUM = struct.Struct("<I")
CODES = {"|u1": "B", "<u2": "H", "<u4": "I", "<u8": "Q", "<f8": "d"}  # of `struct`, by dtype
NARROW, WIDE = "<u1", "<u2"  # numbers of workers; the highest is nobody's
REMOTE, NONE, MORE = 0x7E, 0x7F, 0x80  # reads: the age follows; there is none; one more follows
EVICTED = NONE | MORE  # and the epochs, before the reads
AGE = struct.Struct("<I")
SHORT_DTYPE: Final = np.dtype([("worker", "<u4"), ("stale", "<u4"), ("line", "<u1")])
WHOLE_DTYPE: Final = np.dtype(
    [*SHORT_DTYPE.descr, ("epoch", "<u4"), ("begin", "<u8"), ("samples", "<u4"), ("loss", "<f8")]
)
READ_DTYPE: Final = np.dtype([("worker", "<u4"), ("at", "<i8")])


def line_dtype(whole: bool, workers: int) -> np.dtype:
    """Return what a line of a file consists of.

    Args:
        whole: Whether it says what a push was made of.
        workers: How many there are.
    """
    number = NARROW if workers < np.iinfo(NARROW).max else WIDE
    found = [("worker", number), ("stale", "<u2"), ("line", "<u1")]
    if whole:
        found += [("position", "<u8"), ("samples", "<u4"), ("loss", "<f8")]
    return np.dtype(found)


class Recorder:
    """Writes down what a server applies. Collective: no. Blocks: for the disk, now and then.

    Args:
        path: Its file, which is made anew.
        about: What is known of the job, and of the server.
        params: Its shard, shape (shard.size,).
        whole: Whether it says which samples a push was made of.

    Attributes:
        pushes: How many it has noted.
    """

    def __init__(self, path: Path, about: dict[str, Any], params: np.ndarray, whole: bool) -> None:
        self._part = int(about["part"])
        self._file = RankFile(path, about, "record")
        self._words, self._epoch = params.view(np.uint32), max(1, about["samples"][0])
        dtype, self._whole = line_dtype(whole, len(about["workers"])), whole
        self._nobody = np.iinfo(dtype["worker"]).max
        self._pack = struct.Struct("<" + "".join(CODES[field[1]] for field in dtype.descr)).pack
        self._lines = list[bytes]()
        self.pushes, self._read_at = 0, dict[int, list[int]]()
        self._reads, self._notes_reads = bytearray(), bool(about.get("tables"))
        self._over: int | None = None
        self._sum = crc32(json.dumps(about).encode())
        self._append(0, b"")

    @property
    def part(self) -> int:
        """Number of the job in the run's record; 0 if recording has stopped."""
        return self._part if self._file.open else 0

    def note_read(self, worker: int) -> None:
        """Note that a worker reads rows of tables at this version."""
        self._read_at.setdefault(worker, []).append(self.pushes)

    def note_eviction(self, over: int) -> None:
        """Note that old rows are evicted between all that was noted and the next push.

        Args:
            over: How many epochs are over.
        """
        self._over = over

    def note(self, push: Push, before: int, staleness: int, start: float = 0.0) -> None:
        """Note a push, applied or dropped; see `mpips.ps.shard.Observer`."""
        epoch, begin, _ = push.batch
        batch = (epoch * self._epoch + begin, push.samples, push.loss) if self._whole else ()
        if staleness > STALE_MOST:
            higher, staleness = divmod(staleness, STALE_MOST + 1)
            self._lines.append(self._pack(self._nobody, higher, 0, *batch))
        words = self._words if self._words.size else words_of(self._words, push, before + 1)
        found = line_sum(words, before + 1)
        self._lines.append(self._pack(push.worker, staleness, found, *batch))
        if self._notes_reads:
            self._note_reads_of(push.worker)
        self.pushes += 1
        if len(self._lines) >= PIECE:
            self.flush()

    def _note_reads_of(self, worker: int) -> None:
        """Note the reads of rows that a worker has made since its push before."""
        ages = [self.pushes - at for at in self._read_at.pop(worker, ())]
        self._reads += encoded(ages, self._over)
        self._over = None

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._lines:
            self._append(len(self._lines), b"".join((*self._lines, self._reads)))
            self._lines.clear()
            self._reads.clear()

    def _append(self, count: int, body: bytes) -> None:
        end, _ = piece(0, 0, b"", self._sum)
        data, self._sum = piece(count, len(self._reads), body, self._sum)
        self._file.append(data, end)

    def close(self) -> None:
        """Write what is left, and let the shard go."""
        self.flush()
        self._file.close()
        self._words = np.zeros(0, np.uint32)


def words_of(params: np.ndarray, push: Push, version: int) -> np.ndarray:
    """Return what is summed at a version: the shard, or if it is empty a push's rows of a table."""
    if params.size or not push.rows:
        return params.view(np.uint32)
    return push.rows[version % len(push.rows)].sums.reshape(-1).view(np.uint32)


def piece(count: int, reads: int, body: bytes, before: int) -> tuple[bytes, int]:
    """Return a piece of a file, and the sum of its head.

    Args:
        count: Lines in it.
        reads: Bytes of reads behind them.
        body: Both.
        before: The sum of the head before.
    """
    head = HEAD.pack(count, reads, crc32(body))
    total = crc32(head, before)
    return head + SUM.pack(total) + body, total


def encoded(ages: Sequence[int], over: int | None = None) -> bytes:
    """Return the bytes of a push's reads of rows, and of an eviction before it; see `decoded`."""
    if over is not None:
        return bytes([EVICTED]) + AGE.pack(over) + encoded(ages)
    if len(ages) == 1 and ages[0] < REMOTE:  # as most are
        return bytes(ages)
    found = bytearray() if ages else bytearray([NONE])
    for left, age in zip(reversed(range(len(ages))), ages, strict=True):
        found.append(min(age, REMOTE) | (MORE if left else 0))
        if age >= REMOTE:
            found += AGE.pack(age)
    return bytes(found)


def decoded(codes: bytes, workers: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """Return who read rows, and when old ones were evicted.

    Args:
        codes: The bytes of all pushes.
        workers: Whose push each was.

    Returns:
        Which worker read after how many updates, of `READ_DTYPE`; and after how many updates rows
        were evicted, with the epochs that were over.
    """
    found, evicted, at = list[tuple[int, int]](), dict[int, int](), 0
    for push, worker in enumerate(workers.tolist()):
        more = MORE
        while more:
            code, at = codes[at], at + 1
            age, more = code & ~MORE, code & MORE
            if code == EVICTED:
                (evicted[push],), at = AGE.unpack_from(codes, at), at + AGE.size
            if age == NONE:
                continue
            if age == REMOTE:
                (age,), at = AGE.unpack_from(codes, at), at + AGE.size
            found.append((worker, push - age))
    return np.array(found, READ_DTYPE), evicted


def recorder_of(job: Job, half: ServerHalf) -> Recorder | None:
    """Return the recorder of a server's shard; None if the job keeps no record.

    If one server cannot begin its file, none of them records. Collective: over the servers.
    """
    if not job.config.record:
        return None
    number = np.array([_begin_part(job) if job.cluster.is_coordinator else 0])
    broadcast_polled(half.servers, number, 0, job.cluster.wait_request)
    part = int(number[0])
    if not part:
        return None
    server, recorder = job.cluster.roles.servers.index(job.cluster.rank), None
    if not half.server.idle:
        path, about = part_folder(job.out, part) / FILE.format(server), _about(job, part, server)
        recorder = Recorder(path, about, half.server.params, whole=server == 0)
    begun = recorder is None or recorder.part > 0
    if all(gather_polled(half.servers, begun, job.cluster.wait_request)):
        job.recorder = recorder
        return recorder
    if recorder is not None:
        recorder.close()
    if job.cluster.is_coordinator:
        shutil.rmtree(part_folder(job.out, part), ignore_errors=True)
    return None


def part_folder(out: Path, part: int) -> Path:
    """Return the folder of a job in a run's record."""
    return out / run_folder.RECORD / f"part-{part:04d}"


def part_numbers(out: Path) -> list[int]:
    """Return the numbers of the jobs in a run's record, the oldest first."""
    names = (path.name.removeprefix("part-") for path in (out / run_folder.RECORD).glob("part-*"))
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
        "format": FORMAT, "part": part, "server": server,
        "owners": [k for k, shard in enumerate(job.shards) if shard.size or tables_of(job)],
        "config": to_toml(replace(job.config, **defaults, lr=job.config.learning_rate)),
        "world": job.world(), "workers": list(job.cluster.roles.workers),
        "spares": job.cluster.roles.spares, "block": job.block, "step": job.base_step,
        "resumed": job.checkpoint.path.name if job.checkpoint is not None else None,
        "started": str(started) if started is not None else None, "numpy": np.__version__,
        "samples": [job.info.n_train, job.info.n_test],
        "tables": [table.name for table in tables_of(job)],
    }  # fmt: skip
