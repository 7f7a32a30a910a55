"""Checkpoints: an HDF5 file per shard, and an index as the commit.

Writing: `begin_step` (once), `write_shard` (each owner), `write_worker` (each worker that has
state of its own), `commit` (once, after all of them). Reading: `newest_whole` or
`open_checkpoint`, then `Checkpoint.read_params` and `.read_slot` for any range, whatever the
number of shards was, and `.read_worker`. Nothing here knows MPI.
"""

from mpips.checkpoint.files import begin_step, list_checkpoints, remove_checkpoint
from mpips.checkpoint.index import Contents, commit
from mpips.checkpoint.reader import Checkpoint, need_whole, newest_whole, open_checkpoint, verify
from mpips.checkpoint.rows import Ordered, RowSource, TableRows, write_rows
from mpips.checkpoint.shards import Pieces, ShardRecord, boxes, write_shard, write_worker

__all__ = [
    "Checkpoint", "Contents", "Ordered", "Pieces", "RowSource", "ShardRecord", "TableRows",
    "begin_step", "boxes", "commit", "list_checkpoints", "need_whole", "newest_whole",
    "open_checkpoint", "remove_checkpoint", "verify", "write_rows", "write_shard", "write_worker",
]  # fmt: skip
