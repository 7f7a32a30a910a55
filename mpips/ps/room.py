"""How many rows each server has room for of tables that keep those alone that are touched.

Such a table reserves addresses for as many lines as its host's memory could hold, so that nothing
moves while it grows, and readers need no lock; what is reserved costs nothing until it is touched.
A host's memory that nothing else wants is divided among the lazy tables of its servers: first those
have all their rows that take less than an equal share.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpips.cluster.collectives import gather_all
from mpips.cluster.world import Cluster
from mpips.planning.tables import JobTable, room_bytes

if TYPE_CHECKING:
    from mpips.ps.design import Design

Lines: TypeAlias = Mapping[tuple[str, int], int]  # by table and server
KEY_BYTES = 27  # of a line at most: its key and its stripe's share, and entries of two indices
SPARED = 16  # of so many parts of a host's memory one is left to others


def lines_of(cluster: Cluster, design: "Design") -> Lines:
    """Return how many lines each server has for each lazy table. Collective: yes, if any is."""
    lazy = [table for table in design.tables if table.table.lazy]
    if not lazy:
        return {}
    free: dict[str, int] = {}
    for host, room in gather_all(cluster.comm, (cluster.hosts[cluster.rank], room_bytes(cluster))):
        free[host] = min(room, free.get(host, room))
    servers = range(len(cluster.roles.servers))
    none = {(table.name, server): 0 for table in lazy for server in servers}
    found: dict[tuple[str, int], int] = {}
    for host, room in free.items():
        ranks = [rank for rank in range(cluster.world) if cluster.hosts[rank] == host]
        others = sum(design.plan(cluster, rank, none).nbytes for rank in ranks)
        here = [k for k, rank in enumerate(cluster.roles.servers) if rank in ranks]
        found |= divide(lazy, here, room - room // SPARED - others, design)
    return found


def divide(
    tables: Sequence[JobTable], here: Sequence[int], room: int, design: "Design"
) -> dict[tuple[str, int], int]:
    """Divide a host's bytes among the lazy tables of its servers."""
    itemsize, servers = np.dtype(design.dtype).itemsize, len(design.shards)
    wanted = []
    for table in tables:
        each = table.rule.width(table.dim) * itemsize + KEY_BYTES
        owned = table.owned_by(servers)
        wanted += [(owned.count(k) * each, each, (table.name, k)) for k in here]
    found = {}
    for left, (needed, each, which) in zip(range(len(wanted), 0, -1), sorted(wanted), strict=True):
        got = max(0, min(needed, room // left))
        found[which], room = got // each, room - got
    return found
