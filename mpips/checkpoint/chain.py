"""Table rows in a chain of checkpoints with the rows changed since.

The newest comes first: a row counts where it is found first, and is left out of older files.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpips.checkpoint.index import Contents, links
from mpips.checkpoint.rows import RowsFile


def counted_rows(folder: Path, contents: Contents, table: str) -> Iterator[RowsFile]:
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
            file = RowsFile(link.folder, record, link.step, table)
            if contents.base is None:  # as most are: numbers need not be read beforehand
                yield file
                continue
            numbers = file.numbers()
            yield replace(file, keep=~_among(numbers, newer))
            here.append(np.sort(numbers))
        newer = np.sort(np.concatenate(here), kind="stable")  # which merges what is sorted


def _among(numbers: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return which of some numbers are among others, which are sorted."""
    if not len(ordered):
        return np.zeros(len(numbers), bool)
    at = np.searchsorted(ordered, numbers)
    found: np.ndarray = ordered[np.minimum(at, len(ordered) - 1)] == numbers
    return found
