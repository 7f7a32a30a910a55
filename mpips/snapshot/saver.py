"""Writers of checkpoints during a run; for the coordinator see `mpips.snapshot.committer`.

Each owner of a shard copies it at the same snapshot (or stops training) and continues. Each worker
does so with state of its own; `mpips.snapshot.worker_state` says how they share the snapshot. The
coordinator makes the folder and sends its path to the writers. On each writer, a thread writes the
copy, and the rank sends the coordinator a record of the files. The coordinator commits when it has
the last record. So a writer is idle, or has a copy and waits for the folder, or writes. Only one
checkpoint is under way at a time. A folder without an index is not a checkpoint, whichever rank
dies.

A rank that cannot write sends the reason instead of a record. After the last answer, the
coordinator then removes the files and prints a warning. Training continues, and a later snapshot is
saved (`mpips.snapshot.committer.RETRY_S`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import Pieces, ShardRecord
from mpips.checkpoint.files import folder_step
from mpips.errors import UserError
from mpips.health import status_board
from mpips.kernels.vectors import all_finite
from mpips.planning.job import Job

COPY_BYTES = 4 << 20
NOWHERE = ""  # sent instead of a path if the folder could not be made
Files: TypeAlias = tuple[ShardRecord, ...]  # records of the files that a rank has written
# Answer of a writer: None if it refuses to write, a reason if it failed.
Answer: TypeAlias = Files | str | None


class ArraySaver(ABC):
    """Copies of this rank's arrays at snapshots, and the thread that writes them.

    Args:
        job: The run.
        number: Number of the shard, worker or rank that the arrays belong to.
        live: The arrays.
        stall: Whether to write the live arrays and stop training meanwhile, instead of copying.

    Attributes:
        kind: "shard" for shards, or "own" for state of workers or ranks.
        number: See Args.
        busy: Whether this rank is busy with a checkpoint.
    """

    kind: ClassVar[str]

    def __init__(self, job: Job, number: int, live: Sequence[np.ndarray], stall: bool) -> None:
        self._job, self.number, self._live, self._stall = job, number, list(live), stall
        self._step: int | None = None
        self.busy, self._copies = False, list[np.ndarray]()
        self._folder: str | None = None
        self._writing: Future[Files | None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def close(self) -> None:
        """End the thread that writes. Blocks: until the current write is done."""
        self._thread.shutdown()

    @abstractmethod
    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        """Write the arrays, in a thread; return None to refuse them."""

    @property
    def holds(self) -> bool:
        """Whether the arrays must not change now, since the live arrays are being written."""
        return self._stall and self.busy

    def snapshot(self, step: int | None = None) -> None:
        """Save the arrays as they are now. Blocks: for the copy.

        Args:
            step: Step of the checkpoint; None if this rank learns it from the folder's name.
        """
        assert not self.busy, "a checkpoint is under way"
        if self._stall:
            self._copies = self._live
        else:
            self._copies = [np.empty_like(a) for a in self._live]
            for copy, array in zip(self._copies, self._live, strict=True):
                self._copy(copy, array)
        self._step, self.busy = step, True

    def _copy(self, out: np.ndarray, array: np.ndarray) -> None:
        """Copy in blocks, and enter MPI between them, since remote reads need it."""
        step = COPY_BYTES // array.itemsize
        for begin in range(0, array.size, step):
            out[begin : begin + step] = array[begin : begin + step]
            self._job.cluster.progress()

    def write_into(self, folder: str) -> None:
        """Note the folder from the coordinator; it may come before the snapshot."""
        self._folder = folder

    def give_up(self) -> None:
        """Give up the current checkpoint: its coordinator has died."""
        self._folder = NOWHERE if self.busy else None

    def poll(self) -> None:
        """Begin to write when the folder is known; report when the write is done. Blocks: no."""
        if self._writing is not None:
            if self._writing.done():
                try:
                    answer: Answer = self._writing.result()
                except (UserError, OSError) as error:
                    answer = str(error)
                self._report(answer)
        elif self.busy and self._folder == NOWHERE:
            self._report("no folder")
        elif self.busy and self._folder is not None:
            step = folder_step(self._folder) if self._step is None else self._step
            assert step is not None, f"{self._folder} is no folder of a checkpoint"
            self._write(step, self._folder)

    def _write(self, step: int, folder: str) -> None:
        self._writing = self._thread.submit(self._write_files, folder, step, self._copies)
        status_board.report(status_board.WRITING, 1)

    def _report(self, answer: Answer) -> None:
        self._step = self._folder = self._writing = None
        status_board.report(status_board.WRITING, 0)
        self.busy, self._copies = False, []  # frees the copies
        cluster, message = self._job.cluster, ((self.kind, self.number), answer)
        cluster.send(cluster.roles.coordinator, "files", message)


class ShardSaver(ArraySaver):
    """Writer of one owner's shard.

    Collective: no, but every owner must call `snapshot` at the same snapshot.

    Args:
        job: The run.
        owned: Parameters and slots of the shard. Parameters that are not finite are refused.
        number: Number of the shard.
    """

    kind = "shard"

    def __init__(self, job: Job, owned: "Owned", number: int) -> None:
        stall = job.config.snapshot == "stall"
        super().__init__(job, number, [owned.params, *owned.slots], stall)

    def committed(self, step: int) -> None:
        """Note that the coordinator has committed the checkpoint of a step."""

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        params, *slots = arrays
        if not all_finite(params):
            return None
        named = dict(zip(self._job.slots, slots, strict=True))
        shard = self._job.shards[self.number]
        return (checkpoint.write_shard(folder, self.number, shard, step, params, named),)


class WorkerSaver(ArraySaver):
    """Writer of a worker's own state; in synchronous rounds, of a rank's.

    Collective: no, but all of them must call `snapshot` at the owners' snapshot.

    Args:
        job: The run.
        number: Number of the worker, or the rank.
        vectors: At least one vector over all parameters, by name, in pieces; it is zero outside of
            the pieces. Vectors that are not finite are refused.
        stall: See `ArraySaver`.

    Attributes:
        sound: Whether a run can resume from the state; if False, it is refused.
    """

    kind = "own"

    def __init__(self, job: Job, number: int, vectors: Mapping[str, Pieces], stall: bool) -> None:
        super().__init__(job, number, [part for v in vectors.values() for _, part in v], stall)
        self._begins = {name: [begin for begin, _ in v] for name, v in vectors.items()}
        self.sound = True

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        if not self.sound or not all(map(all_finite, arrays)):
            return None
        parts = iter(arrays)
        named = {name: [(b, next(parts)) for b in begins] for name, begins in self._begins.items()}
        args = self.number, step, named, self._job.layout.size, self._job.dtype
        return (checkpoint.write_worker(folder, *args),)


class Owned(Protocol):
    """Arrays of a shard."""

    @property
    def params(self) -> np.ndarray:
        """Parameters of the shard."""

    @property
    def slots(self) -> Sequence[np.ndarray]:
        """Slots of the shard, in the order of the job's."""


class OwnedRows(Protocol):
    """Rows of tables that belong to a shard's owner."""

    def saver(self, *saved: Any) -> ShardSaver:
        """Return the writer of a shard and its rows, from the arguments of `ShardSaver`."""


def saver_of(
    job: Job, owned: Owned, rows: OwnedRows | None, owner: int | None = None
) -> ShardSaver:
    """Return the writer of a shard and its rows of tables.

    Args:
        job: The run.
        owned: Parameters and slots of the shard.
        rows: Rows of tables; None without tables.
        owner: Number of the shard; by default this rank's.
    """
    roles, rank = job.cluster.roles, job.cluster.rank
    number = roles.owners.index(rank) if owner is None else owner
    return ShardSaver(job, owned, number) if rows is None else rows.saver(job, owned, number)
