"""Checkpoints of a running job: the writers' half and the chief's, side by side.

At a cut that all owners share, each owner copies its shard (or holds training) and goes on, and
where workers have state of their own, so does each worker with that (how asynchronous ones come to
share the cut: `mpips.cut.worker_state`). The chief makes the folder and tells who writes; a thread
of each writes the copy and the rank sends the chief its record; with the last record the chief
commits. Such a rank is idle, or has copied and waits for the folder, or writes. One checkpoint is
under way at a time. Whoever dies, a folder without an index is no checkpoint.

Who cannot write says why in place of a record. With the last answer the chief removes what the
others wrote and warns; training goes on, and a later cut is tried (`RETRY_S`).
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from mpips import checkpoint
from mpips.checkpoint import Pieces, ShardRecord
from mpips.checkpoint.files import INDEX, folder_step
from mpips.checkpoint.place import CHECKPOINTS, METRICS, Place
from mpips.cluster import words
from mpips.cluster.world import Cluster
from mpips.config.jobfile import to_toml
from mpips.errors import UserError
from mpips.kernels.vectors import all_finite
from mpips.layout import Layout, Shard
from mpips.planning.job import Job

if TYPE_CHECKING:
    from mpips.session.metrics import Log

COPY_BYTES = 4 << 20
RETRY_S = 60.0  # after a checkpoint that could not be written, where the period is longer
LAST_TRIES, LAST_PAUSE_S = 3, 1.0  # to write the last one
NOWHERE = ""  # in place of a folder that could not be made
# What a rank says of its file: None if it refuses to write it, a text if it could not.
Answer: TypeAlias = ShardRecord | str | None


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
        self._step: int | None = None
        self._taken, self._copies = False, list[np.ndarray]()
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
        """Get on with what is under way. Blocks: no."""
        if self._writing is not None:
            if self._writing.done():
                self._report(_answer(self._writing))
        elif self._taken and self._folder == NOWHERE:
            self._report("no folder")
        elif self._taken and self._folder is not None:
            step = folder_step(self._folder) if self._step is None else self._step
            assert step is not None, f"{self._folder} is no folder of a checkpoint"
            self._write(step, self._folder)

    def _write(self, step: int, folder: str) -> None:
        self._writing = self._thread.submit(self._write_file, folder, step, self._copies)
        words.tell(words.WRITING, 1)

    def _report(self, answer: Answer) -> None:
        self._step = self._folder = self._writing = None
        words.tell(words.WRITING, 0)
        self._taken, self._copies = False, []  # between checkpoints a server has its state once
        self._cluster.send(self._cluster.roles.chief, self.kind, answer)


def _answer(writing: Future[ShardRecord | None]) -> Answer:
    """Return what came of writing a file."""
    try:
        return writing.result()
    except (UserError, OSError) as error:
        return str(error)


class Saver(Snapshots):
    """Saves one owner's shard.

    Collective: no, but every owner must call `snapshot` at the same cut.

    Args:
        cluster: The job's ranks.
        shard: This owner's range.
        params: Its parameters, shape (shard.size,); refused unless they are finite.
        slots: Its slots by name.
        stall: See `Snapshots`.
        owner: Number of the owner; by default this rank's.
    """

    kind = "shard"

    def __init__(
        self,
        cluster: Cluster,
        shard: Shard,
        params: np.ndarray,
        slots: Mapping[str, np.ndarray],
        stall: bool,
        owner: int | None = None,
    ) -> None:
        super().__init__(cluster, [params, *slots.values()], stall)
        self._shard, self._names = shard, tuple(slots)
        self._owner = cluster.roles.owners.index(cluster.rank) if owner is None else owner

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
class CheckpointPlan:
    """What every checkpoint of a run holds, whatever the cut."""

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
    ) -> "CheckpointPlan":
        """Return the plan of a run.

        Args:
            job: The run.
            own: Names beside those of workers' slots.
            keepers: The ranks that save what is of those names, by default the workers.
        """
        c, ranks = job.config, job.cluster.roles.workers if keepers is None else keepers
        own = job.own_slots + own
        return cls(job.layout, c.dtype, job.slots, to_toml(c), c.keep, own, ranks)


@dataclass
class Pending:
    """A checkpoint under way.

    Attributes:
        step: Updates applied at the cut.
        state: What goes into its index beside the arrays.
        folder: Where it is written; None if that could not be made.
        keepers: The ranks that write beside the owners.
        shards: The owners' answers.
        own: Those of the keepers.
    """

    step: int
    state: dict[str, Any]
    folder: Path | None
    keepers: tuple[int, ...]
    shards: list[Answer] = field(default_factory=list)
    own: list[Answer] = field(default_factory=list)


class Committer:
    """The chief's half: makes the folder, collects the records, commits, and tells the log.

    Attributes:
        saved_step: Step of the newest checkpoint committed, or None.
        refused: Whether a rank refused to save what is not finite.
        failure: Why the last one could not be written; empty if it was.
    """

    def __init__(self, cluster: Cluster, place: Place, plan: CheckpointPlan, log: "Log") -> None:
        self._cluster, self._place, self._plan = cluster, place, plan
        self._log = log
        self._pending: Pending | None = None
        self._committing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "commit")
        self._failed_s = 0.0
        self.saved_step: int | None = None
        self.refused = False
        self.failure = ""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way anywhere."""
        return self._pending is not None

    def failed_for(self, seconds: float) -> bool:
        """Whether the last one could not be written, and that is so many seconds ago."""
        return bool(self.failure) and time.perf_counter() - self._failed_s >= seconds

    def open(self, step: int, state: dict[str, Any], own: bool = True) -> None:
        """Make the folder for `step` and tell who writes.

        Args:
            step: Updates applied at the cut.
            state: Clocks, ledger and hand-out at the cut; what JSON can say.
            own: Whether those that have state of their own save it.
        """
        folder, self.failure = None, ""
        try:
            folder = checkpoint.begin_step(self._directory(), step)
        except (UserError, OSError) as error:
            self.failure = str(error)
        keepers = self._plan.keepers if own and self._plan.own else ()
        self._pending = Pending(step, state, folder, keepers)
        place = NOWHERE if folder is None else str(folder)
        for rank in sorted({*self._cluster.roles.owners, *keepers}):
            self._cluster.send(rank, "write", place)

    def _directory(self) -> Path:
        """Return where checkpoints go; a run's folder that was removed is made anew."""
        before, out = self._place.moved, self._place.where()
        if out is None:
            self.saved_step = None
            out = self._place.make_anew()
            self._log.reopen(out / METRICS)
        if self._place.moved != before:
            self._log.warn(f"{self._place.moved}; checkpoints go to {out}")
        return out / CHECKPOINTS

    def has_saved(self, step: int) -> bool:
        """Whether the last checkpoint is that of `step`, and its folder is not removed."""
        return self.saved_step == step and self._place.where() is not None

    def collect(self, answer: Answer) -> None:
        """Take an owner's answer."""
        assert self._pending is not None, "no checkpoint is under way"
        self._pending.shards.append(answer)

    def collect_own(self, answer: Answer) -> None:
        """Take the answer for what is one rank's own."""
        assert self._pending is not None, "no checkpoint is under way"
        self._pending.own.append(answer)

    def poll(self) -> bool:
        """Get on; returns whether a checkpoint was committed just now. Blocks: no."""
        pending, committing = self._pending, self._committing
        if pending is None:
            return False
        if committing is None:
            complete = len(pending.shards) == len(self._cluster.roles.owners)
            if complete and len(pending.own) == len(pending.keepers):
                self._all_here(pending)
            return False
        if not committing.done():
            return False
        self._committing = None
        try:
            committing.result()
        except UserError as error:
            self._fail(pending, str(error))
            return False
        except OSError as error:  # of an older one: the index is there
            self._log.warn(f"an old checkpoint cannot be removed: {error}")
        self.saved_step, self._pending, self.failure = pending.step, None, ""
        words.tell(words.SAVED, pending.step)
        self._log.event("checkpoint", self.saved_step)
        return True

    def _all_here(self, pending: Pending) -> None:
        answers, c = [*pending.shards, *pending.own], self._plan
        if None in answers:
            _discard(pending)
            self.refused, self._pending = True, None
            return
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self._fail(pending, self.failure or failures[0])
            return
        shards = [r for r in pending.shards if isinstance(r, ShardRecord)]
        own = [r for r in pending.own if isinstance(r, ShardRecord)]
        assert pending.folder is not None, "its files are written"
        self._committing = self._thread.submit(
            checkpoint.commit, pending.folder, step=pending.step, layout=c.layout, dtype=c.dtype,
            shards=shards, slots=c.slots, config=c.config, state=pending.state, arrays={},
            keep=c.keep, workers=own, worker_names=c.own if own else (),
        )  # fmt: skip

    def _fail(self, pending: Pending, why: str) -> None:
        """Give up the checkpoint under way, and warn."""
        _discard(pending)
        self._log.warn(f"no checkpoint of step {pending.step}: {why}; {self.kept}")
        self.failure, self._failed_s, self._pending = why, time.perf_counter(), None

    @property
    def kept(self) -> str:
        """Which checkpoint there is, in words."""
        newest = f"the newest whole checkpoint is that of step {self.saved_step}"
        return "none is saved" if self.saved_step is None else newest


def _discard(pending: Pending) -> None:
    """Remove what was written, unless the index is there: then it is whole after all."""
    if pending.folder is not None:
        with contextlib.suppress(OSError):  # what is left is no checkpoint, and goes later
            if not (pending.folder / INDEX).exists():
                checkpoint.remove_checkpoint(pending.folder)
