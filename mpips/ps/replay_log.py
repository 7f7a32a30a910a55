"""Log of the pushes that servers apply, for `mpips replay`.

Each server writes its own file: a line of JSON about the job, and then pieces. A piece has a head,
one line for each push in the order of the updates (`line_dtype`), and the bytes of reads. The head
contains the number of lines, the number of bytes of reads, the CRC-32 of both, and a checksum. The
checksum covers these three numbers and continues that of the previous piece. So it protects each
bit of the file and the order of the pieces. The first piece has no lines; its checksum covers the
JSON. If a write fails, as on a full disk, recording stops. A piece without lines then replaces the
unfinished one, if there is room. Checkpoints saved after that contain ``recorded = 0``.

A line contains the worker of a push and its staleness. The worker had read the version before the
update, minus the staleness. If the staleness exceeds 16 bits, a line of no worker before it
contains the higher bits. Lines of server 0 also contain the samples of the batch and its loss. So a
replay knows the order of all updates, and from which versions each gradient was computed.

If there are tables, each push also has the reads of rows that its worker has made since its last
push. Each read is a byte: the number of updates between the read and this push. If rows were
evicted before a push, its bytes also contain the number of completed epochs.

Each line also has a checksum of one cache line of the shard after the update, a different one each
time. By the checksum and the loss, a replay detects the push at which it diverges from the run. In
mode hybrid, pushes update no shard. The checksum is then of a push's gradients of rows. Each push
belongs to its worker's next round there, and reads of parameters need no record.

A piece has `PIECE` lines and is written by one `write`. A kill leaves complete pieces and perhaps
an incomplete one. It loses at most `PIECE` lines, and none from before a checkpoint. Files are not
synced: a power failure can lose more, and leave a wrong checksum.
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
from mpips.mpi.collectives import gather_polled
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.ps.assemble import ServerHalf
from mpips.transport.push import Push

WORDS = 16  # words of 4 bytes in a cache line
SPREAD = 0x9E3779B1  # odd factor: consecutive versions have cache lines far from each other
WORD = 0xFFFFFFFF
STALE_BITS = 16
STALE_MOST = (1 << STALE_BITS) - 1


@kernel(quick=True)
def line_start(n_words: int, version: int) -> int:
    """Return the index of the first word of the cache line that is checked at a version.

    Args:
        n_words: Number of words in the shard.
        version: Version of the shard.
    """
    lines = (n_words + WORDS - 1) // WORDS
    return ((version * SPREAD & WORD) * lines >> 32) * WORDS


@kernel(quick=True)
def line_sum(words: Vector, version: int) -> int:
    """Return a one-byte checksum of the cache line that is checked at a version.

    Args:
        words: The shard, shape (n,), dtype uint32; the last cache line may be shorter.
        version: Version of the shard.
    """
    begin, total = line_start(words.size, version), 0
    for i in range(begin, min(begin + WORDS, words.size)):
        total = (total ^ int(words[i])) * SPREAD & WORD
        total ^= total >> 15
    return (total * SPREAD & WORD) >> 24


def warm() -> None:
    """Compile the loop of a recorder, or load it from the cache on disk."""
    line_sum(np.zeros(1, np.uint32), 0)


FORMAT = 6
FILE = "server-{:05d}"
PIECE = 64  # lines
# Head: number of lines, number of bytes of reads, CRC-32 of both. Then its checksum.
HEAD = struct.Struct("<III")
SUM = struct.Struct("<I")
CODES = {"|u1": "B", "<u2": "H", "<u4": "I", "<u8": "Q", "<f8": "d"}  # `struct` formats by dtype
NARROW, WIDE = "<u1", "<u2"  # dtypes of worker numbers; the largest number is of no worker
# Codes of reads: the age follows in 4 bytes; no read; flag: another read follows.
REMOTE, NONE, MORE = 0x7E, 0x7F, 0x80
EVICTED = NONE | MORE  # code: a number of epochs follows, and then the reads
AGE = struct.Struct("<I")
SHORT_DTYPE: Final = np.dtype([("worker", "<u4"), ("stale", "<u4"), ("line", "<u1")])
WHOLE_DTYPE: Final = np.dtype(
    [*SHORT_DTYPE.descr, ("epoch", "<u4"), ("begin", "<u8"), ("samples", "<u4"), ("loss", "<f8")]
)
READ_DTYPE: Final = np.dtype([("worker", "<u4"), ("at", "<i8")])


def line_dtype(whole: bool, workers: int) -> np.dtype:
    """Return the dtype of a file's lines.

    Args:
        whole: Whether lines contain samples and loss of a push.
        workers: Number of workers.
    """
    number = NARROW if workers < np.iinfo(NARROW).max else WIDE
    fields = [("worker", number), ("stale", "<u2"), ("line", "<u1")]
    if whole:
        fields += [("position", "<u8"), ("samples", "<u4"), ("loss", "<f8")]
    return np.dtype(fields)


class Recorder:
    """Writes the replay log of a server. Collective: no. Blocks: now and then, for the disk.

    Args:
        path: The file; an old one is overwritten.
        about: Description of the job and the server.
        params: The server's shard, shape (shard.size,).
        whole: Whether lines contain samples and loss of a push.

    Attributes:
        pushes: Number of pushes noted.
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
        self._epochs_over: int | None = None
        self._sum = crc32(json.dumps(about).encode())
        self._append(0, b"")

    @property
    def part(self) -> int:
        """Number of this job in the run's record; 0 if recording has stopped."""
        return self._part if self._file.open else 0

    def note_read(self, worker: int) -> None:
        """Note that a worker reads rows of tables at the current version."""
        self._read_at.setdefault(worker, []).append(self.pushes)

    def note_eviction(self, over: int) -> None:
        """Note that old rows are evicted between the last push and the next one.

        Args:
            over: Number of completed epochs.
        """
        self._epochs_over = over

    def note(self, push: Push, before: int, staleness: int, start: float = 0.0) -> None:
        """Note a push that was applied or dropped; see `mpips.ps.shard.Observer`."""
        epoch, begin, _ = push.batch
        batch = (epoch * self._epoch + begin, push.samples, push.loss) if self._whole else ()
        if staleness > STALE_MOST:
            higher, staleness = divmod(staleness, STALE_MOST + 1)
            self._lines.append(self._pack(self._nobody, higher, 0, *batch))
        words = self._words if self._words.size else words_of(self._words, push, before + 1)
        checksum = line_sum(words, before + 1)
        self._lines.append(self._pack(push.worker, staleness, checksum, *batch))
        if self._notes_reads:
            self._note_reads_of(push.worker)
        self.pushes += 1
        if len(self._lines) >= PIECE:
            self.flush()

    def _note_reads_of(self, worker: int) -> None:
        """Note the reads of rows that a worker has made since its last push."""
        ages = [self.pushes - at for at in self._read_at.pop(worker, ())]
        self._reads += encoded(ages, self._epochs_over)
        self._epochs_over = None

    def flush(self) -> None:
        """Write the lines that are still in memory."""
        if self._lines:
            self._append(len(self._lines), b"".join((*self._lines, self._reads)))
            self._lines.clear()
            self._reads.clear()

    def _append(self, count: int, body: bytes) -> None:
        end, _ = piece(0, 0, b"", self._sum)
        data, self._sum = piece(count, len(self._reads), body, self._sum)
        self._file.append(data, end)

    def close(self) -> None:
        """Write the last lines, and release the shard."""
        self.flush()
        self._file.close()
        self._words = np.zeros(0, np.uint32)


def words_of(params: np.ndarray, push: Push, version: int) -> np.ndarray:
    """Return the words to check at a version.

    These are the shard's or, if it is empty, those of a push's gradients of a table's rows.
    """
    if params.size or not push.rows:
        return params.view(np.uint32)
    return push.rows[version % len(push.rows)].sums.reshape(-1).view(np.uint32)


def piece(count: int, reads: int, body: bytes, before: int) -> tuple[bytes, int]:
    """Return a piece of a file, and the checksum of its head.

    Args:
        count: Number of lines.
        reads: Number of bytes of reads.
        body: Lines, and then reads.
        before: Checksum of the previous head.
    """
    head = HEAD.pack(count, reads, crc32(body))
    total = crc32(head, before)
    return head + SUM.pack(total) + body, total


def encoded(ages: Sequence[int], over: int | None = None) -> bytes:
    """Return the bytes for a push's reads of rows, and for an eviction before it; see `decoded`.

    Args:
        ages: Number of updates between each read and the push.
        over: Number of completed epochs if rows were evicted, else None.
    """
    if over is not None:
        return bytes([EVICTED]) + AGE.pack(over) + encoded(ages)
    if len(ages) == 1 and ages[0] < REMOTE:  # the usual case
        return bytes(ages)
    codes = bytearray() if ages else bytearray([NONE])
    for left, age in zip(reversed(range(len(ages))), ages, strict=True):
        codes.append(min(age, REMOTE) | (MORE if left else 0))
        if age >= REMOTE:
            codes += AGE.pack(age)
    return bytes(codes)


def decoded(codes: bytes, workers: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """Return the reads of rows and the evictions of a file.

    Args:
        codes: Bytes of all pushes; see `encoded`.
        workers: Worker of each push, shape (pushes,).

    Returns:
        Worker of each read and number of updates before it, dtype `READ_DTYPE`. And number of
        completed epochs at each eviction, by number of updates before it.
    """
    row_reads, evicted, at = list[tuple[int, int]](), dict[int, int](), 0
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
            row_reads.append((worker, push - age))
    return np.array(row_reads, READ_DTYPE), evicted


def recorder_of(job: Job, half: ServerHalf) -> Recorder | None:
    """Return the recorder of a server; None if the job keeps no record.

    If one server cannot create its file, no server records. Collective: over the servers.
    """
    if not job.config.record:
        return None
    begun = _begin_part(job) if job.cluster.is_coordinator else 0
    part = max(gather_polled(half.servers, begun, job.cluster.wait_request))
    if not part:
        return None
    server, recorder = job.cluster.roles.servers.index(job.cluster.rank), None
    if not half.server.idle:
        path, about = part_folder(job.out, part) / FILE.format(server), _about(job, part, server)
        recorder = Recorder(path, about, half.server.params, whole=server == 0)
    records = recorder is None or recorder.part > 0
    if all(gather_polled(half.servers, records, job.cluster.wait_request)):
        job.recorder = recorder
        return recorder
    if recorder is not None:
        recorder.close()
    if job.cluster.is_coordinator:
        shutil.rmtree(part_folder(job.out, part), ignore_errors=True)
    return None


def part_folder(out: Path, part: int) -> Path:
    """Return the folder of one job in a run's record."""
    return out / run_folder.RECORD / f"part-{part:04d}"


def part_numbers(out: Path) -> list[int]:
    """Return the numbers of the jobs in a run's record, oldest first."""
    names = (path.name.removeprefix("part-") for path in (out / run_folder.RECORD).glob("part-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _begin_part(job: Job) -> int:
    """Make the folder of this job's record, and return its number; 0 if that fails.

    A resumed run may delete the checkpoint that it began with. So the folder gets hard links to it.
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
    except OSError:  # a file system without hard links
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
