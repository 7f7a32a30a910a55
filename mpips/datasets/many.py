"""Many files as one table, in the order of the files.

A sample's row is the number of samples in earlier files plus its row in its own file. If files are
read in parts, only a few are open at a time: thousands take neither handles nor memory. Files of
other formats are in memory, as a single one would be.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from mpips.datasets.files import Files
from mpips.datasets.index import FileInfo
from mpips.datasets.table import ArrayInfo, Table, cuts, joined, locate, reading
from mpips.errors import UserError

Opener = Callable[[int], Table]

OPEN_FILES = 64  # HDF5 takes 0.6 MB for each; opening one takes as long as reading some MB


class ManyTable(Table):
    """The samples of many files of one format.

    Args:
        files: The files.
        held: Contents of each file.
        open_table: Opens a file, by its number.
        in_memory: Whether `open_table` returns tables in memory.

    Raises:
        UserError: If a file's samples differ from those of the first one in shape, type or scale.

    Threads may share it.
    """

    def __init__(
        self, files: Files, held: Sequence[FileInfo], open_table: Opener, in_memory: bool
    ) -> None:
        first = held[0]
        for path, other in zip(files.paths[1:], held[1:], strict=True):
            _match(first, files.paths[0], other, path)
        self.in_memory = in_memory
        self._paths, self._open_table = files.paths, open_table
        self._starts = np.cumsum([0, *(each.x.shape[0] for each in held)])
        self._open: OrderedDict[int, Table] = OrderedDict()
        self._lock = threading.Lock()
        n = int(self._starts[-1])
        x, y = (
            ArrayInfo(a.name if a.name == b.name else word, (n, *a.shape[1:]), _native(a.dtype))
            for a, b, word in ((first.x, held[-1].x, "inputs"), (first.y, held[-1].y, "targets"))
        )
        super().__init__(files.title, x, y, first.scale)
        self.together = max(each.together for each in held)
        # Chunks matter only if all blocks can begin and end at them.
        alike = all(each.chunk == first.chunk for each in held)
        if alike and not (self._starts[1:-1] % first.chunk).any():
            self.chunk = first.chunk

    def where(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it."""
        number, row = locate(self._starts, row)
        return self._paths[number], row

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored inputs and targets of rows ``[begin, end)``, from one or more files."""
        parts = []
        for number, first, last in cuts(self._starts, begin, end):
            with self._lock:
                parts.append(self._table(number).read(first, last))
        x, y = zip(*parts, strict=True)
        return joined(x), joined(y)

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return the stored targets of rows ``[begin, end)``, from one or more files."""
        parts = []
        for number, first, last in cuts(self._starts, begin, end):
            with self._lock:
                parts.append(self._table(number).read_y(first, last))
        return joined(parts)

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stored inputs and targets of `rows`, by one `gather` a file."""
        x, y = (np.empty((len(rows), *a.shape[1:]), a.dtype) for a in (self.x, self.y))
        numbers = np.searchsorted(self._starts, rows, "right") - 1
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            x[here], y[here] = self._table(number).gather(rows[here] - self._starts[number])
        return x, y

    def close(self) -> None:
        """Close the files that are open."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _table(self, number: int) -> Table:
        """Return a file's table; opens it if necessary, and closes the least recently used one."""
        if number not in self._open:
            while len(self._open) >= OPEN_FILES and not self.in_memory:
                self._open.popitem(last=False)[1].close()
            self._open[number] = self._opened(number)
        self._open.move_to_end(number)
        return self._open[number]

    def _opened(self, number: int) -> Table:
        with reading(self._paths[number], "data"):  # its file of positions may be damaged or stale
            table = self._open_table(number)
        rows = int(self._starts[number + 1] - self._starts[number])
        for mine, theirs in ((self.x, table.x), (self.y, table.y)):
            shape = rows, *mine.shape[1:]
            if (shape, mine.dtype) == (theirs.shape, _native(theirs.dtype)):
                continue
            table.close()
            got = f"{table.path}: array {theirs.name!r} is of shape {theirs.shape}, {theirs.dtype}"
            remedy = "it was changed while the job ran: put it back, and resume the run"
            raise UserError(got, f"{shape}, {mine.dtype}, as it was counted", remedy)
        return table


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def _match(first: FileInfo, first_path: str, other: FileInfo, path: str) -> None:
    """Check that two files have samples of the same shape, type and scale.

    Raises:
        UserError: If they differ.
    """
    for mine, theirs in ((first.x, other.x), (first.y, other.y)):
        kinds = [(a.shape[1:], _native(a.dtype)) for a in (theirs, mine)]
        if kinds[0] != kinds[1]:
            got, expected = (f"samples of shape {shape}, {dtype}" for shape, dtype in kinds)
            what = f"{path}: array {theirs.name!r} has {got}"
            remedy = "give files of one kind: convert it, or leave it out"
            raise UserError(what, f"{expected}, as in {first_path}", remedy)
    if first.scale != other.scale:
        got = f"{path}: inputs of scale {other.scale:g}"
        raise UserError(got, f"{first.scale:g}, as in {first_path}", "give files of one kind")
