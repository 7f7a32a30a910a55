"""Index of a dataset of many files, compared on resume.

Files are looked at once, as a run begins. A resumed run counts nothing: it compares each file's
size, time and the sum of its head with those of the index, which lies in the run's folder.

Files of some formats have to be gone through before a sample can be found in them. As files are
counted, each worker writes where their samples lie to a file of its own beside the index. Whoever
opens a data file reads its part of that.
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
    """How a file is known again: size, time of its last change (s), CRC-32 of its first 64 KB."""

    size: int
    time_s: int
    head: int


@dataclass(frozen=True)
class Held:
    """What a file holds: its arrays, the factor of the inputs, the samples stored together.

    Attributes:
        together: Samples that are read together, as `Table.together`.
        places: Where its samples lie, shape (size,), int64, of a format that needs to know it, and
            until it is written to a file.
    """

    x: ArrayInfo
    y: ArrayInfo
    scale: float
    chunk: int
    together: int = 1
    places: np.ndarray | None = field(default=None, compare=False)

    @staticmethod
    def of(table: Table) -> "Held":
        """Return what an open file holds."""
        return Held(table.x, table.y, table.scale, table.chunk, table.together, table.places)


@dataclass(frozen=True)
class Entry:
    """What is known of one of many files.

    Attributes:
        path: As its format's reader takes it.
        stamps: Of the file, or of the two.
        held: What it holds; None where each worker reads the whole of it anyway.
        place: In whose file of places, where in it and how many numbers `held.places` are.
    """

    path: str
    stamps: tuple[Stamp, ...]
    held: Held | None
    place: tuple[int, int, int] | None = None


Index = dict[str, list[Entry]]  # by the option that names the data


@dataclass(frozen=True)
class Counted:
    """The files of a dataset, and what is known of each.

    Attributes:
        files: The files.
        entries: What is known of each.
        load_places: Returns where samples lie in a file, if that was written down.
    """

    files: Files
    entries: Sequence[Entry]
    load_places: Callable[[Entry], np.ndarray | None] = lambda entry: None

    def places_of(self, number: int) -> np.ndarray | None:
        """Return where samples lie in a file; None if that is not known any more."""
        entry = self.entries[number]
        if entry.held is not None and entry.held.places is not None:
            return entry.held.places
        return self.load_places(entry)


def stamps_of(path: str) -> tuple[Stamp, ...]:
    """Return what a file, or two with a comma between them, or a folder's files are known by.

    Raises:
        UserError: If one is missing or cannot be read.
    """
    return tuple(_stamp_folder(p) if os.path.isdir(p) else _stamp(p) for p in parts(path))


def _stamp_folder(path: str) -> Stamp:
    """Return a folder's whole size, its last file's time, the sum of names, sizes and times."""
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
    """Check that a dataset has the files that it had, by their names and their order.

    Raises:
        UserError: If one has come or gone; it is named.
    """
    before = [_names(e.path.split(",") if len(e.stamps) > 1 else [e.path]) for e in kept]
    now = [_names(parts(path)) for path in files.paths]
    if before == now:
        return
    come, gone = [n for n in now if n not in set(before)], [n for n in before if n not in set(now)]
    what = "another order of files"
    if come or gone:
        what = f"{come[0]}, which is new" if come else f"no {gone[0]}"
    got = f"dataset {files.name!r} of {len(now):,} files with {what}"
    remedy = f"put the files back, or begin a new run with --init-from {index.parent}"
    raise UserError(got, f"the {len(before):,} of the run that is resumed", remedy)


def recognise(entry: Entry, path: str, index: Path) -> Entry:
    """Return the entry of a file, which may have been moved, if it is the one that was counted.

    Raises:
        UserError: If it is missing, or its size, time or head is another.
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


def save(path: Path, index: Index) -> None:
    """Write an index, whole or not at all; without places, which `save_places` writes.

    Raises:
        OSError: If it cannot be written.
    """
    found = {option: [*map(asdict, entries)] for option, entries in index.items()}
    text = json.dumps({"version": VERSION, "files": found}, default=lambda dtype: dtype.str)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(f"{text}\n")
    os.replace(temporary, path)


def load(path: Path) -> Index:
    """Read what `save` has written; an empty index where there is no file.

    Raises:
        UserError: If it cannot be read.
    """
    check_regular(path)
    try:
        found = json.loads(path.read_text())
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}")
        return {option: [_entry(e) for e in entries] for option, entries in found["files"].items()}
    except FileNotFoundError:
        return {}
    except Exception as problem:  # whatever a file of another kind leads to
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
        held = Held(x, y, held["scale"], chunk, together)
    place = plain["place"]
    if place is not None:
        worker, begin, size = _whole(place, 0)
        place = worker, begin, size
    return Entry(path, stamps, held, place)


def _whole(values: list[Any], least: int) -> tuple[int, ...]:
    """Return whole numbers; TypeError if one is something else, or less."""
    if not all(type(value) is int and value >= least for value in values):
        raise TypeError(f"{values} in place of whole numbers from {least}")
    return tuple(values)


def _names(paths: Sequence[str]) -> str:
    return ",".join(PurePath(path).name for path in paths)


def _when(time_s: int) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}"


def save_places(index: Path, option: str, *, worker: int, entries: Sequence[Entry]) -> list[Entry]:
    """Write where samples lie in a worker's files; returns the entries without it.

    Raises:
        OSError: If it cannot be written.
    """
    known = [entry.held for entry in entries if entry.held is not None]
    if all(held.places is None for held in known):
        return list(entries)
    found, begin = [], 0
    with open(_places(index, option, worker), "wb") as file:
        for entry, held in zip(entries, known, strict=True):
            assert held.places is not None, "files of one format"
            held.places.tofile(file)
            place = worker, begin, held.places.size
            found.append(replace(entry, held=replace(held, places=None), place=place))
            begin += held.places.size
    return found


def load_places(index: Path, option: str, entry: Entry) -> np.ndarray | None:
    """Return what `save_places` has written of a file, shape (size,), int64; None if it is gone."""
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
