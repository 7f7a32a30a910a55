"""HDF5 files of shards and workers, and whole arrays over them.

A shard file has its owner's range of the parameters and slots. A worker file has the same format,
record and checksum, and its range is the whole vector. A worker may write a vector in pieces. The
rest of the vector reads as zero and takes no space in the file.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint.files import (
    FORMAT,
    INDEX,
    OWN_FILE,
    PathLike,
    create_h5,
    damaged,
    file_of,
    file_sha256,
    item,
    pieces,
    reading,
    row_bytes,
    write_durably,
)
from mpips.errors import UserError
from mpips.layout import Shard

if TYPE_CHECKING:
    import h5py

    from mpips.checkpoint.index import Contents

PARAMS, SLOTS = "params", "slots/"
Pieces = Sequence[tuple[int, np.ndarray]]  # (begin in the flat vector, elements)
CHUNK_BYTES = 1 << 16  # chunk of a vector in pieces; chunks without a piece are not stored


def slot_dataset(slot: str) -> str:
    """Return the name of a slot's dataset in a shard file, and of its group in the index."""
    return f"{SLOTS}{slot}"


@dataclass(frozen=True)
class ShardRecord:
    """Record of one shard file in the index.

    Attributes:
        owner: Number of the owner that wrote the file.
        file: Name of the file in the index's folder; empty for an empty shard, which has no file.
        begin: First element in the flat vector.
        end: Last element + 1.
        bytes: Size of the file.
        sha256: SHA-256 of the file, hexadecimal.
        base: For an incremental file of table rows, the step of the checkpoint that has the
            owner's earlier rows. Otherwise None.
    """

    owner: int
    file: str
    begin: int
    end: int
    bytes: int
    sha256: str
    base: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def write_shard(
    folder: PathLike,
    owner: int,
    shard: Shard,
    step: int,
    params: np.ndarray,
    slots: Mapping[str, np.ndarray],
) -> ShardRecord:
    """Write one owner's shard durably. Training may continue in another thread.

    Args:
        folder: Folder that `begin_step` returned.
        owner: Number of the owner, which is in the file's name.
        shard: Range of the flat vector. For an empty one no file is written.
        step: Step of the checkpoint.
        params: The shard's parameters, shape (shard.size,), dtype float32 or float64.
        slots: The optimizer's slots by name, each with the shape and dtype of `params`.

    Returns:
        The record that `commit` needs.

    Raises:
        ValueError: If the folder has a committed checkpoint.
        UserError: If the file system refuses.

    Blocks: until the file is on disk. Other threads run meanwhile.
    """
    folder = Path(folder)
    arrays = {PARAMS: params, **{slot_dataset(name): array for name, array in slots.items()}}
    fits = (a.shape == (shard.size,) and a.dtype == params.dtype for a in arrays.values())
    assert all(fits), "arrays of another shard or dtype"
    if (folder / INDEX).exists():
        raise ValueError(f"{folder} holds a committed checkpoint, expected a folder of begin_step")
    if not shard.size:
        return ShardRecord(owner, "", shard.begin, shard.end, 0, "")

    def fill(file: "h5py.File") -> None:
        for name, array in arrays.items():
            write_pieces(file.create_dataset(name, array.shape, array.dtype), array)

    return write_file(folder / file_of("shard", owner), owner, shard.begin, shard.end, step, fill)


def write_worker(
    folder: PathLike,
    worker: int,
    step: int,
    vectors: Mapping[str, Pieces],
    size: int,
    dtype: np.typing.DTypeLike,
) -> ShardRecord:
    """Write one worker's vectors durably. Training may continue in another thread.

    Args:
        folder: Folder that `begin_step` returned.
        worker: Number of the worker, which is in the file's name.
        step: Step of the checkpoint.
        vectors: At least one vector by name, in pieces that do not overlap; zero elsewhere.
        size: Number of elements of each vector.
        dtype: Dtype of all pieces.

    Returns:
        The record that `commit` needs.

    Raises:
        UserError: If the file system refuses.

    Blocks: until the file is on disk. Other threads run meanwhile.
    """

    def fill(file: "h5py.File") -> None:
        for name, parts in vectors.items():
            whole = sum(part.size for _, part in parts) == size
            chunks = None if whole else (min(size, CHUNK_BYTES // np.dtype(dtype).itemsize),)
            dataset = file.create_dataset(name, (size,), dtype, chunks=chunks, fillvalue=0)
            for begin, part in parts:
                write_pieces(dataset, part, begin)

    return write_file(Path(folder) / file_of("worker", worker), worker, 0, size, step, fill)


def write_file(
    final: Path,
    owner: int,
    begin: int,
    end: int,
    step: int,
    fill: Callable[["h5py.File"], None],
    base: int | None = None,
) -> ShardRecord:
    """Write a file of a checkpoint durably, and return its record.

    Args:
        final: Path of the file.
        owner: Number of the owner.
        begin: First element.
        end: Last element + 1.
        step: Step of the checkpoint.
        fill: Function that writes the arrays into the open file.
        base: See `ShardRecord`.
    """

    def write(path: Path) -> None:
        with create_h5(path) as file:
            file.attrs.update(_attributes(owner, begin, end, step))
            fill(file)

    write_durably(final, write)
    return ShardRecord(
        owner, final.name, begin, end, final.stat().st_size, file_sha256(final), base
    )


def _attributes(owner: int, begin: int, end: int, step: int) -> dict[str, int]:
    """Return the HDF5 attributes of a file, which identify it."""
    return {"version": FORMAT, "begin": begin, "end": end, "step": step, "owner": owner}


def write_pieces(dataset: "h5py.Dataset", array: np.ndarray, at: int = 0) -> None:
    """Write an array into an HDF5 dataset from row `at` on, piece by piece."""
    for begin, end in pieces(0, len(array), row_bytes(array)):
        dataset[at + begin : at + end] = array[begin:end]


def read_shard(
    folder: Path, record: ShardRecord, step: int, dataset: str, begin: int, out: np.ndarray
) -> None:
    """Fill `out` with elements of a dataset, the first of them at index `begin` of the flat vector.

    Raises:
        UserError: If the file cannot be read or does not match its record.
    """
    path, first = folder / record.file, begin - record.begin
    with reading(path, dataset) as file:
        check_identity(path, file, record, step)
        source = item(file, dataset)
        if source.shape != (record.size,) or source.dtype != out.dtype:
            raise damaged(
                f"{path}: {dataset} of shape {source.shape} and dtype {source.dtype}",
                f"({record.size},) and {out.dtype}",
            )
        for a, b in pieces(0, len(out), out.itemsize):
            source.read_direct(out[a:b], np.s_[first + a : first + b])


def check_identity(path: Path, file: Any, record: ShardRecord, step: int) -> None:
    """Raise UserError unless the attributes of an open file match its record."""
    expected = _attributes(record.owner, record.begin, record.end, step)
    for name, value in expected.items():
        if file.attrs.get(name) != value:
            raise damaged(f"{path}: attribute {name} {file.attrs.get(name)}", str(value))


def shard_problem(folder: Path, record: ShardRecord, *, sums: bool) -> UserError | None:
    """Return the problem of a shard file, or None. With `sums`, read and check all its bytes."""
    path, content = folder / record.file, f"elements [{record.begin}, {record.end}) of all arrays"
    if record.file == file_of("rows", record.owner):
        content = f"{record.end:,} rows of tables"
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return damaged(f"{path}: {size} bytes for {content}", f"{record.bytes} bytes")
        found = file_sha256(path) if sums else record.sha256
    except FileNotFoundError:
        return damaged(f"{path}: missing, with {content}{_namesake(folder, record)}", "a file")
    except OSError as error:
        return damaged(f"{path}: cannot be read ({error}), with {content}", "a readable file")
    if found != record.sha256:
        return damaged(f"{path}: sha256 {found} of {content}{_identity(path)}", record.sha256)
    return None


def _namesake(folder: Path, record: ShardRecord) -> str:
    """Return a hint if a file of a name of its own has the content of a missing one."""
    for other in sorted(folder.iterdir()) if folder.is_dir() else []:
        # Others' files are not read: many may be missing, and these are large.
        renamed = not OWN_FILE.fullmatch(other.name) and other.is_file()
        if renamed and other.stat().st_size == record.bytes and file_sha256(other) == record.sha256:
            return f" (its content is in {other.name}: rename that to {record.file})"
    return ""


def _identity(path: Path) -> str:
    """Return the attributes of a wrong file as text."""
    try:
        with reading(path, "attributes") as file:
            a = file.attrs
            return f" (it says: owner {a['owner']}, step {a['step']}, [{a['begin']}, {a['end']}))"
    except UserError:
        return " (its HDF5 header is damaged)"


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[slice, ...]]:
    """Divide a flat range of an N-d array (C order) into boxes, in order.

    Args:
        shape: Shape of the array; () has one element.
        begin: First flat index.
        end: Last flat index + 1.

    Yields:
        For each box, one slice per axis. The boxes' elements in C order, box by box, are those of
        the range. There are at most 2 * ndim - 1 boxes.

    Example:
        >>> list(boxes((3, 4), 2, 8))
        [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None))]
    """
    if not shape and begin < end:
        yield ()
        return
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    while begin < end:
        # The outermost axis at which the range has a whole row; the box is whole in inner axes.
        axis = next(k for k, s in enumerate(strides) if not begin % s and end - begin >= s)
        index = [begin // s % n for s, n in zip(strides, shape, strict=True)]
        rows = min((end - begin) // strides[axis], shape[axis] - index[axis])
        fixed = (slice(k, k + 1) for k in index[:axis])
        whole = (slice(0, n) for n in shape[axis + 1 :])
        yield (*fixed, slice(index[axis], index[axis] + rows), *whole)
        begin += rows * strides[axis]


def map_arrays(file: "h5py.File", source: str, contents: "Contents") -> None:
    """Add virtual datasets ``<source>/<name>`` to an index, one for each named array.

    Each maps the parts of its array in the datasets `source` of the shard files.
    """
    import h5py

    dtype, group = contents.dtype, file.require_group(source)
    begins = [record.begin for record in contents.shards]
    sources = [h5py.VirtualSource(s.file, source, (s.size,), dtype) for s in contents.shards]
    for shape, (name, (first, last)) in zip(
        contents.layout.shapes, contents.layout.slices().items(), strict=True
    ):
        if first == last:
            group.create_dataset(name, shape, dtype)
            continue
        target = h5py.VirtualLayout(shape, dtype)
        for k in range(bisect_right(begins, first) - 1, bisect_left(begins, last)):
            record, whole = contents.shards[k], sources[k]
            begin, end = max(first, record.begin), min(last, record.end)
            at = begin - record.begin
            for box in boxes(shape, begin - first, end - first):
                count = math.prod(s.stop - s.start for s in box)
                target[box] = whole[at : at + count]
                at += count
        group.create_virtual_dataset(name, target, fillvalue=np.nan)
