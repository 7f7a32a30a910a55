"""SVMlight and libsvm text, plain or compressed with gzip: sparse in memory, dense in a batch.

A line is ``label index:value index:value ...``; ``qid:N`` and what follows ``#`` are skipped, and
so are blank lines. Indices rise; they count from 1, or from 0 if an index 0 occurs in the file.

Labels: a file in which every label is written as an integer has classes. A label with a decimal
point or an exponent makes them real-valued targets.
"""

import bisect
import gzip
import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import numpy as np

from mpips.datasets.table import ArrayInfo, Table, check_file, reading
from mpips.errors import UserError

MAX_INDEX = 2**31 - 1
MAX_DENSE = 1 << 24  # features: 128 MB a sample
MAX_VALUE = float(np.finfo(np.float32).max)
GZIP_MAGIC = b"\x1f\x8b"
MAX_TOKEN_SHOWN = 40


class LibsvmTable(Table):
    """The rows of a libsvm file, or of several, kept sparse, given dense.

    Args:
        path: The file, or what messages call them.
        paths: The files, if they are several.

    Raises:
        UserError: If the file is missing, empty or has a malformed line, which is named.
    """

    checks_inputs = True

    def __init__(self, path: str, paths: Sequence[str] = ()) -> None:
        rows, self._paths, self._ends = _Rows(), paths or (path,), []
        for each in self._paths:
            _parse(each, rows)
            self._ends.append(len(rows.labels))
        self._starts = np.frombuffer(rows.starts, np.int64)
        self._indices = np.frombuffer(rows.indices, np.int32)
        self._values = np.frombuffer(rows.values, np.float64)
        self._labels = _labels(rows)
        self._highest = int(self._indices.max(initial=0))
        self._counts_from = 0 if (self._indices == 0).any() else 1
        width = max(1, self._highest + 1 - self._counts_from)
        if width > MAX_DENSE:
            got = f"{path}: index {self._highest:,}"
            remedy = "write ::sparse behind the name, for a problem with sparse batches"
            raise UserError(got, f"at most {MAX_DENSE:,} in dense samples", remedy)
        x = ArrayInfo("features", (len(self._labels), width), self._values.dtype)
        y = ArrayInfo("labels", self._labels.shape, self._labels.dtype)
        super().__init__(path, x, y)

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it."""
        number = bisect.bisect_right(self._ends, row)
        return self._paths[number], row - (self._ends[number - 1] if number else 0)

    def read_x(self, begin: int, end: int) -> np.ndarray:
        """Return the stored inputs of rows ``[begin, end)``, dense."""
        return self._dense(np.arange(begin, end))

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the stored targets of rows ``[begin, end)``, as a view."""
        return self._labels[begin:end]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored inputs and targets of `rows`, dense."""
        return self._dense(rows), self._labels[rows]

    def match(self, other: Table) -> None:
        """Give both files the larger number of features and one way of counting them."""
        if isinstance(other, LibsvmTable):
            counts_from = min(self._counts_from, other._counts_from)
            width = max(1, max(self._highest, other._highest) + 1 - counts_from)
            for table in (self, other):
                table._counts_from = counts_from
                table.x = ArrayInfo(table.x.name, (table.n, width), table.x.dtype)
        super().match(other)

    def _dense(self, rows: np.ndarray) -> np.ndarray:
        """Return `rows`, shape (n,), as an array of shape (n, width), dtype float64."""
        out = np.zeros((len(rows), self.x.shape[1]))
        begins = self._starts[rows]
        counts = self._starts[rows + 1] - begins
        # Where each stored value of these rows lies: its row's begin plus 0, 1, 2, ...
        places = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        columns = self._indices[places] - self._counts_from
        out[np.repeat(np.arange(len(rows)), counts), columns] = self._values[places]
        return out


@dataclass
class _Rows:
    labels: array = field(default_factory=lambda: array("d"))
    whole: bool = True
    starts: array = field(default_factory=lambda: array("q", [0]))
    indices: array = field(default_factory=lambda: array("i"))
    values: array = field(default_factory=lambda: array("d"))


def open_libsvm(path: str, names: str = "") -> LibsvmTable:
    """Read `path` into memory."""
    if names:
        raise UserError(f"array names {names!r} of {path}", "none: libsvm text has no arrays")
    return LibsvmTable(path)


def _parse(path: str, rows: _Rows) -> None:
    """Add the samples of a file."""
    check_file(path)
    before = len(rows.labels)
    with reading(path, "libsvm"), _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                _add(rows, line)
            except ValueError as error:
                raise _malformed(path, number, str(error)) from None
    if len(rows.labels) == before:
        raise UserError(f"{path} has no samples", "lines of label index:value ...")


def malformed(path: str, number: int, line: bytes) -> UserError:
    """Make the error for a line that is none, by its number from 1."""
    try:
        _add(_Rows(), line)
    except ValueError as error:
        return _malformed(path, number, str(error))
    return _malformed(path, number, f"{_show(line.strip())} cannot be read")


def _malformed(path: str, number: int, problem: str) -> UserError:
    remedy = "number the classes from 0" if problem.startswith("label") else "mend the line"
    return UserError(f"{path}, line {number}: {problem}", "label index:value ...", remedy)


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if is_compressed(path) else open(path, "rb")


def is_compressed(path: str) -> bool:
    """Whether a file is of gzip."""
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def _add(rows: _Rows, line: bytes) -> None:
    """Add a line's sample; ValueError says what is wrong with it."""
    tokens = line.partition(b"#")[0].split()
    if not tokens:
        return
    label = _number(tokens[0], tokens[0], "label")
    if rows.whole:
        rows.whole = tokens[0].lstrip(b"+-").isdigit()
    last = -1
    for token in tokens[1:]:
        head, colon, tail = token.partition(b":")
        if head == b"qid":
            continue
        if not colon or not head.isdigit() or (index := int(head)) > MAX_INDEX:
            raise ValueError(f"feature {_show(token)}")
        if index <= last:
            raise ValueError(f"index {index} after {last}, not rising")
        rows.values.append(_number(tail, token, "feature"))
        rows.indices.append(index)
        last = index
    rows.labels.append(label)
    rows.starts.append(len(rows.values))


def _number(text: bytes, token: bytes, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_VALUE or b"_" in text:
        raise ValueError(f"{what} {_show(token)} is not a finite number")
    return value


def _show(token: bytes) -> str:
    return repr(os.fsdecode(token[:MAX_TOKEN_SHOWN]))


def _labels(rows: _Rows) -> np.ndarray:
    labels = np.frombuffer(rows.labels)
    with np.errstate(invalid="ignore"):  # one beyond int64 is a label that is refused later
        return labels.astype(np.int64) if rows.whole else labels
