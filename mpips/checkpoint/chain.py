"""Rows of a table in a chain of checkpoints, of which each has those changed since the one before.

The newest comes first: a row counts where it is found first, and is left out of older files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpips.checkpoint.files import damaged
from mpips.checkpoint.index import Contents, Link, links
from mpips.checkpoint.rows import (
    ROWS,
    TableRows,
    column_pieces,
    map_params,
    read_column,
    read_columns,
    read_rows,
)
from mpips.checkpoint.shards import ShardRecord


class Ordered(NamedTuple):
    """Some rows of a table by their numbers.

    Attributes:
        rows: Their numbers, increasing, shape (k,), dtype int64.
        places: Where each is in `params`, shape (k,), dtype int64.
        params: Values, shape (at least k, dim), perhaps of others as well.
    """

    rows: np.ndarray
    places: np.ndarray
    params: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, places: np.ndarray, params: np.ndarray) -> "Ordered":
        """Return rows of which `rows` are the numbers of those at `places`, in any order."""
        order = np.argsort(rows)
        return cls(rows[order], places[order], params)

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Read those of some rows that are here, each into its place of `out`, shape (n, dim)."""
        at = np.searchsorted(self.rows, numbers)
        inside = np.flatnonzero(at < len(self.rows))
        here = inside[self.rows[at[inside]] == numbers[inside]]
        out[here] = self.params[self.places[at[here]]]


@dataclass(frozen=True)
class Counted:
    """Those rows of a table in one file that no newer checkpoint has.

    Attributes:
        link: The checkpoint.
        record: The file.
        table: The table.
        keep: Which rows of the file, shape (its rows,), dtype bool; None for all.
    """

    link: Link
    record: ShardRecord
    table: str
    keep: np.ndarray | None

    def pieces(self) -> Iterator[TableRows]:
        """Yield them, a piece after another.

        Raises:
            UserError: If the file cannot be read, or is not the one that was committed.
        """
        at = 0
        for piece in read_rows(self.link.folder, self.record, self.link.step, self.table):
            if self.keep is None:
                yield piece
                continue
            kept = self.keep[at : at + len(piece.rows)]
            at += len(piece.rows)
            slots = {name: slot[kept] for name, slot in piece.slots.items()}
            yield TableRows(piece.rows[kept], piece.params[kept], slots)

    def ordered(self) -> Ordered:
        """Return them by their numbers; their values are read from the file when they are wanted.

        Raises:
            UserError: As `pieces`.
        """
        args = self.link.folder, self.record, self.link.step, self.table
        rows, params = read_column(*args, ROWS), map_params(*args)
        places = np.arange(len(rows)) if self.keep is None else np.flatnonzero(self.keep)
        if len(params) != len(rows):
            got = f"{self.link.folder}: {len(params)} rows of table {self.table}"
            raise damaged(got, str(len(rows)))
        return Ordered.of(rows[places], places, params)

    @property
    def count(self) -> int:
        """How many they are.

        Raises:
            UserError: As `pieces`.
        """
        if self.keep is not None:
            return int(np.count_nonzero(self.keep))
        return read_columns(self.link.folder, self.record, self.link.step, self.table)[ROWS][0]

    def column(self, name: str) -> Iterator[np.ndarray]:
        """Yield one of the datasets for them, a piece after another.

        Raises:
            UserError: As `pieces`.
        """
        args = self.link.folder, self.record, self.link.step, self.table, name
        at = 0
        for piece in column_pieces(*args):
            yield piece if self.keep is None else piece[self.keep[at : at + len(piece)]]
            at += len(piece)


def counted_rows(folder: Path, contents: Contents, table: str) -> Iterator[Counted]:
    """Yield the rows of a table in a checkpoint, file by file; each row once.

    Args:
        folder: The checkpoint's.
        contents: Of its index.
        table: The table.

    Raises:
        UserError: If a file, or a checkpoint to which this one adds, cannot be read.
    """
    newer = np.zeros(0, np.int64)  # sorted
    for link in links(folder, contents):
        here = [newer]
        for record in link.rows:
            if contents.base is None:  # as most are: numbers need not be read beforehand
                yield Counted(link, record, table, None)
                continue
            numbers = read_column(link.folder, record, link.step, table, ROWS)
            yield Counted(link, record, table, ~_among(numbers, newer))
            here.append(np.sort(numbers))
        newer = np.sort(np.concatenate(here), kind="stable")  # which merges what is sorted


def _among(numbers: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return which of some numbers are among others, which are sorted."""
    if not len(ordered):
        return np.zeros(len(numbers), bool)
    at = np.searchsorted(ordered, numbers)
    found: np.ndarray = ordered[np.minimum(at, len(ordered) - 1)] == numbers
    return found
