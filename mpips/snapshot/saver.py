"""Checkpoints of a running job: the writers' half; the coordinator's is `mpips.snapshot.committer`.

At a snapshot that all owners share, each owner copies its shard (or holds training) and goes on, as
each worker does with state of its own (how these share the snapshot:
`mpips.snapshot.worker_state`). The coordinator makes the folder and tells who writes; a thread of
each writes the copy and the rank sends the coordinator its record; with the last record the
coordinator commits. Such a rank is idle, or has copied and waits for the folder, or writes. One
checkpoint is under way at a time. Whoever dies, a folder without an index is no checkpoint.

Who cannot write says why in place of a record. With the last answer the coordinator removes what
the others wrote and warns; training goes on, and a later snapshot is tried
(`mpips.snapshot.committer.RETRY_S`).
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
NOWHERE = ""  # in place of a folder that could not be made
Files: TypeAlias = tuple[ShardRecord, ...]  # what a rank has written
# What it says of them: None if it refuses to write them, a text if it could not.
Answer: TypeAlias = Files | str | None


class Snapshots(ABC):
    """Saves this rank's arrays at snapshots: copies them, and writes the copies in a thread.

    Args:
        job: The run.
        number: Of the shard, worker or rank whose arrays they are.
        live: The arrays.
        stall: Write from the live arrays and hold training meanwhile, instead of copying.
    """

    kind: ClassVar[str]  # of what is saved: "shard" or "own"

    def __init__(self, job: Job, number: int, live: Sequence[np.ndarray], stall: bool) -> None:
        self._job, self.number, self._live, self._stall = job, number, list(live), stall
        self._step: int | None = None
        self._taken, self._copies = False, list[np.ndarray]()
        self._folder: str | None = None
        self._writing: Future[Files | None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def close(self) -> None:
        """End the thread that writes. Blocks: until what it writes is written."""
        self._thread.shutdown()

    @abstractmethod
    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        """Write the arrays, in a thread; None if they are refused."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way here."""
        return self._taken

    @property
    def holds(self) -> bool:
        """Whether the shard must not change now, because the live arrays are being written."""
        return self._stall and self.busy

    def snapshot(self, step: int | None = None) -> None:
        """Keep the arrays as they are now. Blocks: for a copy.

        Args:
            step: Of the checkpoint; None where only its folder will say that.
        """
        assert not self.busy, "a checkpoint is under way"
        if self._stall:
            self._copies = self._live
        else:
            self._copies = [np.empty_like(a) for a in self._live]
            for copy, array in zip(self._copies, self._live, strict=True):
                self._copy(copy, array)
        self._step, self._taken = step, True

    def _copy(self, out: np.ndarray, array: np.ndarray) -> None:
        """Copy in blocks: remote reads wait for a server that stays out of MPI."""
        step = COPY_BYTES // array.itemsize
        for begin in range(0, array.size, step):
            out[begin : begin + step] = array[begin : begin + step]
            self._job.cluster.progress()

    def write_into(self, folder: str) -> None:
        """Learn the folder from the coordinator, perhaps before the snapshot."""
        self._folder = folder

    def give_up(self) -> None:
        """Give up the checkpoint under way: its coordinator has died."""
        self._folder = NOWHERE if self._taken else None

    def poll(self) -> None:
        """Get on with what is under way. Blocks: no."""
        if self._writing is not None:
            if self._writing.done():
                try:
                    answer: Answer = self._writing.result()
                except (UserError, OSError) as error:
                    answer = str(error)
                self._report(answer)
        elif self._taken and self._folder == NOWHERE:
            self._report("no folder")
        elif self._taken and self._folder is not None:
            step = folder_step(self._folder) if self._step is None else self._step
            assert step is not None, f"{self._folder} is no folder of a checkpoint"
            self._write(step, self._folder)

    def _write(self, step: int, folder: str) -> None:
        self._writing = self._thread.submit(self._write_files, folder, step, self._copies)
        status_board.report(status_board.WRITING, 1)

    def _report(self, answer: Answer) -> None:
        self._step = self._folder = self._writing = None
        status_board.report(status_board.WRITING, 0)
        self._taken, self._copies = False, []  # between checkpoints a server has its state once
        cluster, said = self._job.cluster, ((self.kind, self.number), answer)
        cluster.send(cluster.roles.coordinator, "files", said)


class Saver(Snapshots):
    """Saves one owner's shard.

    Collective: no, but every owner must call `snapshot` at the same snapshot.

    Args:
        job: The run.
        owned: Has the parameters, refused unless they are finite, and the slots.
        number: Of the shard.
    """

    kind = "shard"

    def __init__(self, job: Job, owned: "Owned", number: int) -> None:
        stall = job.config.snapshot == "stall"
        super().__init__(job, number, [owned.params, *owned.slots], stall)

    def committed(self, step: int) -> None:
        """Learn from the coordinator that the checkpoint of a step is committed."""

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        params, *slots = arrays
        if not all_finite(params):
            return None
        named = dict(zip(self._job.slots, slots, strict=True))
        shard = self._job.shards[self.number]
        return (checkpoint.write_shard(folder, self.number, shard, step, params, named),)


class WorkerSaver(Snapshots):
    """Saves what is one worker's alone, or in synchronous rounds one rank's.

    Collective: no, but every one of them must call `snapshot` at the snapshot of the owners.

    Args:
        job: The run.
        number: Of the worker, or the rank.
        vectors: At least one vector over all parameters by name, each in pieces, and zero where no
            piece is; refused unless they are finite.
        stall: See `Snapshots`.
    """

    kind = "own"

    def __init__(self, job: Job, number: int, vectors: Mapping[str, Pieces], stall: bool) -> None:
        super().__init__(job, number, [part for v in vectors.values() for _, part in v], stall)
        self._begins = {name: [begin for begin, _ in v] for name, v in vectors.items()}
        self.sound = True  # else what is copied is no state to go on from, and is refused

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        if not self.sound or not all(map(all_finite, arrays)):
            return None
        parts = iter(arrays)
        named = {name: [(b, next(parts)) for b in begins] for name, begins in self._begins.items()}
        args = self.number, step, named, self._job.layout.size, self._job.dtype
        return (checkpoint.write_worker(folder, *args),)


class Owned(Protocol):
    """What an owner has of a shard."""

    @property
    def params(self) -> np.ndarray:
        """Its parameters."""

    @property
    def slots(self) -> Sequence[np.ndarray]:
        """Its slots, in the order of the job's."""


class OwnedRows(Protocol):
    """Rows of tables beside a shard."""

    def saver(self, *saved: Any) -> Saver:
        """Return what saves both, of what `Saver` is given."""


def saver_of(job: Job, owned: Owned, rows: OwnedRows | None, owner: int | None = None) -> Saver:
    """Return what saves a shard, and its rows of tables.

    Args:
        job: The run.
        owned: Has the shard's parameters and slots.
        rows: Its rows, if there are any.
        owner: Number of the shard; by default this rank's.
    """
    roles, rank = job.cluster.roles, job.cluster.rank
    number = roles.owners.index(rank) if owner is None else owner
    return Saver(job, owned, number) if rows is None else rows.saver(job, owned, number)
