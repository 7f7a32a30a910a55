"""libsvm text with sparse batches, read in parts: what is in memory does not grow with the files.

The files are gone through once, for how many samples they have, their highest index, and where
lines begin, about every megabyte of text; then any sample is found. What a line may hold is told in
`mpips.datasets.libsvm`.
"""

import bisect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpips.datasets.base import Source, not_finite
from mpips.datasets.csr import Csr, join
from mpips.datasets.libsvm import is_compressed, malformed
from mpips.datasets.table import ArrayInfo, Table, check_file, cuts, damaged, reading
from mpips.errors import UserError
from mpips.kernels import libsvm as kernel

FORMAT = "libsvm"
NAMES = "sparse"  # behind ``::``, that batches are to be so
PIECE = 1 << 20  # bytes between lines that are known
PARSED = 2  # bytes of numbers for each of text, about


class Piece(NamedTuple):
    """Whole lines of a file: how many samples they have, where they begin, their bytes."""

    samples: int
    begin: int
    size: int


class Parsed(NamedTuple):
    """Samples of some text, their indices as they are written there."""

    labels: np.ndarray
    x: Csr


class SparseTable(Table):
    """The samples of libsvm files, parsed when they are asked for.

    Args:
        path: What messages call the files.
        paths: The files.
        places: What is known of each, as `places` of a table of it alone; None to find that out.

    Raises:
        UserError: If a file is missing, empty, compressed or has a malformed line, which is named.
    """

    in_memory, checks_inputs, sparse = False, True, True

    def __init__(
        self, path: str, paths: Sequence[str], places: Sequence[np.ndarray | None]
    ) -> None:
        self._paths, self._last = paths, (0, 0, np.zeros(0))
        known = [scan(p) if at is None else at for p, at in zip(paths, places, strict=True)]
        self._known = np.concatenate(known)
        facts = np.array([each[: kernel.FACTS] for each in known])
        found = [Piece(*row) for each in known for row in each[kernel.FACTS :].reshape(-1, 3)]
        self._pieces = np.array(found, np.int64)
        counts = [len(each[kernel.FACTS :]) // 3 for each in known]
        self._files = np.repeat(np.arange(len(paths)), counts)
        self._rows = np.cumsum([0, *self._pieces[:, 0]])
        self._starts = self._rows[np.cumsum([0, *counts])].tolist()
        self._highest = int(facts[:, kernel.HIGH].max())
        self._counts_from = min(1, int(facts[:, kernel.LOW].min()))
        n, whole = int(self._rows[-1]), facts[:, kernel.WHOLE].all()
        x = ArrayInfo("features", (n, self._width()), np.dtype("f8"))
        super().__init__(path, x, ArrayInfo("labels", (n,), np.dtype("i8" if whole else "f8")))

    @property
    def places(self) -> np.ndarray:
        """What is known of the files, shape (size,), int64."""
        return self._known

    @property
    def sample_bytes(self) -> float:
        """Bytes of one sample's inputs as they are read, on average."""
        return PARSED * float(self._pieces[:, 2].sum()) / self.n

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it."""
        number = bisect.bisect_right(self._starts, row) - 1
        return self._paths[number], row - self._starts[number]

    def read_x(self, begin: int, end: int) -> Any:
        """Return the inputs of rows ``[begin, end)``, a `Csr`, and keep their targets at hand."""
        parts = []
        labels = []
        for number, first, last in cuts(self._rows, begin, end):
            part = self._parse(number)
            labels.append(part.labels[first:last])
            parts.append(part.x if len(part.x) == last - first else part.x[first:last])
        self._last = begin, end, np.concatenate(labels)
        x = join(parts)
        return Csr(x.starts, x.indices - self._counts_from, x.values, self.x.shape[1])

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the targets of rows ``[begin, end)``."""
        if self._last[:2] == (begin, end):
            return self._labels([self._last[2]])
        found = [
            self._parse(number, False).labels[first:last]
            for number, first, last in cuts(self._rows, begin, end)
        ]
        return self._labels(found)

    def gather(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return inputs and targets of scattered rows: slow, a megabyte of text each."""
        pairs = [(self.read_x(row, row + 1), self.read_y(row, row + 1)) for row in rows.tolist()]
        x, y = zip(*pairs, strict=True)
        return join(x), np.concatenate(y)

    def match(self, other: Table) -> None:
        """Give both the larger number of features and one way of counting them."""
        if isinstance(other, SparseTable):
            for table in (self, other):
                table._counts_from = min(self._counts_from, other._counts_from)
                table._highest = max(self._highest, other._highest)
                table.x = ArrayInfo(table.x.name, (table.n, table._width()), table.x.dtype)
        elif not other.sparse:
            raise UserError(f"{other.path} beside {self.path}", "libsvm text, sparse as it is")
        super().match(other)

    def _labels(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # one beyond int64 is a label that is refused later
            return np.concatenate(parts).astype(self.y.dtype)

    def _width(self) -> int:
        return max(1, self._highest + 1 - self._counts_from)

    def _parse(self, number: int, features: bool = True) -> Parsed:
        """Return the samples of a piece, or their labels alone."""
        path, piece = self._paths[self._files[number]], Piece(*self._pieces[number].tolist())
        with reading(path, FORMAT):
            with open(path, "rb") as file:
                text = os.pread(file.fileno(), piece.size, piece.begin)
            parsed, facts = parse(text, features)
            if len(text) == piece.size and len(parsed.labels) == piece.samples:
                return parsed
            at = piece.begin + max(0, int(facts[kernel.BAD]))
            raise EOFError(f"it was changed while it is read, near byte {at}")


class SparseSource(Source):
    """Samples whose inputs are `Csr`."""

    def _inputs(self, x: Any, dtype: np.dtype) -> Any:
        with np.errstate(over="ignore"):
            scaled = np.multiply(x.values, self._scale, dtype=dtype, casting="unsafe")
        return replace(x, values=scaled)

    def _check(self, values: Any, array: ArrayInfo, begin: int) -> None:
        if not isinstance(values, Csr):
            super()._check(values, array, begin)
            return
        bad = np.flatnonzero(~np.isfinite(values.values))
        if bad.size:
            at = int(bad[0])
            row, column = begin + int(values.samples[at]), int(values.indices[at])
            raise not_finite(self.table, array, int(self._rows[row]), [column], values.values[at])


def open_sparse(path: str, names: str = "", places: np.ndarray | None = None) -> SparseTable:
    """Open one file.

    Args:
        path: The file.
        names: What stands behind ``::``.
        places: What is known of it; None to go through it.

    Raises:
        UserError: As `SparseTable`.
    """
    if names not in ("", NAMES):
        raise UserError(f"{names!r} of {path}", f"nothing behind ::, or {NAMES}")
    return SparseTable(path, [path], [places])


def parse(text: bytes, features: bool = True) -> tuple[Parsed, np.ndarray]:
    """Parse lines of text.

    Args:
        text: Whole lines.
        features: Whether more than labels is wanted.

    Returns:
        The samples before the first line that is none, and the facts of `kernel.read_lines`.
    """
    lines, stored = text.count(b"\n") + 1, text.count(b":") + 1 if features else 0
    labels, starts = np.empty(lines), np.empty(lines + 1, np.int64)
    indices, values = np.empty(stored, np.int32), np.empty(stored)
    facts = np.array([1, kernel.MOST_INDEX, 0, -1])
    n = kernel.read_lines(np.frombuffer(text, "u1"), labels, starts, indices, values, facts)
    end = int(starts[n])
    x = Csr(starts[: n + 1], indices[:end].astype(np.int64), values[:end], 0)
    return Parsed(labels[:n], x), facts


def scan(path: str) -> np.ndarray:
    """Go through a file for what is in it.

    Returns:
        The facts of `kernel.read_lines`, and the pieces behind them, shape (FACTS + 3 m,), int64.

    Raises:
        UserError: As `SparseTable`.
    """
    check_file(path)
    if is_compressed(path):
        error = ValueError("it is compressed, and no line of it can be found")
        raise damaged(path, f"plain {FORMAT}", error)
    pieces, at, lines = list[Piece](), 0, 1
    whole, low, high = 1, kernel.MOST_INDEX, 0
    with reading(path, FORMAT), open(path, "rb") as file:
        while text := file.read(PIECE):
            text += file.readline()
            parsed, facts = parse(text)
            if (bad := int(facts[kernel.BAD])) >= 0:
                number = lines + text.count(b"\n", 0, bad)
                raise malformed(path, number, text[bad:].partition(b"\n")[0])
            whole, low = min(whole, int(facts[kernel.WHOLE])), min(low, int(facts[kernel.LOW]))
            high = max(high, int(facts[kernel.HIGH]))
            pieces.append(Piece(len(parsed.labels), at, len(text)))
            at, lines = at + len(text), lines + text.count(b"\n")
    if not sum(piece.samples for piece in pieces):
        raise UserError(f"{path} has no samples", "lines of label index:value ...")
    return np.array([whole, low, high, -1, *np.ravel(pieces)], np.int64)
