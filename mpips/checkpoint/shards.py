"""HDF5 files of shards and workers, and whole arrays over them.

A shard's file has its owner's range of the parameters and slots. A worker's file has the form of a
shard's whose range is the whole vector, and is recorded, summed and checked like one. A vector in
it may be given in pieces: the rest of it reads as zero and takes no room in the file.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint.files import (
    FORMAT,
    INDEX,
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
CHUNK_BYTES = 1 << 16  # of a vector in pieces: what has none of them is not in the file


def slot_dataset(slot: str) -> str:
    """Return the name of a slot's dataset in a shard file, and of its group in the index."""
    return f"{SLOTS}{slot}"


@dataclass(frozen=True)
class ShardRecord:
    """What the index says of one shard file.

    Attributes:
        owner: Number of the owner that wrote it.
        file: Its name, relative to the index; empty for an empty shard, which has no file.
        begin: First element in the flat vector.
        end: Last element + 1.
        bytes: Size of the file.
        sha256: Sum of the file, hexadecimal.
        base: Of rows of tables: the step of the checkpoint to whose rows of this owner they add,
            or None where they are all of them.
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
    """Write one owner's shard, durably; may run in a thread beside the training.

    Args:
        folder: What `begin_step` returned.
        owner: Number of the owner; names the file.
        shard: The range of the flat vector. An empty one writes no file.
        step: The step of the checkpoint.
        params: The shard's parameters, shape (shard.size,), dtype float32 or float64.
        slots: The optimizer's slots by name, each with the shape and dtype of `params`.

    Returns:
        The record that `commit` needs.

    Raises:
        ValueError: If shapes or dtypes differ, or the folder holds a committed checkpoint.
        UserError: If the file system refuses.

    Blocks: until the file is on the disk. Other threads run meanwhile.
    """
    folder = Path(folder)
    arrays = {PARAMS: params, **{slot_dataset(name): array for name, array in slots.items()}}
    for name, array in arrays.items():
        if array.shape != (shard.size,) or array.dtype != params.dtype:
            found = f"{name} of shape {array.shape} and dtype {array.dtype}"
            raise ValueError(f"{found}, expected ({shard.size},) and {params.dtype}")
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
    """Write a file of a checkpoint, durably; returns its record.

    Args:
        final: The file.
        owner: Whose it is.
        begin: First of its elements.
        end: Last of them + 1.
        step: The step of the checkpoint.
        fill: Writes the arrays into the open file.
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
    """Return the attributes of a file."""
    return {"version": FORMAT, "begin": begin, "end": end, "step": step, "owner": owner}


def write_pieces(dataset: "h5py.Dataset", array: np.ndarray, at: int = 0) -> None:
    """Write an array into an HDF5 dataset from row `at` on, a piece after another."""
    for begin, end in pieces(0, len(array), row_bytes(array)):
        dataset[at + begin : at + end] = array[begin:end]


def read_shard(
    folder: Path, record: ShardRecord, step: int, dataset: str, begin: int, out: np.ndarray
) -> None:
    """Fill `out` with a dataset's elements from `begin` (in the flat vector) on.

    Raises:
        UserError: If the file cannot be read or is not the one that the record describes.
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
    """Raise UserError unless an open file says of itself what its record says."""
    expected = _attributes(record.owner, record.begin, record.end, step)
    for name, value in expected.items():
        if file.attrs.get(name) != value:
            raise damaged(f"{path}: attribute {name} {file.attrs.get(name)}", str(value))


def shard_problem(folder: Path, record: ShardRecord, *, sums: bool) -> UserError | None:
    """Say what is wrong with a shard file, or None; with `sums` every byte of it is read."""
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
    """Where a missing file is under another name."""
    for other in sorted(folder.iterdir()) if folder.is_dir() else []:
        same_size = other.is_file() and other.stat().st_size == record.bytes
        if same_size and file_sha256(other) == record.sha256:
            return f" (its content is in {other.name}: rename that to {record.file})"
    return ""


def _identity(path: Path) -> str:
    """Return the attributes of a file that is not the expected one, as text."""
    try:
        with reading(path, "attributes") as file:
            a = file.attrs
            return f" (it says: owner {a['owner']}, step {a['step']}, [{a['begin']}, {a['end']}))"
    except UserError:
        return " (its HDF5 header is damaged)"


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[slice, ...]]:
    """Cut a flat range of an N-d array (C order) into boxes, in order.

    Args:
        shape: Shape of the array; () has one element.
        begin: First flat index.
        end: Last flat index + 1.

    Yields:
        For each box one slice an axis. Their flat ranges are contiguous and ascending, so that
        the box's elements in C order are the range's; at most 2 * ndim - 1 boxes.

    Example:
        >>> list(boxes((3, 4), 2, 8))
        [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None))]
    """
    if not shape and begin < end:
        yield ()
        return
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    while begin < end:
        # The outermost axis along which a whole row fits: everything inside it is whole.
        axis = next(k for k, s in enumerate(strides) if not begin % s and end - begin >= s)
        index = [begin // s % n for s, n in zip(strides, shape, strict=True)]
        rows = min((end - begin) // strides[axis], shape[axis] - index[axis])
        fixed = (slice(k, k + 1) for k in index[:axis])
        whole = (slice(0, n) for n in shape[axis + 1 :])
        yield (*fixed, slice(index[axis], index[axis] + rows), *whole)
        begin += rows * strides[axis]


def map_arrays(file: "h5py.File", source: str, contents: "Contents") -> None:
    """Add ``<source>/<name>`` for each named array, mapped over dataset `source` of the shards."""
    import h5py

    dtype, group = contents.dtype, file.require_group(source)
    sources = [h5py.VirtualSource(s.file, source, (s.size,), dtype) for s in contents.shards]
    for shape, (name, (first, last)) in zip(
        contents.layout.shapes, contents.layout.slices().items(), strict=True
    ):
        if first == last:
            group.create_dataset(name, shape, dtype)
            continue
        target = h5py.VirtualLayout(shape, dtype)
        for record, whole in zip(contents.shards, sources, strict=True):
            begin, end = max(first, record.begin), min(last, record.end)
            at = begin - record.begin
            for box in boxes(shape, begin - first, end - first):
                count = math.prod(s.stop - s.start for s in box)
                target[box] = whole[at : at + count]
                at += count
        group.create_virtual_dataset(name, target, fillvalue=np.nan)
