"""Checkpoints of an owner that has rows of tables beside its shard."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips import checkpoint
from mpips.planning.job import Job
from mpips.snapshot.saver import Answer, Files, ShardSaver

if TYPE_CHECKING:
    from mpips.tables.server import ServedTable, SnapshotTable

MOST_LINKS = 16  # longest chain of checkpoints, whose files a resume reads and checks


class NotFiniteError(Exception):
    """A row of a snapshot is not finite."""


class TableSaver(ShardSaver):
    """Saves an owner's shard and the changed rows of its tables.

    The rows are copied from the live table into the file, a piece at a time, while training
    continues; with ``stall`` training waits. With ``--checkpoint-rows changed`` a checkpoint
    contains the rows changed since the previous one, and adds to its rows. It contains all touched
    rows in four cases: first in a run, after a checkpoint that was not committed, after an
    eviction, and before a chain of checkpoints has more than `MOST_LINKS` links or more rows than
    are touched.

    Args:
        tables: Tables of the owner. Changes of their rows are marked from now on, by that option.
        job: The run.
        saved: Other arguments of `ShardSaver`.
    """

    def __init__(self, tables: "Sequence[ServedTable]", job: Job, *saved: Any) -> None:
        super().__init__(job, *saved)
        self._tables = tables
        self._adds = job.config.checkpoint_rows == "changed"
        if self._adds:
            for served in tables:
                served.shard.begin_marking()
        self._rows: dict[str, SnapshotTable] = {}
        self._base: int | None = None  # step of the last checkpoint, once it is committed
        self._last: int | None = None  # step of the last checkpoint that this owner took part in
        self._links = self._added = 0  # links of the chain so far, and their rows
        self._adds_to: int | None = None  # step of the checkpoint that the present one adds to

    def snapshot(self, step: int | None = None) -> None:
        """See `ArraySaver.snapshot`."""
        super().snapshot(step)
        self._adds_to, self._base, self._last = self._next_base(step), None, step
        since = self._adds_to is not None
        self._rows = {served.table.name: served.snapshot(since) for served in self._tables}
        if not since:
            self._links = self._added = 0
        else:
            self._links += 1
            self._added += sum(table.count for table in self._rows.values())

    def _next_base(self, step: int | None) -> int | None:
        """Return the step of the checkpoint to add to; None to save all rows."""
        base, shards = self._base, [served.shard for served in self._tables]
        if not self._adds or base is None or step is None or step <= base:
            return None
        if any(shard.ages and shard.ages.shrunk for shard in shards):
            return None
        marked, touched = sum(s.marked for s in shards), sum(s.touched for s in shards)
        long = self._links == MOST_LINKS or self._added + marked >= touched
        return None if long and touched else base

    def committed(self, step: int) -> None:
        """Note that the checkpoint of a step is committed: the next one may add to it."""
        if step == self._last:  # else the checkpoint is from before this shard was taken over
            self._base = step

    def _write_files(self, folder: str, step: int, arrays: list[np.ndarray]) -> Files | None:
        try:  # rows first: until they are written, changing rows are queued in memory
            record = checkpoint.write_rows(folder, self.number, step, self._rows, self._adds_to)
        except NotFiniteError:
            return None
        written = super()._write_files(folder, step, arrays)
        return None if written is None else (*written, record)

    def _report(self, answer: Answer) -> None:
        for rows in self._rows.values():
            rows.close()
        self._rows = {}
        super()._report(answer)
