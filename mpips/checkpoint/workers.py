"""HDF5 file of one worker's own vectors.

A worker's file has the form of a shard file whose range is the whole vector, and is recorded,
summed and checked like one. A vector may be given in pieces: the rest of it reads as zero and
takes no room in the file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpips.checkpoint.files import PathLike, worker_file
from mpips.checkpoint.shards import ShardRecord, write_file, write_pieces

if TYPE_CHECKING:
    import h5py

Pieces = Sequence[tuple[int, np.ndarray]]  # (begin in the flat vector, elements)
CHUNK_BYTES = 1 << 16  # of a vector in pieces: what has none of them is not in the file


def write_worker(
    folder: PathLike,
    worker: int,
    step: int,
    vectors: Mapping[str, Pieces],
    size: int,
    dtype: np.typing.DTypeLike,
) -> ShardRecord:
    """Write one worker's vectors, durably; may run in a thread beside the training.

    Args:
        folder: What `begin_step` returned.
        worker: Number of the worker; names the file.
        step: The step of the checkpoint.
        vectors: At least one vector by name, in pieces that do not overlap; zero elsewhere.
        size: Elements of each whole vector.
        dtype: Of all pieces.

    Returns:
        The record that `commit` needs.

    Raises:
        ValueError: If there is no vector, or a piece is outside or of another shape or dtype.
        UserError: If the file system refuses.

    Blocks: until the file is on the disk. Other threads run meanwhile.
    """
    if not vectors:
        raise ValueError("no vector, expected at least one")
    for name, parts in vectors.items():
        for begin, part in parts:
            inside = part.ndim == 1 and 0 <= begin <= begin + part.size <= size
            if not inside or part.dtype != np.dtype(dtype):
                found = f"{name} from {begin} on of shape {part.shape} and dtype {part.dtype}"
                raise ValueError(f"{found}, expected within ({size},) and {np.dtype(dtype)}")

    def fill(file: "h5py.File") -> None:
        for name, parts in vectors.items():
            whole = sum(part.size for _, part in parts) == size
            chunks = None if whole else (min(size, CHUNK_BYTES // np.dtype(dtype).itemsize),)
            dataset = file.create_dataset(name, (size,), dtype, chunks=chunks, fillvalue=0)
            for begin, part in parts:
                write_pieces(dataset, part, begin)

    return write_file(Path(folder) / worker_file(worker), worker, 0, size, step, fill)
