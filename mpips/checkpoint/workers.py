"""What is one worker's alone, in an HDF5 file beside the shard files: vectors over all parameters.

A worker's file has the form of a shard file whose range is the whole vector, and is recorded,
summed and checked like one.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpips.checkpoint.files import FORMAT, PathLike, file_sha256, worker_file, write_durably
from mpips.checkpoint.shards import ShardRecord, write_arrays


def write_worker(
    folder: PathLike, worker: int, step: int, arrays: Mapping[str, np.ndarray]
) -> ShardRecord:
    """Write one worker's vectors, durably; may run in a thread beside the training.

    Args:
        folder: What `begin_step` returned.
        worker: Number of the worker; names the file.
        step: The step of the checkpoint.
        arrays: At least one vector by name, all of one shape (n,) and dtype.

    Returns:
        The record that `commit` needs.

    Raises:
        ValueError: If there is no vector, or shapes or dtypes differ.
        UserError: If the file system refuses.

    Blocks: until the file is on the disk. Other threads run meanwhile.
    """
    kinds = {(array.shape, array.dtype) for array in arrays.values()}
    if len(kinds) != 1 or any(array.ndim != 1 for array in arrays.values()):
        raise ValueError(f"vectors of {sorted(map(str, kinds))}, expected one shape and dtype")
    (shape, _) = kinds.pop()
    attributes = {"version": FORMAT, "begin": 0, "end": shape[0], "step": step, "owner": worker}
    final = Path(folder) / worker_file(worker)
    write_durably(final, lambda path: write_arrays(path, arrays, attributes))
    return ShardRecord(worker, final.name, 0, shape[0], final.stat().st_size, file_sha256(final))
