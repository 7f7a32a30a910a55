"""Index of a dataset of many files, compared on resume.

Files are counted once, when a run begins. A resumed run counts nothing. It compares each file's
size, time and checksum of the first bytes with the index in the run's folder.

Files of some formats must be scanned before a sample can be located in them. Each worker writes
the positions of samples in the files that it counts to its own file beside the index. A rank that
opens a data file reads the positions of that file.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any
from zlib import crc32

import numpy as np

from mpips.datasets.files import Files, parts
from mpips.datasets.table import ArrayInfo, Table, check_arrays, check_file, check_regular
from mpips.errors import UserError

HEAD_BYTES = 1 << 16
VERSION = 1


@dataclass(frozen=True)
class Stamp:
    """Identity of a file: its size, modification time (s), and CRC-32 of its first 64 KB."""

    size: int
    time_s: int
    head: int


@dataclass(frozen=True)
class FileInfo:
    """Contents of a file: its arrays, the factor of the inputs, the samples in a chunk.

    Attributes:
        x: The inputs.
        y: The targets.
        scale: Factor of the inputs.
        chunk: Number of samples that are stored together; see `Table.chunk`.
        together: Number of samples that are read together; see `Table.together`.
        places: Positions of its samples, shape (size,), int64, if the format needs them, and until
            they are written to a file.
    """

    x: ArrayInfo
    y: ArrayInfo
    scale: float
    chunk: int
    together: int = 1
    places: np.ndarray | None = field(default=None, compare=False)

    @staticmethod
    def of(table: Table) -> "FileInfo":
        """Return the contents of an open file."""
        return FileInfo(table.x, table.y, table.scale, table.chunk, table.together, table.places)


@dataclass(frozen=True)
class Entry:
    """Entry of the index: one of many files.

    Attributes:
        path: The file, in the form that its format's reader takes.
        stamps: Stamp of the file, or of each of two files.
        held: Contents; None if each worker reads the whole file.
        place: Location of the file's positions, once written: the worker whose file has them, their
            offset and their number there.
    """

    path: str
    stamps: tuple[Stamp, ...]
    held: FileInfo | None
    place: tuple[int, int, int] | None = None


Index = dict[str, list[Entry]]  # entries by the option that names the data


@dataclass(frozen=True)
class Counted:
    """The files of a dataset, once they are counted.

    Attributes:
        files: The files.
        entries: Entry of each file.
        load_places: Reads the positions of samples in a file; returns None if there are none.
    """

    files: Files
    entries: Sequence[Entry]
    load_places: Callable[[Entry], np.ndarray | None] = lambda entry: None

    def places_of(self, number: int) -> np.ndarray | None:
        """Return the positions of samples in a file; None if they are not available any more."""
        entry = self.entries[number]
        if entry.held is not None and entry.held.places is not None:
            return entry.held.places
        return self.load_places(entry)


def stamps_of(path: str) -> tuple[Stamp, ...]:
    """Return the stamp of a file or folder; of each, if `path` is two files with a comma.

    Raises:
        UserError: If one is missing or cannot be read.
    """
    return tuple(_stamp_folder(p) if os.path.isdir(p) else _stamp(p) for p in parts(path))


def _stamp_folder(path: str) -> Stamp:
    """Return a folder's total size, latest time, and checksum of names, sizes and times."""
    with os.scandir(path) as there:
        items = sorted((item.name, item.stat()) for item in there if item.is_file())
    text = "\n".join(f"{name} {about.st_size} {int(about.st_mtime)}" for name, about in items)
    last = max((int(about.st_mtime) for _, about in items), default=0)
    return Stamp(sum(about.st_size for _, about in items), last, crc32(os.fsencode(text)))


def _stamp(path: str) -> Stamp:
    check_file(path)
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            return Stamp(about.st_size, int(about.st_mtime), crc32(file.read(HEAD_BYTES)))
    except OSError as problem:
        got = f"data file {path} cannot be read ({problem.strerror})"
        raise UserError(got, "a readable file") from None


def check_names(kept: Sequence[Entry], files: Files, index: Path) -> None:
    """Check that a dataset has the same files as before, by their names and their order.

    Raises:
        UserError: If one was added, removed or moved. It names the file.
    """
    before = [_names(e.path.split(",") if len(e.stamps) > 1 else [e.path]) for e in kept]
    now = [_names(parts(path)) for path in files.paths]
    if before == now:
        return
    come, gone = sorted({*now} - {*before}), sorted({*before} - {*now})
    what = "another order of files"
    if come or gone:
        what = f"{come[0]}, which is new" if come else f"no {gone[0]}"
    got = f"dataset {files.name!r} of {len(now):,} files with {what}"
    remedy = f"put the files back, or begin a new run with --init-from {index.parent}"
    raise UserError(got, f"the {len(before):,} of the run that is resumed", remedy)


def recognise(entry: Entry, path: str, index: Path) -> Entry:
    """Return the entry of a file with its present path, after a check that the file is unchanged.

    Raises:
        UserError: If it is missing, or its size, time or first bytes have changed.
    """
    names, stamps = parts(path), stamps_of(path)
    if len(stamps) != len(entry.stamps):
        got = f"{index} has {len(entry.stamps)} stamps of {path}"
        raise UserError(got, f"{len(stamps)}", "remove it: the files are counted again")
    for name, before, now in zip(names, entry.stamps, stamps, strict=True):
        if before == now:
            continue
        same = "names, sizes and times" if os.path.isdir(name) else "first bytes"
        old, new = f"the same {same}", "others"
        if before.size != now.size:
            old, new = f"{before.size:,} bytes", f"{now.size:,} bytes"
        elif before.time_s != now.time_s:
            old, new = f"one of {_when(before.time_s)}", f"changed {_when(now.time_s)}"
        got = f"{name} is not what it was when the run began: {new}"
        remedy = (
            f"put it back (its time, too: cp -p), begin a new run with --init-from {index.parent}, "
            f"or remove {index} if all samples are the same in the same order"
        )
        raise UserError(got, old, remedy)
    return replace(entry, path=path)


def to_text(index: Index) -> str:
    """Return an index as text for `load`, without the positions of samples; see `save_places`."""
    plain = {option: [*map(asdict, entries)] for option, entries in index.items()}
    return json.dumps({"version": VERSION, "files": plain}, default=lambda dtype: dtype.str) + "\n"


def load(path: Path) -> Index:
    """Read a file with the text of an index; empty if there is no file.

    Raises:
        UserError: If it cannot be read.
    """
    check_regular(path)
    try:
        plain = json.loads(path.read_text())
        if plain["version"] != VERSION:
            raise ValueError(f"version {plain['version']}")
        return {option: [_entry(e) for e in entries] for option, entries in plain["files"].items()}
    except FileNotFoundError:
        return {}
    except Exception as problem:  # files of other kinds raise exceptions of many types
        got = f"{path} cannot be read ({problem})"
        remedy = "remove it: the files are counted again, and not compared with what they were"
        raise UserError(got, "the index of the run's data", remedy) from None


def _entry(plain: dict[str, Any]) -> Entry:
    path, stamps, held = plain["path"], tuple(Stamp(**s) for s in plain["stamps"]), plain["held"]
    if not (isinstance(path, str) and stamps):
        raise TypeError(f"a file {path!r} of {len(stamps)} stamps")
    for stamp in stamps:
        _whole([stamp.size, stamp.head], 0)
        _when(stamp.time_s)
    if held is not None:
        x, y = (
            ArrayInfo(str(a["name"]), _whole(a["shape"], 1), np.dtype(a["dtype"]))
            for a in (held["x"], held["y"])
        )
        check_arrays(path, x, y)
        if not math.isfinite(held["scale"]):
            raise ValueError(f"scale {held['scale']}")
        chunk, together = _whole([held["chunk"], held["together"]], 1)
        held = FileInfo(x, y, held["scale"], chunk, together)
    place = plain["place"]
    if place is not None:
        worker, begin, size = _whole(place, 0)
        place = worker, begin, size
    return Entry(path, stamps, held, place)


def _whole(values: list[Any], least: int) -> tuple[int, ...]:
    """Return whole numbers as a tuple, after a check.

    Raises:
        TypeError: If one is not an integer, or is less than `least`.
    """
    if not all(type(value) is int and value >= least for value in values):
        raise TypeError(f"{values} in place of whole numbers from {least}")
    return tuple(values)


def _names(paths: Sequence[str]) -> str:
    return ",".join(PurePath(path).name for path in paths)


def _when(time_s: int) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}"


def save_places(index: Path, option: str, *, worker: int, entries: Sequence[Entry]) -> list[Entry]:
    """Write the positions of samples in a worker's files. Returns entries that refer to them.

    Raises:
        OSError: If they cannot be written.
    """
    known = [entry.held for entry in entries if entry.held is not None]
    if all(held.places is None for held in known):
        return list(entries)
    written, begin = [], 0
    with open(_places(index, option, worker), "wb") as file:
        for entry, held in zip(entries, known, strict=True):
            assert held.places is not None, "files of one format"
            held.places.tofile(file)
            place = worker, begin, held.places.size
            written.append(replace(entry, held=replace(held, places=None), place=place))
            begin += held.places.size
        os.fsync(file.fileno())  # or it may be zeros after a power failure
    return written


def load_places(index: Path, option: str, entry: Entry) -> np.ndarray | None:
    """Return the positions that `save_places` wrote for a file, shape (size,), int64, or None."""
    if entry.place is None:
        return None
    worker, begin, size = entry.place
    try:
        path = _places(index, option, worker)
        if 8 * (begin + size) > os.path.getsize(path):
            return None
        return np.fromfile(path, np.int64, size, offset=8 * begin)
    except OSError:
        return None


def _places(index: Path, option: str, worker: int) -> Path:
    return index.with_name(f"{option}.places.{worker}")
