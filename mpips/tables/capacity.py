"""Capacity of lazy tables: the rows that each owner can hold.

A lazy table reserves addresses for as many lines as its host's memory could hold. So no line moves
while the table grows, and readers need no lock. Reserved memory costs nothing until it is touched.
The free memory of a host is divided among the lazy tables of its owners. Tables that need less than
an equal share get room for all their rows first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mpips.mpi.collectives import gather_all
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable, room_bytes

Lines: TypeAlias = Mapping[tuple[str, int], int]  # lines by table and number of the owner
KEY_BYTES = 27  # of a line at most: its key, its share of a stripe, and entries of two indices
AGE_BYTES = 26  # and with eviction: the epoch of its last push, and as many entries again
LEFT_PART = 16  # one of so many parts of a host's memory stays free


def lines_of(
    cluster: Cluster,
    tables: Sequence[JobTable],
    owners: Sequence[int],
    dtype: str,
    nbytes_of: Callable[[int, Lines], int],
) -> Lines:
    """Return the number of lines of each lazy table at each owner. Collective: yes, if any is lazy.

    Args:
        cluster: The job's ranks.
        tables: All tables of the job.
        owners: Ranks that own rows of the tables.
        dtype: dtype of the rows.
        nbytes_of: Returns the bytes of a rank's segment if the owners have these numbers of lines.
    """
    lazy = [table for table in tables if table.table.lazy]
    if not lazy:
        return {}
    free: dict[str, int] = {}
    for host, room in gather_all(cluster.comm, (cluster.hosts[cluster.rank], room_bytes(cluster))):
        free[host] = min(room, free.get(host, room))
    none = {(table.name, owner): 0 for table in lazy for owner in range(len(owners))}
    lines: dict[tuple[str, int], int] = {}
    for host, room in free.items():
        ranks = [rank for rank in range(cluster.world) if cluster.hosts[rank] == host]
        others = sum(nbytes_of(rank, none) for rank in ranks)
        local = [k for k, rank in enumerate(owners) if rank in ranks]
        free_bytes = room - room // LEFT_PART - others
        lines |= divide(lazy, local, free_bytes, len(owners), np.dtype(dtype).itemsize)
    return lines


def divide(
    tables: Sequence[JobTable], here: Sequence[int], room: int, owners: int, itemsize: int
) -> dict[tuple[str, int], int]:
    """Divide a host's bytes among the lazy tables of its owners; returns numbers of lines.

    Args:
        tables: Lazy tables.
        here: Numbers of the owners on this host.
        room: Bytes to divide.
        owners: Number of owners in all.
        itemsize: Bytes of a number in a row.
    """
    wanted = []
    for table in tables:
        each = table.rule.width(table.dim) * itemsize + KEY_BYTES
        if table.table.evict_after is not None:
            each += AGE_BYTES
        owned = table.owned_by(owners)
        wanted += [(owned.count(k) * each, each, (table.name, k)) for k in here]
    lines = {}
    for rest, (needed, each, which) in zip(range(len(wanted), 0, -1), sorted(wanted), strict=True):
        got = max(0, min(needed, room // rest))
        lines[which], room = got // each, room - got
    return lines
