"""Table of one worker: rows that it reads, prefetches and pushes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from mpips.codecs import Codec
from mpips.datasets.csr import Seen
from mpips.errors import UserError
from mpips.kernels.vectors import all_finite
from mpips.layout.tables import Grouped, combine, digests_of, rows_of
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable
from mpips.ps.client import ROWS
from mpips.tables.load import RowLoad
from mpips.tables.server import table_fields
from mpips.tables.shard import Memory, NodeRows
from mpips.transport.push_sender import BUFFERS
from mpips.transport.remote_rows import RemoteRows
from mpips.transport.rows import Sections


@dataclass
class Counts:
    """Counts of a worker's use of a table.

    Attributes:
        pulled: Ids whose rows it has read.
        pushed: Ids whose gradients it has pushed.
        again: Repeated reads of rows that were written meanwhile.
        torn: Rows that stayed torn after many repeats.
        ahead: Ids in `pulled` whose remote rows were requested before.
    """

    pulled: int = 0
    pushed: int = 0
    again: int = 0
    torn: int = 0
    ahead: int = 0


class Holds(Protocol):
    """Has servers hold between two updates; see `mpips.ps.client.Pauses`."""

    in_step: bool

    def each(self, servers: Iterable[int], kind: int) -> Iterator[int]:
        """Yield the servers in some order; each holds until the iterator advances."""


class HashedRows:
    """Finds the rows of hashed ids, and counts collisions. Collective: no.

    Args:
        name: Name of the table.
        rows: Number of its rows.

    Attributes:
        seen: Digests of the ids so far.
    """

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows, self.seen = name, rows, Seen(rows)
        self._ids = self._numbers = np.empty(0, np.int64)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id; reuses the result if the ids equal those of the last call.

        Args:
            ids: Integers or strings, shape (n,).

        Returns:
            Shape (n,), int64; read-only for the caller.

        Raises:
            UserError: If they are neither.
        """
        if ids.dtype != self._ids.dtype or not np.array_equal(ids, self._ids):
            digests = digests_of(self._name, ids)
            self.seen.add(digests)
            self._ids, self._numbers = ids.copy(), rows_of(digests, self._rows)
        return self._numbers


class WorkerTable:
    """A table at one worker; see `mpips.tables.step_rows.StepRows`. Collective: no.

    Args:
        cluster: The job's ranks.
        window: Window of the store.
        number: Number of the table, in the order of the job's.
        table: The table.
        codec: Codec of pulls from other nodes.
        held: Has servers of this node hold while rows are read; None if reads are not consistent.

    Attributes:
        table: As given.
        counts: Counts of its use.
        ownership: Server of each row.
        hashed: Finds the rows of hashed ids; None if ids are row numbers.
        load: Rows read and pushed, by server.
        remote: Reads rows of other nodes.
        all_local: Whether all rows are on this node.
    """

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        number: int,
        table: JobTable,
        codec: Codec | None,
        held: Holds | None,
    ) -> None:
        self._held = held
        ranks = cluster.roles.owners
        self.table, self.counts = table, Counts()
        self.ownership = table.owned_by(len(ranks))
        rows = table.table.rows
        self.hashed = HashedRows(table.name, rows) if table.table.hashed else None
        self.load = RowLoad(self.ownership)
        self._sections = Sections(window, cluster.rank, table.name)
        self._dtype = self._sections.sums.dtype
        self.remote = RemoteRows(cluster, number, table, self._dtype, codec, held is not None)
        self._ids = self._places = np.empty(0, np.int64)
        self._grouped: Grouped | None = None
        local = {server: rank for server, rank in enumerate(ranks) if cluster.is_local(rank)}
        self.all_local, memories = len(local) == len(ranks), dict[int, Memory]()
        for server, rank in local.items():
            fields = table_fields(table, len(ranks), server, self._dtype.name)
            memories[server] = {each.name: window.view(rank, each.name) for each in fields}
        self._local = NodeRows(self.ownership, memories)
        self._each = {k: NodeRows(self.ownership, {k: one}) for k, one in memories.items() if held}

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id, shape (n,), of an integer dtype."""
        flat = ids.reshape(-1)
        if self.hashed is not None:
            return self.hashed.find(flat)
        self.ownership.check(flat)  # also if they equal those of the last call
        return flat

    def clear(self, seq: int) -> None:
        """Remove all rows from the buffer of a push."""
        self._sections.starts[seq % BUFFERS] = 0

    def ask(self, ids: np.ndarray, later: bool = False) -> None:
        """Request remote rows of a later pull, now or when the next read of the shards begins."""
        ask = self.remote.begin_later if later else self.remote.begin_ahead
        ask(ids.copy(), self.ownership.sort(self.ownership.places(ids)))

    def pull(self, ids: np.ndarray) -> np.ndarray:
        """Return rows, shape (n, dim)."""
        out = np.empty((len(ids), self.table.dim), self._dtype)
        if self.all_local:  # no remote rows: nothing is sorted
            self._gather(self._locate(ids), out)
        else:
            self._pull_remote(ids, out)
        self.counts.pulled += len(ids)
        self.load.pull(self._places)
        return out

    def _pull_remote(self, ids: np.ndarray, out: np.ndarray) -> None:
        coming = self.remote.taken(ids)
        if coming is None:
            coming = self.remote.begin(self._group(ids))
        else:
            self._ids, self._grouped = ids.copy(), coming.grouped
            self._places = coming.grouped.places
            self.counts.ahead += len(ids)
        self._gather(self._places, out)
        self.remote.wait(coming, out)

    def _gather(self, places: np.ndarray, out: np.ndarray) -> None:
        """Read the rows of this node."""
        for rows in self._readers(places):
            again, torn = rows.gather(places, out)
            self.counts.again += again
            self.counts.torn += torn

    def _readers(self, places: np.ndarray) -> Iterator[NodeRows]:
        """Yield readers of this node's rows: of all servers, or of each server while it holds."""
        if self._held is None or not self._held.in_step:
            yield self._local
            return
        owners = np.unique(np.searchsorted(self.ownership.begins, places, "right") - 1)
        asked = [server for server in owners.tolist() if server in self._each]
        for server in self._held.each(asked, ROWS):
            yield self._each[server]

    def push(self, seq: int, ids: np.ndarray, grads: np.ndarray, named: np.ndarray) -> None:
        """Add the gradients of rows to a push.

        Args:
            seq: Number of the push.
            ids: Row numbers from `numbers`.
            grads: Gradients from `check_gradients`.
            named: The user's ids.

        Raises:
            UserError: If there are too many rows, or the sum of one is not finite; then the push is
                unchanged.
        """
        k, s = seq % BUFFERS, self._sections
        given, count = ids, len(ids)
        if s.starts[k, -1]:  # a further push in this step
            ids, grads = self._with_earlier(k, ids, grads)
        grouped = self._group(ids)
        rows = len(grouped.local)
        if rows > self.table.push_rows:
            got = f"{rows:,} rows of table {self.table.name!r} in one push"
            remedy = f"give the table push_rows={rows}, or take smaller batches"
            raise UserError(got, f"at most {self.table.push_rows:,}", remedy)
        room = s.sums[k, :rows]
        sums = combine(grouped, grads, None if s.starts[k, -1] else room)
        if not all_finite(sums.reshape(-1)):
            id_, what = _not_finite(grouped, sums, grads, named)
            row = "row" if self.hashed is None else "id"
            raise UserError(f"{what} {row} {id_} of table {self.table.name!r}", "finite numbers")
        if sums is not room:
            room[:] = sums
        s.places[k, :rows] = grouped.local
        self.counts.pushed += count
        self.load.push(given, grouped.bounds - s.starts[k])
        s.starts[k] = grouped.bounds

    def sums(self, seq: int) -> np.ndarray:
        """Return the gradients in a push as one vector, a view."""
        k, s = seq % BUFFERS, self._sections
        return s.sums[k, : s.starts[k, -1]].reshape(-1)

    def _locate(self, ids: np.ndarray) -> np.ndarray:
        """Return the places of ids; reuses the result if the ids equal those of the last call."""
        if not np.array_equal(ids, self._ids):
            self._places, self._grouped = self.ownership.places(ids), None
            self._ids = ids.copy()
        return self._places

    def _group(self, ids: np.ndarray) -> Grouped:
        """Return the ids sorted; a step's ids are sorted once."""
        places = self._locate(ids)
        if self._grouped is None:
            self._grouped = self.ownership.sort(places)
        return self._grouped

    def _with_earlier(
        self, k: int, ids: np.ndarray, grads: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and gradients in the buffer, followed by the given ones."""
        s = self._sections
        if ids.dtype != np.int64:  # NumPy would concatenate uint64 and int64 to floats
            self._locate(ids)
            ids = ids.astype(np.int64)
        edges = s.starts[k].tolist()
        earlier = [
            self.ownership.rows_of(server, s.places[k, begin:end])
            for server, (begin, end) in enumerate(pairwise(edges))
        ]
        return np.concatenate([*earlier, ids]), np.concatenate([s.sums[k, : edges[-1]], grads])

    def check_gradients(self, ids: np.ndarray, grads: Any) -> np.ndarray:
        """Return gradients in the form that `combine` takes, shape (len(ids), dim).

        Raises:
            UserError: If they are not numbers, or have another shape.
        """
        name, dim = self.table.name, self.table.dim
        found = np.asarray(grads)
        if found.dtype.kind not in "fiu":
            raise UserError(f"gradients of table {name!r} of dtype {found.dtype}", "real numbers")
        if found.shape != (*ids.shape, dim):
            got = f"gradients of table {name!r} of shape {found.shape}"
            raise UserError(got, f"{(*ids.shape, dim)}, a row of {dim} for each id")
        with np.errstate(over="ignore"):  # too large values become infinite, and are refused
            return np.ascontiguousarray(found.reshape(-1, dim), self._dtype)


def _not_finite(
    grouped: Grouped, sums: np.ndarray, grads: np.ndarray, ids: np.ndarray
) -> tuple[Any, str]:
    """Return an id whose row has a sum that is not finite, and the cause in words.

    Args:
        grouped: All ids of the step; those of this call are the last ones.
        sums: Sums of their rows.
        grads: Gradients of the ids.
        ids: The user's ids of this call.
    """
    found, column = np.argwhere(~np.isfinite(sums))[0].tolist()
    alike = grouped.order[grouped.starts[found] : grouped.starts[found + 1]]
    wrong = alike[~np.isfinite(grads[alike, column])]
    if len(wrong):
        at, what = wrong[0], f"{grads[wrong[0], column]} in the gradient of"
    else:
        at, what = alike[-1], f"{sums[found, column]} in the sum of {len(alike)} gradients of"
    return ids[at - (len(grads) - len(ids))], what
