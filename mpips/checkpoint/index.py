"""The index of a checkpoint: whole named arrays over the shard files, and everything else.

The index maps each named array by an HDF5 virtual dataset, so that
``h5py.File("index.h5")["params/w1"][:]`` is the whole array in any HDF5 tool. Its rename into
place is the commit. Its first 512 bytes, which HDF5 leaves to the user, hold the sum of the rest.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint.files import (
    FORMAT,
    INDEX,
    PathLike,
    create_h5,
    damaged,
    file_sha256,
    prune,
    reading,
    write_durably,
)
from mpips.checkpoint.shards import PARAMS, ShardRecord, shard_problem, slot_dataset
from mpips.errors import UserError
from mpips.layout import Layout

if TYPE_CHECKING:
    import h5py

SEAL_BYTES = 512


@dataclass(frozen=True)
class Contents:
    """Everything that an index holds, except the arrays that the shard files hold.

    Attributes:
        step: The step of the checkpoint.
        layout: Names and shapes of the parameters.
        dtype: Of the parameters and of the slots.
        slot_names: Names of the optimizer's slots.
        shards: The shard files, in the order of their ranges, without empty ones.
        config: The configuration, TOML text.
        state: Anything that JSON can say; opaque here.
        arrays: Small named arrays; opaque here.
        workers: The files of what is each worker's alone, by worker; empty where nothing is.
        worker_names: Names of the vectors in each of them.
        rows: The files of the owners' rows, by owner; empty where there are no tables.
        tables: What is known of each table, by name; what JSON can say.
    """

    step: int
    layout: Layout
    dtype: np.dtype
    slot_names: tuple[str, ...]
    shards: tuple[ShardRecord, ...]
    config: str
    state: Any
    arrays: dict[str, np.ndarray]
    workers: tuple[ShardRecord, ...] = ()
    worker_names: tuple[str, ...] = ()
    rows: tuple[ShardRecord, ...] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def files(self) -> tuple[ShardRecord, ...]:
        """All files beside the index."""
        return self.shards + self.workers + self.rows


def commit(
    folder: PathLike,
    *,
    step: int,
    layout: Layout,
    dtype: np.dtype | str,
    shards: Sequence[ShardRecord],
    slots: Sequence[str],
    config: str,
    state: Any,
    arrays: Mapping[str, np.ndarray],
    keep: int,
    workers: Sequence[ShardRecord] = (),
    worker_names: Sequence[str] = (),
    spared: Collection[int] = (),
    rows: Sequence[ShardRecord] = (),
    tables: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Make the shard files in `folder` a checkpoint, and remove old ones.

    Called once, after every `write_shard` and `write_worker` has returned. All that an index holds
    is given here, by name.

    Args:
        folder: What `begin_step` returned.
        step: The step of the checkpoint.
        layout: The layout of the flat vector that the shards cover.
        dtype: float32 or float64, of the parameters and slots.
        shards: The records of all owners, in any order.
        slots: Names of the slots in every shard file.
        config: The configuration as TOML text.
        state: What JSON can say (keys of objects come back as strings).
        arrays: Small named arrays of any numeric dtype.
        keep: How many whole checkpoints remain, this one included; at least 1.
        workers: The records of all workers' `write_worker`, in any order; none where they have
            nothing of their own.
        worker_names: Names of the vectors in each of their files.
        spared: Steps of older ones that remain beside these.
        rows: The records of all owners' `write_rows`, in any order; none without tables.
        tables: What is known of each table, by name; what JSON can say.

    Raises:
        ValueError: If the shards do not cover the layout exactly, a worker is missing, or
            ``keep < 1``.
        UserError: If a shard file is not there, a name cannot be that of an HDF5 dataset, or the
            file system refuses.

    Blocks: until the index is on the disk.
    """
    folder = Path(folder)
    held = tuple(sorted((s for s in shards if s.size), key=lambda s: s.begin))
    if keep < 1:
        raise ValueError(f"keep {keep}, expected 1 or more")
    check_cover(held, layout.size)
    for names in (layout.names, tuple(slots), tuple(arrays), tuple(worker_names)):
        check_names(names)
    own = tuple(sorted(workers, key=lambda record: record.owner))
    if [record.owner for record in own] != list(range(len(own))):
        raise ValueError(f"files of workers {[r.owner for r in own]}, expected one of each")
    lists = tuple(sorted(rows, key=lambda record: record.owner))
    for record in held + own + lists:
        if problem := shard_problem(folder, record, sums=False):
            raise problem
    contents = Contents(
        step, layout, np.dtype(dtype), tuple(slots), held, config, state, dict(arrays),
        own, tuple(worker_names), lists, dict(tables or {}),
    )  # fmt: skip
    write_durably(folder / INDEX, lambda path: _write_index(path, contents))
    prune(folder, keep, _has_sound_index, spared)


def check_cover(shards: Sequence[ShardRecord], size: int) -> None:
    """Raise ValueError unless the ranges, in their order, are exactly ``[0, size)``."""
    edges = [0, *(s.end for s in shards)]
    if [s.begin for s in shards] != edges[:-1] or edges[-1] != size:
        ranges = ", ".join(f"[{s.begin}, {s.end})" for s in shards) or "none"
        raise ValueError(f"shards {ranges}, expected contiguous ranges that cover [0, {size})")


def check_names(names: Sequence[str]) -> None:
    """Raise UserError unless all names can be those of datasets in one HDF5 group.

    A slash makes a group (``layer1/w``), so no name may be another's group.
    """
    taken = {"/".join(n.split("/")[:k]) for n in names for k in range(1, n.count("/") + 1)}
    for name in names:
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise UserError(f"array name {name!r}", "parts that are neither empty nor dots")
        if name in taken or list(names).count(name) > 1:
            raise UserError(f"array name {name!r}", "a name that is not another's or its group")


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


def _write_index(path: Path, contents: Contents) -> None:
    with create_h5(path, SEAL_BYTES) as file:
        file.attrs["version"] = FORMAT
        file.attrs["step"] = contents.step
        file.attrs["dtype"] = contents.dtype.name
        texts = {
            "layout": json.dumps(contents.layout.to_json()),
            "slots": json.dumps(contents.slot_names),
            "shards": json.dumps([s.to_json() for s in contents.shards]),
            "config": contents.config,
            "state": json.dumps(contents.state),
            "workers": json.dumps([w.to_json() for w in contents.workers]),
            "worker_names": json.dumps(contents.worker_names),
            "rows": json.dumps([r.to_json() for r in contents.rows]),
            "tables": json.dumps(contents.tables),
        }
        for name, text in texts.items():
            # Datasets, because an attribute holds 64 KB at most.
            file[f"meta/{name}"] = text
        arrays = file.create_group("arrays")
        for name, array in contents.arrays.items():
            arrays[name] = array
        for source in [PARAMS, *map(slot_dataset, contents.slot_names)]:
            _map_arrays(file, source, contents)
    with open(path, "r+b") as raw:
        raw.write(seal(path))


def seal(path: Path) -> bytes:
    """The first bytes of an index, made of the rest: a line of text each for format and sum."""
    text = f"mpips checkpoint {FORMAT}\nsha256 {file_sha256(path, SEAL_BYTES)}\n"
    return text.encode().ljust(SEAL_BYTES, b"\0")


def _map_arrays(file: "h5py.File", source: str, contents: Contents) -> None:
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


def read_index(folder: Path) -> Contents:
    """Read and check an index, down to the last bit; shard files are not looked at.

    Raises:
        UserError: If it is missing, damaged, of another format or of another folder.
    """
    path = folder / INDEX
    try:
        with open(path, "rb") as raw:
            found = raw.read(SEAL_BYTES)
        expected = seal(path)
    except FileNotFoundError:
        problem = f"{folder}: no {INDEX}, so it was never committed"
        raise damaged(problem, "a checkpoint") from None
    except OSError as error:
        raise damaged(f"{path}: cannot be read: {error}", "an index of a checkpoint") from None
    if found != expected:
        raise damaged(f"{path}: seal {_line(found)}", _line(expected))
    with reading(path, "the index") as file:
        return _parse_index(file)


def _line(block: bytes) -> str:
    """A seal as one printable line; of a damaged one, the beginning."""
    text = block.rstrip(b"\0").decode("ascii", "backslashreplace")
    return repr(" ".join(text.split())[:100])


def _parse_index(file: "h5py.File") -> Contents:
    import h5py

    def text(name: str, missing: str | None = None) -> str:
        if missing is not None and f"meta/{name}" not in file:
            return missing  # an index of before there was such a thing
        return file[f"meta/{name}"].asstr()[()]

    arrays: dict[str, np.ndarray] = {}

    def collect(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = np.asarray(item[()])

    file["arrays"].visititems(collect)
    return Contents(
        step=int(file.attrs["step"]),
        layout=Layout.from_json(json.loads(text("layout"))),
        dtype=np.dtype(file.attrs["dtype"]),
        slot_names=tuple(json.loads(text("slots"))),
        shards=tuple(ShardRecord(**item) for item in json.loads(text("shards"))),
        config=text("config"),
        state=json.loads(text("state")),
        arrays=arrays,
        workers=tuple(ShardRecord(**item) for item in json.loads(text("workers", "[]"))),
        worker_names=tuple(json.loads(text("worker_names", "[]"))),
        rows=tuple(ShardRecord(**item) for item in json.loads(text("rows", "[]"))),
        tables=json.loads(text("tables", "{}")),
    )


def _has_sound_index(folder: Path) -> bool:
    """Whether the index is whole and its shard files are there with their sizes."""
    try:
        contents = read_index(folder)
    except UserError:
        return False
    return not any(shard_problem(folder, s, sums=False) for s in contents.files)
