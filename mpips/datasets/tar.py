"""Tar files in the layout of WebDataset.

By default the inputs are an image or ``.npy``, and the targets are ``.cls``, a class number as
text. ``::x.npy,y.npy`` names other suffixes. A shape after them, ``::jpg,cls,64x64x3``, scales and
crops images. A file is scanned once for the positions of its members. Each member is then one read.

Reference: A. Aizman, G. Maltby, T. Breuel, "High Performance I/O For Large Scale Deep Learning",
IEEE Big Data 2019.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np

from mpips.datasets.images import SUFFIXES, Shape, decode, fill, parse_shape, shape_of
from mpips.datasets.table import ArrayInfo, Table, check_file, damaged, reading
from mpips.errors import UserError

FORMAT = "uncompressed tar"
NUMBER = "cls"  # the suffix of a class number as text
ARRAY = "npy"
X_AT, X_SIZE, Y_AT, Y_SIZE = range(4)  # columns of a sample's positions
COLUMNS = 4
LONGEST = 64  # longest text of a class number in bytes
WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class MemberNames:
    """Members of a tar file to read.

    Attributes:
        inputs: Suffix of the inputs; empty for the first image or array of a sample.
        targets: Suffix of the targets.
        shape: Shape to scale and crop images to; None to keep theirs.
    """

    inputs: str
    targets: str
    shape: Shape | None

    def is_input(self, suffix: str) -> bool:
        """Return whether members with this suffix are inputs."""
        if self.inputs:
            return suffix == self.inputs
        return suffix == ARRAY or f".{suffix}" in SUFFIXES


def parse(names: str, path: str) -> MemberNames:
    """Return the members in a text such as ``jpg,cls,64x64x3``: suffixes, a shape, or both.

    Raises:
        UserError: If the text has another form.
    """
    parts = names.split(",") if names else []
    shape = parse_shape(parts.pop(), path) if len(parts) in (1, 3) else None
    if len(parts) not in (0, 2) or not all(parts):
        got = f"members {names!r} of {path}"
        raise UserError(got, "suffixes of inputs and targets", f"write it as {path}::jpg,cls")
    inputs, targets = parts or ("", NUMBER)
    return MemberNames(inputs, targets, shape)


class TarTable(Table):
    """The samples of a tar file, read on demand.

    Args:
        path: The file.
        names: Members to read; see `parse`.
        places: Result of `scan` for the file; None to scan it.

    Raises:
        UserError: If the file is missing, empty or truncated, or a sample lacks a member.
    """

    in_memory = False

    def __init__(self, path: str, names: str = "", places: np.ndarray | None = None) -> None:
        check_file(path)
        self._wanted = wanted = parse(names, path)
        self.places = scan(path, wanted) if places is None else places
        self._members = self.places.reshape(-1, COLUMNS)
        self._numbers = _is_number(wanted.targets)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        self.path = path
        try:
            x = self._look(X_AT, wanted.inputs or "inputs")
            y = ArrayInfo(wanted.targets, (), np.dtype("i8"))
            y = y if self._numbers else self._look(Y_AT, wanted.targets)
            n = len(self._members)
            super().__init__(path, x.times(n), y.times(n))
        except BaseException:
            self.close()
            raise

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of rows ``[begin, end)``, images as uint8."""
        return self._read(begin, end, X_AT, self.x), self.read_y(begin, end)

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        if self._numbers:
            return self._members[begin:end, Y_AT]
        return self._read(begin, end, Y_AT, self.y)

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _read(self, begin: int, end: int, column: int, info: ArrayInfo) -> np.ndarray:
        """Return inputs or targets of rows, with a read for each, in threads."""
        out = np.empty((end - begin, *info.shape[1:]), info.dtype)
        return fill(out, lambda k: self._sample(begin + k, column, info))

    def _sample(self, row: int, column: int, info: ArrayInfo) -> np.ndarray:
        data, name = self._bytes(row, column), f"{self.path}, sample {row}"
        if info.dtype == np.uint8 and len(info.shape) == 4 and not _is_array(data):
            height, width, channels = info.shape[1:]
            return decode(data, name, (height, width, channels), bool(self._wanted.shape))
        array = _array(data, name)
        if (array.shape, array.dtype) != (info.shape[1:], info.dtype):
            got = f"{name}: an array of shape {array.shape}, {array.dtype}"
            raise UserError(got, f"{info.shape[1:]}, {info.dtype} as the first", "leave it out")
        return array

    def _look(self, column: int, name: str) -> ArrayInfo:
        """Return the shape and dtype of the first sample's inputs or targets."""
        data, what = self._bytes(0, column), f"{self.path}, sample 0"
        if _is_array(data):
            first = _array(data, what)
            return ArrayInfo.of(name, first)
        shape = self._wanted.shape or shape_of(io.BytesIO(data), what)
        return ArrayInfo(name, shape, np.dtype("u1"))

    def _bytes(self, row: int, column: int) -> bytes:
        at, size = self._members[row, column : column + 2].tolist()
        with reading(f"{self.path}, sample {row}", FORMAT):
            data = os.pread(self._file.fileno(), size, at)
            if len(data) < size:
                raise EOFError("it ends early")
            return data


def scan(path: str, wanted: MemberNames) -> np.ndarray:
    """Scan a tar file for the positions of each sample's inputs and targets.

    Returns:
        Offsets and sizes in bytes, shape (4 n,), int64; a class number in place of its offset.

    Raises:
        UserError: If the file is damaged, or a sample lacks a member.
    """
    samples: list[tuple[int, int, int, int]] = []
    with (
        reading(path, FORMAT),
        open(path, "rb") as raw,
        tarfile.open(fileobj=raw, mode="r:") as file,
    ):
        for key, parts in _samples(file):
            inputs = [m for suffix, m in parts.items() if wanted.is_input(suffix)]
            targets = parts.get(wanted.targets)
            if not inputs or targets is None:
                lacks = wanted.inputs or "image or .npy" if not inputs else wanted.targets
                got = f"{path}: sample {len(samples)} ({key}) has {', '.join(parts)} and no {lacks}"
                raise UserError(got, "a member of each kind, one behind the other, in each sample")
            if inputs[0].issparse() or targets.issparse():
                raise ValueError(f"sample {len(samples)} ({key}) is a sparse file")
            where = targets.offset_data, targets.size
            if _is_number(wanted.targets):
                where = _number(raw, targets, f"{path}: sample {len(samples)} ({key})"), 0
            samples.append((inputs[0].offset_data, inputs[0].size, *where))
        end = os.pread(raw.fileno(), 2 * tarfile.RECORDSIZE, file.offset)
        if len(end) < tarfile.BLOCKSIZE:
            raise EOFError("it has no end: a block of zeros")
        if end.strip(b"\0"):  # tarfile takes any invalid header for the end, and reads one archive
            raise ValueError(f"there is no member at byte {file.offset}, and other data follows")
    if not samples:
        raise damaged(path, FORMAT, ValueError("it has no members"))
    return np.array(samples, np.int64).reshape(-1)


def _samples(file: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield the common path of each sample's members, and the members by suffix."""
    key, parts = "", dict[str, tarfile.TarInfo]()
    while (member := file.next()) is not None:
        file.members.clear()  # type: ignore[attr-defined]  # else it stores all members
        if member.size < 0 or file.offset <= member.offset:
            raise ValueError(f"the member at byte {member.offset} has a size below 0")
        folder, base = os.path.split(member.name)
        stem, _, suffix = base.partition(".")
        if not member.isfile() or not stem:
            continue
        if os.path.join(folder, stem) != key and parts:
            yield key, parts
            parts = {}
        key = os.path.join(folder, stem)
        parts[suffix.lower()] = member
    if parts:
        yield key, parts


def _number(file: IO[bytes], member: tarfile.TarInfo, name: str) -> int:
    raw = os.pread(file.fileno(), min(member.size, LONGEST), member.offset_data)
    text = raw.decode(errors="replace").strip()
    if member.size > LONGEST or not WHOLE.fullmatch(text):
        expected = "a whole number of at most 18 digits"
        raise UserError(f"{name} has target {text!r}", expected, "number the classes from 0")
    return int(text)


def _is_number(suffix: str) -> bool:
    return suffix.rpartition(".")[2] == NUMBER


def _is_array(data: bytes) -> bool:
    return data.startswith(np.lib.format.MAGIC_PREFIX)


def _array(data: bytes, name: str) -> np.ndarray:
    with reading(name, ".npy"):
        array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array
