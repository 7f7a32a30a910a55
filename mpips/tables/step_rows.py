"""Table rows in a worker's step: reads, and pushes of gradients.

Rows are read from the memory of the servers that own them, each as it is when it is read; those of
other nodes' servers come by message (`mpips.transport.remote_rows`). Where reads are consistent
those of a step are read while their server holds between two updates, all that a pull wants of it
at once; what is evaluated in between is read as in other runs. What is pushed goes into the buffer
of the step's push (`mpips.transport.rows`), and out with it.

Remote rows may be asked for before they are pulled: in mode async a step before, in mode ssp when
the read of the step begins, as those of a step before would lack what it promises.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpips.codecs import Codec
from mpips.errors import UserError, unknown
from mpips.kernels.vectors import scale, sum_squares
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable
from mpips.tables.worker_table import Holds, WorkerTable
from mpips.transport.remote_rows import ASIDE


class RowsAtWork:
    """A worker's tables. Collective: no. Blocks: no, but for rows of other nodes.

    Args:
        cluster: The job's ranks.
        window: Of the store.
        tables: Of the job.
        codec: Of pulls from other nodes.
        ahead: Whether rows may be read a step before they are used.
        held: Has servers of this node hold while rows of a step are read, where they do.
        early: Whether rows may be read when the shards are, before `begin`; see `begin_read`.

    Attributes:
        weight: The share that the batch in work has in the step's gradient.
        reads_ahead: Whether it is of any use to ask for rows: some are remote, and may be a step
            old.
        reads_early: Whether it is of any use to ask for rows between `begin_read` and `begin`.
        asks: Whether anything has been asked for a step before it was pulled.
        alone: Keeps out of MPI what else does anything there, while rows are read.
        later: By how many rounds rows that are asked for ahead are to hold more than those read.
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
        local = all(table.all_near for table in self._tables.values())
        self.reads_ahead, self.asks = ahead and not local, False
        self.reads_early, self._reading = early and not local, False
        self.end()

    def begin_read(self, clock: int, own: int) -> None:
        """Ask for what was to be asked for, now that the next step's read of the shards begins.

        Args:
            clock: That rows are to be read at, as the shards are.
            own: Pushes of this worker that they are to hold.
        """
        if self.reads_early:
            self._reading = True
            for table in self._tables.values():
                table.remote.want(clock, own)
                table.remote.begin_read()

    def begin(self, seq: int) -> None:
        """Begin the step of push `seq`, whose buffer is free, with no rows in it."""
        self._seq = seq
        for table in self._tables.values():
            table.clear(seq)
        if self._held is not None:
            self._held.in_step = True
        if self._wanted[1] < 0 or self._reading:
            self._reading = False
            self.want(0)

    def end(self) -> None:
        """End the step: its push is made, or it has none."""
        if self._reading:  # and no step was begun
            self._reading = False
            self.want(0)
        if self._held is not None:
            self._held.in_step = False
            self.want(ASIDE, ASIDE)

    def want(self, version: int, before: int = 0) -> None:
        """Read rows from now on that hold so many rounds; in modes without rounds it is 0.

        Args:
            version: The rounds.
            before: In mode hybrid, the rounds before the one that they are read for; negative if
                they are for no step.
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
        """Ask for the remote rows of a later pull; see `mpips.Worker.ask_rows`."""
        table, found = _find(self._tables, name, ids)
        numbers = table.numbers(found)
        if table.all_near:
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
        """Ask for what steps will pull, one behind the other, unless that has been asked for.

        Args:
            lists: Of each step ids by table.
        """
        for wanted in lists:
            for name, ids in wanted.items():
                table, found = _find(self._tables, name, ids)
                if not table.remote.has_asked(table.numbers(found)):
                    self.ask(name, ids)

    def advance(self) -> None:
        """Get on with what was asked for. Blocks: no."""
        for table in self._tables.values():
            table.remote.advance()

    def abandon(self) -> None:
        """Wait for what was asked for, which nobody will pull. Blocks: until it is here."""
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
        """Return the square of the norm of what is pushed with the step, all tables together."""
        sums = (table.sums(self._seq) for table in self._tables.values())
        return sum(sum_squares(vector) for vector in sums)

    def scale(self, factor: float) -> None:
        """Scale what is pushed with the step."""
        for table in self._tables.values():
            scale(table.sums(self._seq), factor)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of requests that this rank has sent to other nodes, and of the rows that came."""
        each = [table.remote for table in self._tables.values()]
        return sum(remote.bytes_sent for remote in each), sum(
            remote.bytes_received for remote in each
        )

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what was done with each table."""
        found = {}
        for name, table in self._tables.items():
            bits = None if table.hashed is None else table.hashed.seen.bits
            found[name] = {**vars(table.counts), "load": table.load.stats(), "hashed": bits}
        return found


def _find(tables: Mapping[str, WorkerTable], name: str, ids: Any) -> tuple[WorkerTable, np.ndarray]:
    if not isinstance(name, str) or name not in tables:
        raise unknown("table", str(name), tables)
    try:
        found = np.asarray(ids)
    except ValueError:  # NumPy makes no array of lists of several lengths
        raise UserError(f"ids of table {name!r} of several lengths", "one array of them") from None
    if not found.size:  # of an empty list it is a float
        found = found.astype(np.int64)
    return tables[name], found
