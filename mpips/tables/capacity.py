"""Capacity of lazy tables: the rows that each owner can hold.

Such a table reserves addresses for as many lines as its host's memory could hold, so that nothing
moves while it grows, and readers need no lock; what is reserved costs nothing until it is touched.
A host's memory that nothing else wants is divided among the lazy tables of its owners: first those
have all their rows that take less than an equal share.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mpips.mpi.collectives import gather_all
from mpips.mpi.world import Cluster
from mpips.planning.table_rules import EVICTION_BYTES
from mpips.planning.tables import JobTable, room_bytes

Lines: TypeAlias = Mapping[tuple[str, int], int]  # by table and number of the owner
KEY_BYTES = 27  # of a line at most: its key and its stripe's share, and entries of two indices
LEFT_PART = 16  # of so many parts of a host's memory one is left to others


def lines_of(
    cluster: Cluster,
    tables: Sequence[JobTable],
    owners: Sequence[int],
    dtype: str,
    nbytes_of: Callable[[int, Lines], int],
) -> Lines:
    """Return how many lines each owner has for each lazy table. Collective: yes, if any is.

    Args:
        cluster: The job's ranks.
        tables: All tables of the job.
        owners: The ranks that own rows of them.
        dtype: Of the rows.
        nbytes_of: Returns the bytes of a rank's segment if owners have so many lines.
    """
    lazy = [table for table in tables if table.table.lazy]
    if not lazy:
        return {}
    free: dict[str, int] = {}
    for host, room in gather_all(cluster.comm, (cluster.hosts[cluster.rank], room_bytes(cluster))):
        free[host] = min(room, free.get(host, room))
    none = {(table.name, owner): 0 for table in lazy for owner in range(len(owners))}
    found: dict[tuple[str, int], int] = {}
    for host, room in free.items():
        ranks = [rank for rank in range(cluster.world) if cluster.hosts[rank] == host]
        others = sum(nbytes_of(rank, none) for rank in ranks)
        here = [k for k, rank in enumerate(owners) if rank in ranks]
        left = room - room // LEFT_PART - others
        found |= divide(lazy, here, left, len(owners), np.dtype(dtype).itemsize)
    return found


def divide(
    tables: Sequence[JobTable], here: Sequence[int], room: int, owners: int, itemsize: int
) -> dict[tuple[str, int], int]:
    """Divide a host's bytes among the lazy tables of its owners.

    Args:
        tables: The lazy ones.
        here: Numbers of the owners on this host.
        room: Bytes.
        owners: How many there are in all.
        itemsize: Bytes of a number in a row.
    """
    wanted = []
    for table in tables:
        each = table.rule.width(table.dim) * itemsize + KEY_BYTES
        if table.table.evict_after is not None:
            each += EVICTION_BYTES
        owned = table.owned_by(owners)
        wanted += [(owned.count(k) * each, each, (table.name, k)) for k in here]
    found = {}
    for left, (needed, each, which) in zip(range(len(wanted), 0, -1), sorted(wanted), strict=True):
        got = max(0, min(needed, room // left))
        found[which], room = got // each, room - got
    return found
