"""SVMlight/libsvm files: dense samples in memory, or sparse samples in parts.

A line is ``label index:value index:value ...``. The parser skips ``qid:N``, text after ``#`` and
blank lines. Indices increase. They count from 1, or from 0 if index 0 occurs in the file. Files
that are read into memory may be compressed with gzip.

Labels: if every label of a file is written as an integer, labels are class numbers. If one has a
decimal point or an exponent, labels are real-valued targets.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpips.datasets import libsvm_lines as lines
from mpips.datasets.csr import Csr, join
from mpips.datasets.table import (
    ArrayInfo,
    Table,
    check_file,
    cuts,
    is_compressed,
    locate,
    open_plain,
    reading,
)
from mpips.errors import UserError

FORMAT = "libsvm"
NAMES = "sparse"  # text after ``::`` for sparse batches
PIECE = 1 << 20  # bytes that are parsed at once
PARSED = 2  # bytes of parsed numbers for each byte of text, approximately
MAX_DENSE = 1 << 24  # features: 128 MB a sample
MAX_TOKEN_SHOWN = 40
LINE = "label index:value ..."
REFUSED = {
    lines.LABEL: ("label {} is not a finite number", "number the classes from 0"),
    lines.FEATURE: ("feature {} is not index:value of a finite number", "mend the line"),
    lines.ORDER: ("indices are not rising at {}", "mend the line"),
}


class Parsed(NamedTuple):
    """Samples of a text, with indices as written, and the facts of `lines.read_lines`."""

    labels: np.ndarray
    x: Csr
    facts: np.ndarray


class Piece(NamedTuple):
    """Whole lines of a file: number of samples, first byte, number of bytes."""

    samples: int
    begin: int
    size: int


class SvmTable(Table):
    """The samples of libsvm files.

    Args:
        path: Name of the files in messages.
        paths: The files.
        counts: Number of samples in each file.
        facts: Facts of each parsed part, shape (m, at least 3), int64.
    """

    checks_inputs = True

    def __init__(
        self, path: str, paths: Sequence[str], counts: Sequence[int], facts: np.ndarray
    ) -> None:
        self._paths, self._starts = paths, np.cumsum([0, *counts])
        self._highest = int(facts[:, lines.HIGH].max())
        self._counts_from = min(1, int(facts[:, lines.LOW].min()))
        n, whole = int(self._starts[-1]), facts[:, lines.WHOLE].all()
        x = ArrayInfo("features", (n, self._width()), np.dtype("f8"))
        super().__init__(path, x, ArrayInfo("labels", (n,), np.dtype("i8" if whole else "f8")))

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it."""
        number, row = locate(self._starts, row)
        return self._paths[number], row

    def match(self, other: Table) -> None:
        """Give two tables of training and testing the same width and first index.

        Raises:
            UserError: If their samples do not match.
        """
        if isinstance(other, SvmTable) and other.sparse == self.sparse:
            for table in (self, other):
                table._counts_from = min(self._counts_from, other._counts_from)
                table._highest = max(self._highest, other._highest)
                table.x = ArrayInfo(table.x.name, (table.n, table._width()), table.x.dtype)
        super().match(other)

    def _width(self) -> int:
        return max(1, self._highest + 1 - self._counts_from)

    def _columns(self, x: Csr) -> Csr:
        """Return samples with columns, counted from 0, in place of indices."""
        indices = x.indices.astype(np.int64) - self._counts_from
        return Csr(x.starts, indices, x.values, self.x.shape[1])

    def _labels(self, labels: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # labels beyond int64 are refused later
            return labels.astype(self.y.dtype)


class LibsvmTable(SvmTable):
    """The samples of libsvm files: sparse in memory, dense when they are read.

    Args:
        path: Name of the files in messages.
        paths: The files.

    Raises:
        UserError: If a file is missing or empty, or a line is malformed. It names the line.
    """

    def __init__(self, path: str, paths: Sequence[str]) -> None:
        files = [[parsed for _, parsed in pieces(each)] for each in paths]
        parts = [parsed for file in files for parsed in file]
        self._x = join([parsed.x for parsed in parts])
        counts = [sum(len(parsed.labels) for parsed in file) for file in files]
        super().__init__(path, paths, counts, np.array([parsed.facts for parsed in parts]))
        self._y = self._labels(np.concatenate([parsed.labels for parsed in parts]))
        if self.x.shape[1] > MAX_DENSE:
            got = f"{path}: index {self._highest:,}"
            remedy = "write ::sparse behind the name, for a problem with sparse batches"
            raise UserError(got, f"at most {MAX_DENSE:,} in dense samples", remedy)

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored inputs of rows ``[begin, end)``, dense, and their targets."""
        return self._columns(self._x[begin:end]).dense(), self._y[begin:end]

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the stored targets of rows ``[begin, end)``, as a view."""
        return self._y[begin:end]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored inputs and targets of `rows`, dense."""
        return self._columns(self._x.take(rows)).dense(), self._y[rows]


class SparseTable(SvmTable):
    """The samples of libsvm files, parsed on demand: memory does not grow with the files.

    Each file is scanned once, for its number of samples, its highest index and the positions of
    lines, about one every megabyte. They locate any sample.

    Args:
        path: Name of the files in messages.
        paths: The files.
        places: Result of `scan` for each file; None to scan it.

    Raises:
        UserError: If a file is missing, empty or compressed, or a line is malformed. It names the
            line.
    """

    in_memory, sparse = False, True

    def __init__(
        self, path: str, paths: Sequence[str], places: Sequence[np.ndarray | None]
    ) -> None:
        scans = [scan(p) if at is None else at for p, at in zip(paths, places, strict=True)]
        self.places = np.concatenate(scans)
        rows = [each.reshape(-1, 3) for each in scans]
        self._pieces = np.concatenate([each[1:] for each in rows])
        self._files = np.repeat(np.arange(len(paths)), [len(each) - 1 for each in rows])
        self._rows = np.cumsum([0, *self._pieces[:, 0]])
        counts = [int(each[1:, 0].sum()) for each in rows]
        super().__init__(path, paths, counts, np.array([each[0] for each in rows]))

    @property
    def sample_bytes(self) -> float:
        """Average bytes of one sample's inputs, once parsed."""
        return PARSED * float(self._pieces[:, 2].sum()) / self.n

    def read(self, begin: int, end: int) -> tuple[Csr, np.ndarray]:
        """Return the inputs and targets of rows ``[begin, end)``."""
        return self._read(begin, end, True)

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        return self._read(begin, end, False)[1]

    def _read(self, begin: int, end: int, features: bool) -> tuple[Csr, np.ndarray]:
        parts, labels = list[Csr](), list[np.ndarray]()
        for number, first, last in cuts(self._rows, begin, end):
            part = self._parse(number, features)
            labels.append(part.labels[first:last])
            parts.append(part.x[first:last])
        return self._columns(join(parts)), self._labels(np.concatenate(labels))

    def _parse(self, number: int, features: bool) -> Parsed:
        """Return the samples of a piece, or only their labels."""
        path, piece = self._paths[self._files[number]], Piece(*self._pieces[number].tolist())
        with reading(path, FORMAT):
            with open(path, "rb") as file:
                text = os.pread(file.fileno(), piece.size, piece.begin)
            parsed = parse(text, features)
            if len(text) == piece.size and len(parsed.labels) == piece.samples:
                return parsed
            at = piece.begin + max(0, int(parsed.facts[lines.BAD]))
            raise EOFError(f"it was changed while it is read, near byte {at}")


def open_libsvm(path: str, names: str = "") -> LibsvmTable:
    """Read a file into memory."""
    if names:
        raise UserError(f"array names {names!r} of {path}", "none: libsvm text has no arrays")
    return LibsvmTable(path, [path])


def open_sparse(path: str, names: str = "", places: np.ndarray | None = None) -> SparseTable:
    """Open a file.

    Args:
        path: The file.
        names: Text after ``::``.
        places: Result of `scan`; None to scan the file.

    Raises:
        UserError: As `SparseTable`.
    """
    if names not in ("", NAMES):
        raise UserError(f"{names!r} of {path}", f"nothing behind ::, or {NAMES}")
    return SparseTable(path, [path], [places])


def parse(text: bytes, features: bool = True) -> Parsed:
    """Parse whole lines up to the first malformed one, with features or only labels."""
    count, stored = text.count(b"\n") + 1, text.count(b":") + 1 if features else 0
    labels, starts = np.empty(count), np.empty(count + 1, np.int64)
    indices, values = np.empty(stored, np.int32), np.empty(stored)
    facts = np.array([1, lines.MOST_INDEX, 0, -1, 0])
    n = lines.read_lines(np.frombuffer(text, "u1"), labels, starts, indices, values, facts)
    end = int(starts[n])
    return Parsed(labels[:n], Csr(starts[: n + 1], indices[:end], values[:end], 0), facts)


def pieces(path: str) -> Iterator[tuple[bytes, Parsed]]:
    """Yield a file's text, about a megabyte of whole lines at a time, and its samples.

    Raises:
        UserError: If the file is missing or empty, or a line is malformed. It names the line.
    """
    check_file(path)
    number, samples = 1, 0
    with reading(path, FORMAT), open_plain(path) as file:
        while text := file.read(PIECE):
            text += file.readline()
            parsed = parse(text)
            if (bad := int(parsed.facts[lines.BAD])) >= 0:
                word = text[bad:].split(maxsplit=1)[0].partition(b"#")[0]
                what, remedy = REFUSED[int(parsed.facts[lines.WHY])]
                problem = what.format(repr(os.fsdecode(word[:MAX_TOKEN_SHOWN])))
                number += text.count(b"\n", 0, bad)
                raise UserError(f"{path}, line {number}: {problem}", LINE, remedy)
            number, samples = number + text.count(b"\n"), samples + len(parsed.labels)
            yield text, parsed
    if not samples:
        raise UserError(f"{path} has no samples", f"lines of {LINE}")


def scan(path: str) -> np.ndarray:
    """Scan a file for its properties and the positions of lines.

    Returns:
        Whether all labels are integers, the lowest and the highest index, then the three numbers of
        each `Piece`, shape (3 + 3 m,), int64.

    Raises:
        UserError: As `SparseTable`.
    """
    check_file(path)
    with reading(path, f"plain {FORMAT}"):
        if is_compressed(path):
            raise ValueError("it is compressed, and no line of it can be found")
    scanned, at, facts = list[Piece](), 0, list[np.ndarray]()
    for text, parsed in pieces(path):
        scanned.append(Piece(len(parsed.labels), at, len(text)))
        at += len(text)
        facts.append(parsed.facts)
    whole, low, high, *_ = np.transpose(facts)
    return np.array([whole.min(), low.min(), high.max(), *np.ravel(scanned)], np.int64)
