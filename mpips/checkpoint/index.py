"""Checkpoint index: named arrays over the shard files, and all metadata.

The index maps each named array by an HDF5 virtual dataset. So
``h5py.File("index.h5")["params/w1"][:]`` is the whole array in any HDF5 tool. The rename of the
index into place is the commit. Its first 512 bytes, HDF5's user block, have the SHA-256 of the
rest.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.checkpoint.files import (
    FORMAT,
    INDEX,
    OWN_FILE,
    OtherFormatError,
    PathLike,
    create_h5,
    damaged,
    file_sha256,
    item,
    prune,
    reading,
    step_folder,
    write_durably,
)
from mpips.checkpoint.shards import PARAMS, ShardRecord, map_arrays, shard_problem, slot_dataset
from mpips.errors import UserError
from mpips.layout import Layout, check_names

if TYPE_CHECKING:
    import h5py

SEAL_BYTES = 512
SEALED = re.compile(rb"mpips checkpoint (\d{1,9})\nsha256 ")
IN_JSON = (  # fields of `Contents`
    *("layout", "slot_names", "shards", "state", "workers", "worker_names", "rows", "tables"),
    "base_sum",
)
DTYPES = ("float32", "float64")  # of parameters


@dataclass(frozen=True)
class Contents:
    """Contents of an index, except the mapped arrays, whose elements are in the shard files.

    Attributes:
        step: Step of the checkpoint.
        layout: Names and shapes of the parameters.
        dtype: Dtype of the parameters and of the slots.
        slot_names: Names of the optimizer's slots.
        shards: Records of the shard files, in the order of their ranges, without empty ones.
        config: Configuration as TOML text.
        state: State of the run, any JSON value; this package does not interpret it.
        arrays: Small named arrays; this package does not interpret them.
        workers: Records of the worker files, by worker; empty if workers have no state.
        worker_names: Names of the vectors in each worker file.
        rows: Records of the files of table rows, by owner; empty without tables.
        tables: Properties of each table by name, as JSON values.
        base_sum: SHA-256 of the index of the checkpoint before in the chain; empty without one.
    """

    step: int
    layout: Layout
    dtype: np.dtype
    slot_names: tuple[str, ...]
    shards: tuple[ShardRecord, ...]
    config: str
    state: Any
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    workers: tuple[ShardRecord, ...] = ()
    worker_names: tuple[str, ...] = ()
    rows: tuple[ShardRecord, ...] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    base_sum: str = ""

    @property
    def base(self) -> int | None:
        """Step of the checkpoint before in the chain; None if this one has all changed rows."""
        return next((record.base for record in self.rows if record.base is not None), None)

    @property
    def files(self) -> tuple[ShardRecord, ...]:
        """Records of all files except the index."""
        return self.shards + self.workers + self.rows


def commit(
    folder: PathLike, contents: Contents, keep: int, protected: Collection[int] = ()
) -> None:
    """Commit a checkpoint by writing its index, and remove old checkpoints.

    One rank calls it, after every `write_shard`, `write_worker` and `write_rows` has returned.

    Args:
        folder: Folder that `begin_step` returned.
        contents: Contents of the index. The records may be in any order; `base_sum` is ignored and
            computed.
        keep: Number of complete checkpoints that stay, this one included; at least 1.
        protected: Steps of older checkpoints that stay in addition.

    Raises:
        ValueError: If the shards do not cover the layout exactly, a worker is missing, the rows'
            files have different bases, or ``keep < 1``.
        UserError: If a file or the checkpoint before in the chain is missing, a name is no valid
            name of an HDF5 dataset, or the file system refuses.

    Blocks: until the index is on disk.
    """
    folder = Path(folder)
    if keep < 1:
        raise ValueError(f"keep {keep}, expected 1 or more")
    shards = sorted((s for s in contents.shards if s.size), key=lambda s: s.begin)
    check_cover(shards, contents.layout.size)
    of_layout, of_arrays = contents.layout.names, tuple(contents.arrays)
    for names in (of_layout, contents.slot_names, of_arrays, contents.worker_names):
        check_names(names)
    workers = sorted(contents.workers, key=lambda record: record.owner)
    rows = sorted(contents.rows, key=lambda record: record.owner)
    owners = [record.owner for record in workers]
    if owners != list(range(len(owners))):
        raise ValueError(f"files of workers {owners}, expected one of each")
    index = replace(
        contents,
        shards=tuple(shards),
        workers=tuple(workers),
        rows=tuple(rows),
        base_sum=_base_sum(folder, rows),
    )
    for record in index.files:
        if problem := shard_problem(folder, record, sums=False):
            raise problem
    write_durably(folder / INDEX, lambda path: _write_index(path, index))
    prune(folder, _base_folder(folder, index), keep, _look, protected)


def _base_sum(folder: Path, rows: Sequence[ShardRecord]) -> str:
    """Return the checksum of the index of the rows' base; empty if no file has a base."""
    bases = {record.base for record in rows} - {None}
    if len(bases) > 1:
        raise ValueError(f"rows that add to those of steps {bases}, expected one")
    return "".join(_index_sum(step_folder(folder.parent, base or 0)) for base in bases)


def _index_sum(folder: Path) -> str:
    path = folder / INDEX
    try:
        return file_sha256(path, SEAL_BYTES)
    except OSError as error:
        reason = f"{path}: cannot be read ({error}), and other rows add to those of this checkpoint"
        raise damaged(reason, "an index") from None


def check_cover(shards: Sequence[ShardRecord], size: int) -> None:
    """Raise ValueError unless the ranges are contiguous, in order, and cover ``[0, size)``."""
    edges = [0, *(s.end for s in shards)]
    if [s.begin for s in shards] != edges[:-1] or edges[-1] != size:
        ranges = ", ".join(f"[{s.begin}, {s.end})" for s in shards) or "none"
        raise ValueError(f"shards {ranges}, expected contiguous ranges that cover [0, {size})")


def _write_index(path: Path, contents: Contents) -> None:
    with create_h5(path, SEAL_BYTES) as file:
        file.attrs["version"] = FORMAT
        file.attrs["step"] = contents.step
        file.attrs["dtype"] = contents.dtype.name
        # Datasets, since an attribute has at most 64 KB.
        file["meta/config"] = contents.config
        for name in IN_JSON:
            file[f"meta/{name}"] = json.dumps(getattr(contents, name), default=_plain)
        arrays = file.create_group("arrays")
        for name, array in contents.arrays.items():
            arrays[name] = array
        for source in [PARAMS, *map(slot_dataset, contents.slot_names)]:
            map_arrays(file, source, contents)
    with open(path, "r+b") as raw:
        raw.write(seal(path))


def _plain(value: Layout | ShardRecord) -> Any:
    return value.to_json() if isinstance(value, Layout) else asdict(value)


def seal(path: Path) -> bytes:
    """Compute the first `SEAL_BYTES` of an index: a line with the format, and one with a checksum.

    The checksum is of all bytes after them.
    """
    text = f"mpips checkpoint {FORMAT}\nsha256 {file_sha256(path, SEAL_BYTES)}\n"
    return text.encode().ljust(SEAL_BYTES, b"\0")


def read_index(folder: Path) -> Contents:
    """Read an index and check its checksum; shard files are not checked.

    Raises:
        UserError: If the index is missing, damaged or of another format.
    """
    path = folder / INDEX
    if path.exists() and not path.is_file():  # to open a pipe would block
        raise damaged(f"{path} is not a file", "an index of a checkpoint")
    try:
        with open(path, "rb") as raw:
            actual = raw.read(SEAL_BYTES)
        expected = seal(path)
    except FileNotFoundError:
        raise damaged(f"{folder}: no {INDEX}, so it was never committed", "a checkpoint") from None
    except OSError as error:
        raise damaged(f"{path}: cannot be read: {error}", "an index of a checkpoint") from None
    match = SEALED.match(actual)
    if match is not None and int(match[1]) != FORMAT:
        raise OtherFormatError(path, match[1].decode())
    if actual != expected:
        raise damaged(f"{path}: seal {_line(actual)}", _line(expected))
    with reading(path, "the index") as file:
        return _parse_index(file)


def _line(block: bytes) -> str:
    """Return a seal as one printable line of at most 100 characters."""
    text = block.rstrip(b"\0").decode("ascii", "backslashreplace")
    return repr(" ".join(text.split())[:100])


def _parse_index(file: "h5py.File") -> Contents:
    import h5py

    meta, small = item(file, "meta"), item(file, "arrays")

    def text(name: str) -> str:
        return item(meta, name).asstr()[()]

    arrays: dict[str, np.ndarray] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, h5py.Dataset):
            arrays[name] = np.asarray(item(small, name)[()])

    small.visititems(collect)
    values = {name: json.loads(text(name)) for name in IN_JSON}
    values |= {name: tuple(values[name]) for name in ("slot_names", "worker_names")}
    values |= {name: _records(values[name]) for name in ("shards", "workers", "rows")}
    contents = Contents(
        step=int(file.attrs["step"]),
        dtype=np.dtype(file.attrs["dtype"]),
        config=text("config"),
        arrays=arrays,
        **values | {"layout": Layout.from_json(values["layout"])},
    )
    check_cover(contents.shards, contents.layout.size)
    if contents.dtype.name not in DTYPES:
        raise TypeError(f"dtype {contents.dtype}")
    for name in (*contents.slot_names, *contents.worker_names):
        if not isinstance(name, str):
            raise TypeError(f"array name {name!r}")
    return contents


def _records(listed: Any) -> tuple[ShardRecord, ...]:
    """Return the records of an index, checked to be of files in its own folder."""
    records = tuple(ShardRecord(**fields) for fields in listed)
    for record in records:
        numbers = record.owner, record.begin, record.end, record.bytes, record.base or 0
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError(f"file {record.file!r} of {numbers}")
        if not OWN_FILE.fullmatch(record.file):
            raise ValueError(f"file {record.file!r}")
    return records


def _look(folder: Path) -> tuple[bool, Path | None]:
    """Return whether a checkpoint's index is sound and all needed files exist, and its base.

    The base is the folder of the checkpoint before in the chain; None if there is none.
    """
    try:
        contents = read_index(folder)
    except UserError:
        return False, None
    is_whole = not any(file_problems(folder, contents, sums=False))
    return is_whole, _base_folder(folder, contents)


class Link(NamedTuple):
    """One checkpoint of a chain of incremental checkpoints.

    Attributes:
        folder: Folder of the checkpoint.
        step: Step of the checkpoint.
        rows: Files of rows to read. An owner's newest file without a base ends the chain for this
            owner, so its older files are left out.
    """

    folder: Path
    step: int
    rows: tuple[ShardRecord, ...]


def links(folder: Path, contents: Contents) -> Iterator[Link]:
    """Yield the checkpoints of a chain, the newest first.

    Args:
        folder: Folder of the newest checkpoint.
        contents: Contents of its index.

    Raises:
        UserError: If an earlier checkpoint is missing or damaged, or was replaced by another.
    """
    newest, rows = folder, contents.rows
    while True:
        yield Link(folder, contents.step, rows)
        owners = {record.owner for record in rows if record.base is not None}
        if not owners:
            return
        sum_then, base = contents.base_sum, _base_folder(folder, contents)
        assert base is not None, "a file has a base"
        if not (base / INDEX).exists():
            raise _broken(newest, base, "that is missing: with it this one would be whole")
        try:
            contents, sum_now = read_index(base), _index_sum(base)
        except UserError as error:
            raise _broken(newest, base, str(error)) from None
        if sum_now != sum_then:
            raise _broken(newest, base, "it is another checkpoint than the one that was there")
        folder, rows = base, tuple(r for r in contents.rows if r.owner in owners)


def _base_folder(folder: Path, contents: Contents) -> Path | None:
    base = contents.base
    return None if base is None else step_folder(folder.resolve().parent, base)


def _broken(newest: Path, link: Path, why: str) -> UserError:
    got = f"{newest}: its rows add to those of {link}, and {why.partition(', expected ')[0]}"
    return damaged(got, "all checkpoints that its rows add to")


def file_problems(folder: Path, contents: Contents, *, sums: bool) -> Iterator[UserError]:
    """Yield the problems of a checkpoint's files, and of the earlier files in its chain.

    Args:
        folder: Folder of the checkpoint.
        contents: Contents of its index.
        sums: Whether to check the files' checksums; otherwise only their sizes.
    """
    try:
        for link in links(folder, contents):
            own = link.folder == folder
            for record in contents.files if own else link.rows:
                if problem := shard_problem(link.folder, record, sums=sums):
                    yield problem if own else _broken(folder, link.folder, str(problem))
    except UserError as problem:
        yield problem
