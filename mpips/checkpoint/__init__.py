"""Checkpoints: an HDF5 file per shard, and an index as the commit.

To write: `begin_step` (once), `write_shard` (each owner), `write_worker` (each worker with state),
`write_rows` (each owner of table rows), then `commit` (once). To read: `newest_whole` or
`open_checkpoint`, then `Checkpoint.read_params` and `.read_slot` for any range, with any number of
shards, and `.read_worker`. This package does not use MPI.
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
