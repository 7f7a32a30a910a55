"""Rows of a push: gradients of single table rows.

A worker has summed the gradients of each row and grouped them by the server that owns it. They lie
in its segment, in the buffer of the push: one word announces both to the servers of its node, and
the buffer is free when both are applied (`mpips.transport.channel`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpips.mpi.window import Field, Window
from mpips.planning.tables import JobTable
from mpips.transport.push_sender import BUFFERS

PLACE = "tables/"  # of a table's fields in a segment


def rows_fields(tables: Sequence[JobTable], servers: int, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a worker's segment that carry the rows of its pushes."""
    return tuple(
        field
        for table in tables
        for field in (
            Field(f"{PLACE}{table.name}/starts", "i8", (BUFFERS, servers + 1)),
            Field(f"{PLACE}{table.name}/places", "i8", (BUFFERS, table.push_rows), sparse=True),
            Field(
                f"{PLACE}{table.name}/sums",
                dtype,
                (BUFFERS, table.push_rows, table.dim),
                sparse=True,
            ),
        )
    )


class Section(NamedTuple):
    """What a push has for one server's part of a table.

    Attributes:
        places: Where the rows lie in that part, no two alike, shape (k,), dtype int64.
        sums: The sum of the gradients of each, shape (k, dim).
    """

    places: np.ndarray
    sums: np.ndarray


class Sections:
    """The rows of a worker's open pushes, of one table. Collective: no.

    Attributes:
        starts: Where the rows of each server begin, and the last ones end, shape (BUFFERS,
            servers + 1), dtype int64.
        places: See `Section`; shape (BUFFERS, the most that a push may hold), dtype int64.
        sums: Likewise, with the length of a row.
    """

    def __init__(self, window: Window, rank: int, table: str) -> None:
        names = (f"{PLACE}{table}/{name}" for name in ("starts", "places", "sums"))
        self.starts, self.places, self.sums = (window.view(rank, name) for name in names)

    def of(self, seq: int, server: int) -> Section:
        """Return what push `seq` has for a server."""
        k = seq % BUFFERS
        begin, end = self.starts[k, server : server + 2].tolist()
        return Section(self.places[k, begin:end], self.sums[k, begin:end])
