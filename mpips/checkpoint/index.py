"""Checkpoint index: named arrays over the shard files, and all metadata.

The index maps each named array by an HDF5 virtual dataset, so that
``h5py.File("index.h5")["params/w1"][:]`` is the whole array in any HDF5 tool. Its rename into
place is the commit. Its first 512 bytes, which HDF5 leaves to the user, hold the sum of the rest.
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
from mpips.layout import Layout

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
        base_sum: Sum of the index of the checkpoint to whose rows these add; empty without one.
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
        """The step of the checkpoint to whose rows these add; None where they are all."""
        return next((record.base for record in self.rows if record.base is not None), None)

    @property
    def files(self) -> tuple[ShardRecord, ...]:
        """All files beside the index."""
        return self.shards + self.workers + self.rows


def commit(
    folder: PathLike, contents: Contents, keep: int, protected: Collection[int] = ()
) -> None:
    """Make the shard files in `folder` a checkpoint, and remove old ones.

    Called once, after every `write_shard`, `write_worker` and `write_rows` has returned.

    Args:
        folder: What `begin_step` returned.
        contents: What the index holds; the records of all files in any order; `base_sum` is
            computed here.
        keep: How many whole checkpoints remain, this one included; at least 1.
        protected: Steps of older ones that remain beside these.

    Raises:
        ValueError: If the shards do not cover the layout exactly, a worker is missing, rows add to
            several checkpoints, or ``keep < 1``.
        UserError: If a shard file is not there, or the checkpoint to whose rows these add; a name
            cannot be that of an HDF5 dataset, or the file system refuses.

    Blocks: until the index is on the disk.
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
    prune(folder, keep, _has_sound_index, protected, _base_of)


def _base_sum(folder: Path, rows: Sequence[ShardRecord]) -> str:
    """Return the sum of the index of the checkpoint to whose rows some add, if they do."""
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


def _write_index(path: Path, contents: Contents) -> None:
    with create_h5(path, SEAL_BYTES) as file:
        file.attrs["version"] = FORMAT
        file.attrs["step"] = contents.step
        file.attrs["dtype"] = contents.dtype.name
        # Datasets, because an attribute holds 64 KB at most.
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
    """Return the first bytes of an index, made of the rest: a line each for format and sum."""
    text = f"mpips checkpoint {FORMAT}\nsha256 {file_sha256(path, SEAL_BYTES)}\n"
    return text.encode().ljust(SEAL_BYTES, b"\0")


def read_index(folder: Path) -> Contents:
    """Read and check an index, down to the last bit; shard files are not looked at.

    Raises:
        UserError: If it is missing, damaged, of another format or of another folder.
    """
    path = folder / INDEX
    if path.exists() and not path.is_file():  # who opens a pipe waits for whoever writes
        raise damaged(f"{path} is not a file", "an index of a checkpoint")
    try:
        with open(path, "rb") as raw:
            found = raw.read(SEAL_BYTES)
        expected = seal(path)
    except FileNotFoundError:
        raise damaged(f"{folder}: no {INDEX}, so it was never committed", "a checkpoint") from None
    except OSError as error:
        raise damaged(f"{path}: cannot be read: {error}", "an index of a checkpoint") from None
    other = SEALED.match(found)
    if other is not None and int(other[1]) != FORMAT:
        raise OtherFormatError(path, other[1].decode())
    if found != expected:
        raise damaged(f"{path}: seal {_line(found)}", _line(expected))
    with reading(path, "the index") as file:
        return _parse_index(file)


def _line(block: bytes) -> str:
    """Return a seal as one printable line; of a damaged one, the beginning."""
    text = block.rstrip(b"\0").decode("ascii", "backslashreplace")
    return repr(" ".join(text.split())[:100])


def _parse_index(file: "h5py.File") -> Contents:
    import h5py

    meta, small = item(file, "meta"), item(file, "arrays")

    def text(name: str) -> str:
        return item(meta, name).asstr()[()]

    arrays: dict[str, np.ndarray] = {}

    def collect(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            arrays[name] = np.asarray(item(small, name)[()])

    small.visititems(collect)
    values = {name: json.loads(text(name)) for name in IN_JSON}
    values |= {name: tuple(values[name]) for name in ("slot_names", "worker_names")}
    values |= {name: _records(values[name]) for name in ("shards", "workers", "rows")}
    found = Contents(
        step=int(file.attrs["step"]),
        dtype=np.dtype(file.attrs["dtype"]),
        config=text("config"),
        arrays=arrays,
        **values | {"layout": Layout.from_json(values["layout"])},
    )
    check_cover(found.shards, found.layout.size)
    if found.dtype.name not in DTYPES:
        raise TypeError(f"dtype {found.dtype}")
    for name in (*found.slot_names, *found.worker_names):
        if not isinstance(name, str):
            raise TypeError(f"array name {name!r}")
    return found


def _records(listed: Any) -> tuple[ShardRecord, ...]:
    """Return the files that an index lists, which are in its own folder."""
    found = tuple(ShardRecord(**fields) for fields in listed)
    for record in found:
        numbers = record.owner, record.begin, record.end, record.bytes, record.base or 0
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError(f"file {record.file!r} of {numbers}")
        if not OWN_FILE.fullmatch(record.file):
            raise ValueError(f"file {record.file!r}")
    return found


def _has_sound_index(folder: Path) -> bool:
    """Return whether the index is whole and all files that it needs are there with their sizes."""
    try:
        contents = read_index(folder)
    except UserError:
        return False
    return not any(file_problems(folder, contents, sums=False))


class Link(NamedTuple):
    """A checkpoint of a chain, of whose rows each adds to those of the one before.

    Attributes:
        folder: Its folder.
        step: Its step.
        rows: Those files of its rows that count: an owner's last whole one ends the chain for it.
    """

    folder: Path
    step: int
    rows: tuple[ShardRecord, ...]


def links(folder: Path, contents: Contents) -> Iterator[Link]:
    """Yield a checkpoint, and then those to whose rows its own add, the newest first.

    Raises:
        UserError: If one of them is missing, damaged, or another than the one that was there.
    """
    newest, rows = folder, contents.rows
    while True:
        yield Link(folder, contents.step, rows)
        owners = {record.owner for record in rows if record.base is not None}
        if not owners:
            return
        sum_then, base = contents.base_sum, _base_folder(folder, contents)
        assert base is not None, "some add to it"
        if not (base / INDEX).exists():
            raise _broken(newest, base, "that is missing: with it this one would be whole")
        try:
            contents, sum_now = read_index(base), _index_sum(base)
        except UserError as error:
            raise _broken(newest, base, str(error)) from None
        if sum_now != sum_then:
            raise _broken(newest, base, "it is another checkpoint than the one that was there")
        folder, rows = base, tuple(r for r in contents.rows if r.owner in owners)


def _base_of(folder: Path) -> Path | None:
    """Return the folder of the checkpoint to whose rows those of one add, if its index is whole."""
    try:
        return _base_folder(folder, read_index(folder))
    except UserError:
        return None


def _base_folder(folder: Path, contents: Contents) -> Path | None:
    base = contents.base
    return None if base is None else step_folder(folder.resolve().parent, base)


def _broken(newest: Path, link: Path, why: str) -> UserError:
    got = f"{newest}: its rows add to those of {link}, and {why.partition(', expected ')[0]}"
    return damaged(got, "all checkpoints that its rows add to")


def file_problems(folder: Path, contents: Contents, *, sums: bool) -> Iterator[UserError]:
    """Yield what is wrong with the files of a checkpoint, and with those that its rows add to.

    Args:
        folder: Its folder.
        contents: Of its index.
        sums: Whether to read every byte.
    """
    try:
        for link in links(folder, contents):
            own = link.folder == folder
            for record in contents.files if own else link.rows:
                if problem := shard_problem(link.folder, record, sums=sums):
                    yield problem if own else _broken(folder, link.folder, str(problem))
    except UserError as problem:
        yield problem
