"""Table rows in a worker's step: reads, and pushes of gradients.

A worker reads rows from the memory of local servers, each row at its present value. It requests
rows of remote servers by message (`mpips.transport.remote_rows`). If reads are consistent, each
server holds between two updates while the worker reads all rows of a pull from it; evaluations read
as in other runs. The gradients of a step go into the buffer of its push (`mpips.transport.rows`).

A worker may request remote rows before it pulls them: in mode async one step ahead, in mode ssp
when the step's read of the shards begins. In mode ssp, rows requested a step ahead would violate
the staleness bound.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpips.codecs import Codec
from mpips.errors import unknown
from mpips.kernels.vectors import scale, sum_squares
from mpips.layout.tables import as_array
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable
from mpips.tables.worker_table import Holds, WorkerTable
from mpips.transport.remote_rows import ASIDE


class StepRows:
    """Tables of a worker. Collective: no. Blocks: only for rows of other nodes.

    Args:
        cluster: The job's ranks.
        window: Window of the store.
        tables: Tables of the job.
        codec: Codec of pulls from other nodes.
        ahead: Whether rows may be read a step before their use.
        held: Has servers of this node hold while a step's rows are read; None if reads are not
            consistent.
        early: Whether rows may be read along with the shards, before `begin`; see `begin_read`.

    Attributes:
        weight: Weight of the present batch in the step's gradient.
        reads_ahead: Whether requests a step ahead are useful: some rows are remote, and may be a
            step old.
        reads_early: Whether requests between `begin_read` and `begin` are useful.
        asks: Whether any rows were requested a step ahead.
        alone: Keeps other threads out of MPI while rows are read.
        later: Number of rounds that rows requested ahead must contain beyond the present ones.
    """

    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    later = 0

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        tables: Sequence[JobTable],
        codec: Codec | None = None,
        ahead: bool = False,
        held: Holds | None = None,
        early: bool = False,
    ) -> None:
        self._held = held
        self._tables = {
            table.name: WorkerTable(cluster, window, number, table, codec, self._held)
            for number, table in enumerate(tables)
        }
        self._seq, self.weight = 1, 1.0
        self._wanted = 0, 0
        local = all(table.all_local for table in self._tables.values())
        self.reads_ahead, self.asks = ahead and not local, False
        self.reads_early, self._reading = early and not local, False
        self.end()

    def begin_read(self, clock: int, own: int) -> None:
        """Send the requests that wait for the next step's read of the shards, which begins now.

        Args:
            clock: Clock of the read, as for the shards.
            own: Number of pushes of this worker that the rows must contain.
        """
        if self.reads_early:
            self._reading = True
            for table in self._tables.values():
                table.remote.want(clock, own)
                table.remote.begin_read()

    def begin(self, seq: int) -> None:
        """Begin the step of push `seq`, whose buffer is free, without rows in it."""
        self._seq = seq
        for table in self._tables.values():
            table.clear(seq)
        if self._held is not None:
            self._held.in_step = True
        if self._wanted[1] < 0 or self._reading:
            self._reading = False
            self.want(0)

    def end(self) -> None:
        """End the step, with or without a push."""
        if self._reading:  # no step was begun
            self._reading = False
            self.want(0)
        if self._held is not None:
            self._held.in_step = False
            self.want(ASIDE, ASIDE)

    def want(self, version: int, before: int = 0) -> None:
        """Set the requirement of reads from now on; 0 in modes without rounds.

        Args:
            version: Number of rounds that the rows must contain.
            before: In mode hybrid, the number of rounds before the read's round; negative for reads
                outside steps.
        """
        self._wanted = version, before
        for table in self._tables.values():
            table.remote.want(version, before)

    def pull(self, name: str, ids: Any) -> np.ndarray:
        """Read rows of a table; see `mpips.Worker.pull_rows`."""
        table, found = _find(self._tables, name, ids)
        numbers = table.numbers(found)
        with self.alone():
            rows = table.pull(numbers)
        return rows.reshape(*found.shape, table.table.dim)

    def ask(self, name: str, ids: Any) -> None:
        """Request the remote rows of a later pull; see `mpips.Worker.ask_rows`."""
        table, found = _find(self._tables, name, ids)
        numbers = table.numbers(found)
        if table.all_local:
            return
        if self.reads_ahead or self._reading:
            self.asks |= self.reads_ahead
            with self.alone():
                if self.later:
                    table.remote.want(*(rounds + self.later for rounds in self._wanted))
                table.ask(numbers)
                if self.later:
                    table.remote.want(*self._wanted)
        elif self.reads_early:
            table.ask(numbers, later=True)

    def ask_in_turn(self, lists: Iterable[Mapping[str, Any]]) -> None:
        """Request the rows of several steps in order, unless they are already requested.

        Args:
            lists: Ids by table, for each step.
        """
        for wanted in lists:
            for name, ids in wanted.items():
                table, found = _find(self._tables, name, ids)
                if not table.remote.has_asked(table.numbers(found)):
                    self.ask(name, ids)

    def advance(self) -> None:
        """Progress the requests. Blocks: no."""
        for table in self._tables.values():
            table.remote.advance()

    def abandon(self) -> None:
        """Wait for requested rows and drop them. Blocks: until they are here."""
        for table in self._tables.values():
            table.remote.abandon()

    def push(self, name: str, ids: Any, grads: Any) -> None:
        """Add gradients to the push of the step; see `mpips.Worker.push_rows`."""
        table, found = _find(self._tables, name, ids)
        checked = table.check_gradients(found, grads)
        if self.weight != 1:
            checked = checked * checked.dtype.type(self.weight)
        table.push(self._seq, table.numbers(found), checked, found.reshape(-1))

    def sum_squares(self) -> float:
        """Return the squared norm of the step's row gradients, over all tables."""
        sums = (table.sums(self._seq) for table in self._tables.values())
        return sum(sum_squares(vector) for vector in sums)

    def scale(self, factor: float) -> None:
        """Scale the step's row gradients."""
        for table in self._tables.values():
            scale(table.sums(self._seq), factor)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of this rank's requests to other nodes, and of the received rows."""
        each = [table.remote for table in self._tables.values()]
        sent = sum(remote.bytes_sent for remote in each)
        return sent, sum(remote.bytes_received for remote in each)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counts of each table."""
        found = {}
        for name, table in self._tables.items():
            bits = None if table.hashed is None else table.hashed.seen.bits
            found[name] = {**vars(table.counts), "load": table.load.stats(), "hashed": bits}
        return found


def _find(tables: Mapping[str, WorkerTable], name: str, ids: Any) -> tuple[WorkerTable, np.ndarray]:
    if not isinstance(name, str) or name not in tables:
        raise unknown("table", str(name), tables)
    return tables[name], as_array(name, ids)
