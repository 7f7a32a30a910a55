"""Checkpoints of a running job: the writers' half and the chief's, side by side.

At a cut that all owners share, each owner copies its shard (or holds training) and goes on, and
where workers have state of their own, so does each worker with that (how asynchronous ones come
to share the cut: `mpips.worker_state`). The chief makes the folder and tells who writes; a thread
of each writes the copy and the rank sends the chief its record; with the last record the chief
commits. Such a rank is idle, or has copied and waits for the folder, or writes. One checkpoint is
under way at a time. Whoever dies, a folder without an index is no checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import Pieces, ShardRecord
from mpips.checkpoint.files import folder_step
from mpips.cluster import Cluster
from mpips.job import Job
from mpips.jobfile import to_toml
from mpips.kernels import all_finite
from mpips.layout import Layout, Shard

COPY_BYTES = 4 << 20


class Snapshots(ABC):
    """Saves this rank's arrays at cuts: copies them, and writes the copies in a thread.

    Args:
        cluster: The job's ranks.
        live: The arrays.
        stall: Write from the live arrays and hold training meanwhile, instead of copying.
    """

    kind: ClassVar[str]  # of the message with the record

    def __init__(self, cluster: Cluster, live: Sequence[np.ndarray], stall: bool) -> None:
        self._cluster, self._live, self._stall = cluster, list(live), stall
        self._copies: list[np.ndarray] = []
        self._step: int | None = None
        self._taken = False
        self._folder: str | None = None
        self._writing: Future[ShardRecord | None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    @abstractmethod
    def _write_file(self, folder: str, step: int, arrays: list[np.ndarray]) -> ShardRecord | None:
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
        """Copy in blocks: far reads wait for a server that stays out of MPI."""
        step = COPY_BYTES // array.itemsize
        for begin in range(0, array.size, step):
            out[begin : begin + step] = array[begin : begin + step]
            self._cluster.progress()

    def write_into(self, folder: str) -> None:
        """Learn the folder from the chief, perhaps before the snapshot."""
        self._folder = folder

    def poll(self) -> None:
        """Get on with what is under way. Blocks: no.

        Raises:
            UserError: If the file cannot be written.
        """
        if self._writing is not None:
            if self._writing.done():
                self._report(self._writing.result())
        elif self._taken and self._folder is not None:
            step = folder_step(self._folder) if self._step is None else self._step
            assert step is not None, f"{self._folder} is no folder of a checkpoint"
            self._write(step, self._folder)

    def _write(self, step: int, folder: str) -> None:
        self._writing = self._thread.submit(self._write_file, folder, step, self._copies)

    def _report(self, record: ShardRecord | None) -> None:
        self._step = self._folder = self._writing = None
        self._taken = False
        self._copies = []  # given back: between checkpoints a server holds its state once
        self._cluster.send(self._cluster.roles.chief, self.kind, record)


class Saver(Snapshots):
    """Saves one owner's shard.

    Collective: no, but every owner must call `snapshot` at the same cut.

    Args:
        cluster: The job's ranks.
        shard: This owner's range.
        params: Its parameters, shape (shard.size,); refused unless they are finite.
        slots: Its slots by name.
        stall: See `Snapshots`.
    """

    kind = "shard"

    def __init__(
        self,
        cluster: Cluster,
        shard: Shard,
        params: np.ndarray,
        slots: Mapping[str, np.ndarray],
        stall: bool,
    ) -> None:
        super().__init__(cluster, [params, *slots.values()], stall)
        self._shard, self._names = shard, tuple(slots)
        self._owner = cluster.roles.owners.index(cluster.rank)

    def _write_file(self, folder: str, step: int, arrays: list[np.ndarray]) -> ShardRecord | None:
        params, *slots = arrays
        if not all_finite(params):
            return None
        named = dict(zip(self._names, slots, strict=True))
        return checkpoint.write_shard(folder, self._owner, self._shard, step, params, named)


class WorkerSaver(Snapshots):
    """Saves what is one worker's alone, or in synchronous rounds one rank's.

    Collective: no, but every one of them must call `snapshot` at the cut of the owners.

    Args:
        cluster: The job's ranks.
        number: Of the worker, or the rank.
        vectors: At least one vector over all parameters by name, each in pieces of dtype `dtype`,
            and zero where no piece is; refused unless they are finite.
        size: Number of parameters.
        dtype: Of the pieces.
        stall: See `Snapshots`.
    """

    kind = "own"

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        vectors: Mapping[str, Pieces],
        size: int,
        dtype: np.dtype,
        stall: bool,
    ) -> None:
        super().__init__(cluster, [part for v in vectors.values() for _, part in v], stall)
        self._begins = {name: [begin for begin, _ in v] for name, v in vectors.items()}
        self._size, self._dtype = size, dtype
        self._number = number
        self.sound = True  # else what is copied is no state to go on from, and is refused

    def _write_file(self, folder: str, step: int, arrays: list[np.ndarray]) -> ShardRecord | None:
        if not self.sound or not all(map(all_finite, arrays)):
            return None
        parts = iter(arrays)
        named = {name: [(b, next(parts)) for b in begins] for name, begins in self._begins.items()}
        args = self._number, step, named, self._size, self._dtype
        return checkpoint.write_worker(folder, *args)


@dataclass
class Contents:
    """What goes into every index, whatever the cut."""

    layout: Layout
    dtype: str
    slots: tuple[str, ...]
    config: str
    keep: int
    own: tuple[str, ...] = ()  # names of what is each worker's alone
    keepers: tuple[int, ...] = ()  # the ranks that save it

    @classmethod
    def of(
        cls, job: Job, own: tuple[str, ...] = (), keepers: tuple[int, ...] | None = None
    ) -> "Contents":
        """Return the contents for a run.

        Args:
            job: The run.
            own: Names beside those of workers' slots.
            keepers: The ranks that save what is of those names, by default the workers.
        """
        c, ranks = job.config, job.cluster.roles.workers if keepers is None else keepers
        own = job.own_slots + own
        return cls(job.layout, c.dtype, job.slots, to_toml(c), c.keep, own, ranks)


class Committer:
    """The chief's half: makes the folder, collects the records, commits.

    Attributes:
        saved_step: Step of the newest checkpoint committed, or None.
        refused: Whether a rank refused to save what is not finite.
    """

    def __init__(self, cluster: Cluster, directory: Path, contents: Contents) -> None:
        self._cluster, self._directory, self._contents = cluster, directory, contents
        self._step: int | None = None
        self._folder = directory
        self._state: dict[str, Any] = {}
        self._records: list[ShardRecord | None] = []
        self._own: list[ShardRecord | None] = []
        self._keepers: tuple[int, ...] = ()  # those that write beside the owners
        self._committing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "commit")
        self.saved_step: int | None = None
        self.refused = False

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way anywhere."""
        return self._step is not None

    def open(self, step: int, state: dict[str, Any], own: bool = True) -> None:
        """Make the folder for `step` and tell who writes.

        Args:
            step: Updates applied at the cut.
            state: Clocks, ledger and hand-out at the cut; what JSON can say.
            own: Whether those that have state of their own save it.

        Raises:
            UserError: If the folder cannot be made.
        """
        self._step, self._state, self._records, self._own = step, state, [], []
        self._folder = checkpoint.begin_step(self._directory, step)
        self._keepers = self._contents.keepers if own and self._contents.own else ()
        for rank in sorted({*self._cluster.roles.owners, *self._keepers}):
            self._cluster.send(rank, "write", str(self._folder))

    def collect(self, record: ShardRecord | None) -> None:
        """Take an owner's record; None if it refused."""
        self._records.append(record)

    def collect_own(self, record: ShardRecord | None) -> None:
        """Take a record of what is one rank's own; None if it refused."""
        self._own.append(record)

    def poll(self) -> bool:
        """Get on; returns whether a checkpoint was committed just now. Blocks: no.

        Raises:
            UserError: If the index cannot be written.
        """
        if self._committing is None:
            complete = len(self._records) == len(self._cluster.roles.owners)
            complete = complete and len(self._own) == len(self._keepers)
            if self._step is not None and complete:
                self._all_here(self._step)
            return False
        if not self._committing.done():
            return False
        self._committing.result()
        self.saved_step, self._step, self._committing = self._step, None, None
        return True

    def _all_here(self, step: int) -> None:
        records = [r for r in self._records if r is not None]
        own = [r for r in self._own if r is not None]
        if len(records) + len(own) < len(self._records) + len(self._own):
            checkpoint.remove_checkpoint(self._folder)
            self.refused, self._step = True, None
            return
        c = self._contents
        self._committing = self._thread.submit(
            checkpoint.commit, self._folder, step=step, layout=c.layout, dtype=c.dtype,
            shards=records, slots=c.slots, config=c.config, state=self._state, arrays={},
            keep=c.keep, workers=own, worker_names=c.own if own else (),
        )  # fmt: skip
