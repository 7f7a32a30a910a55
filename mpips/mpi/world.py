"""World of a job: ranks, nodes, roles and waiting."""

import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from mpips.health import status_board
from mpips.layout.roles import Roles
from mpips.mpi.abort import Failures
from mpips.mpi.collectives import Arrays, Mailbox, begin_barrier
from mpips.mpi.start import MPI, TAG_NEVER, share_cores
from mpips.mpi.waiting import Backoff, attend


class Cluster:
    """The job's ranks, their nodes and roles; and how they wait.

    Args:
        comm: Communicator of the whole job; duplicated.
        node_size: Number of consecutive ranks to treat as a node; 0 for the real nodes.
        everyone: All ranks of the world, which share its cores; by default those of `comm`.

    Attributes:
        comm: Duplicate of the communicator.
        arrays: Messages of arrays on `comm`.
        node: Communicator of this rank's node.
        hosts: Host name of each rank.
        node_of: Node number of each rank.
        cores_a_rank: Cores of this host, divided by its ranks.
        ranks_per_core: Ranks of this host, divided by its cores.
        failures: Dead ranks, if the job continues without them.
        serving: Called whenever this rank waits, to answer ranks that wait for it. Must not block.

    Collective: yes, over `comm`, construction and `free`.
    """

    serving: Callable[[], object] | None = None

    def __init__(
        self, comm: MPI.Intracomm, node_size: int = 0, everyone: MPI.Intracomm | None = None
    ) -> None:
        self.comm, control = comm.Dup(), comm.Dup()
        self.failures = Failures([self.comm, control])
        self.arrays = Arrays(self.comm, self.failures)
        self._mailbox = Mailbox(control, self.failures)
        self.rank, self.world = comm.rank, comm.size
        real = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        color = comm.rank // node_size if node_size else 0
        self.node: MPI.Intracomm = real.Split(color, key=comm.rank)  # type: ignore[assignment]
        real.Free()
        self._comms = [self.comm, control, self.node]
        leaders = comm.allgather(self.node.allgather(comm.rank)[0])
        order = sorted(set(leaders))
        self.node_of = [order.index(k) for k in leaders]
        self.hosts = comm.allgather(platform.node())
        masks = (everyone or comm).allgather((platform.node(), os.sched_getaffinity(0)))
        local_masks = [mask for host, mask in masks if host == platform.node()]
        self.cores_a_rank = len(set().union(*local_masks)) / len(local_masks)
        self.ranks_per_core = 1 / self.cores_a_rank
        share_cores(self.ranks_per_core > 1)
        self.threads = 0
        self.roles = Roles((), tuple(range(self.world)))

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of) + 1

    @cached_property
    def my_node(self) -> list[int]:
        """Ranks of this rank's node, increasing."""
        return [r for r in range(self.world) if self.is_local(r)]

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank assigns batches, starts checkpoints and prints."""
        return self.rank == self.roles.coordinator

    def is_local(self, rank: int) -> bool:
        """Return whether `rank` is on this rank's node, so that loads can read its memory."""
        return self.node_of[rank] == self.node_of[self.rank]

    def limit_threads(self, threads: int = 0) -> int:
        """Limit BLAS threads; return the limit.

        Args:
            threads: The limit; 0 for this rank's share of the cores.
        """
        from threadpoolctl import threadpool_limits

        share = threads or max(1, int(self.cores_a_rank))
        threadpool_limits(share)
        self.threads = share
        return share

    def progress(self) -> None:
        """Enter MPI, so that remote reads and messages progress, and serve. Blocks: no.

        Raises:
            Lost: If a rank has died that the job needs.
        """
        self.failures.attempt(self.comm.Iprobe, MPI.ANY_SOURCE, TAG_NEVER)
        if self.serving is not None:
            self.serving()
        attend()

    def wait(self, ready: Callable[[], bool], what: int = status_board.OTHERS) -> float:
        """Wait until `ready()`. The rank frees its core, MPI progresses, and signals are noticed.

        Args:
            ready: Called repeatedly.
            what: Phase of the wait, one of `mpips.health.status_board`.

        Returns:
            Seconds waited.
        """
        if ready():
            return 0.0
        start = time.perf_counter()
        backoff, before = Backoff(self.ranks_per_core), status_board.begin_wait(what, start)
        try:
            while not ready():
                self.progress()
                backoff.pause()
        finally:
            end = time.perf_counter()
            status_board.end_wait(before, end)
        return end - start

    def wait_request(self, request: MPI.Request) -> float:
        """Wait for a non-blocking operation; return the seconds waited."""
        return self.wait(request.Test)

    def barrier(self) -> float:
        """Wait for every rank; return the seconds waited. Collective: yes."""
        return self.wait_request(begin_barrier(self.comm))

    def send(self, dest: int | Iterable[int], kind: str, payload: Any = None) -> None:
        """Send a control message, rare and small, to one rank or several; `poll` receives it.

        Blocks: no.
        """
        for rank in dest if isinstance(dest, Iterable) else (dest,):
            self._mailbox.send(rank, kind, payload)

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the control messages that have come, as (source, kind, payload).

        Messages of one source come in the order in which they were sent. A rank that has died sends
        ``lost``, if the job survives its death; earlier messages may come after that. Blocks: no.
        """
        messages = self._mailbox.poll()
        return messages + self.failures.news() if self.failures.on else messages

    def gather(self, value: object) -> list[Any] | None:
        """Send every rank's value to the coordinator; return the values by rank there, else None.

        The value of a dead rank that the job survives is None.

        Collective: yes. Blocks: on the coordinator, but never inside MPI.
        """
        if not self.is_coordinator:
            self._mailbox.bring(self.roles.coordinator, value)
            return None
        others = set(range(self.world)) - {self.rank}
        values = {self.rank: value, **_brought_by(self, self._mailbox, others)}
        return [values.get(rank) for rank in range(self.world)]

    def share(self, value: object, root: int) -> Any:
        """Return the value of rank `root` on every living rank, by messages from it.

        Collective: yes. Blocks: on the others, but never inside MPI.
        """
        if self.rank != root:
            return _brought_by(self, self._mailbox, {root})[root]
        for rank in set(range(self.world)) - self.failures.lost - {root}:
            self._mailbox.bring(rank, value)
        return value

    def free(self) -> None:
        """Free the communicators, unless a rank has died; may be called twice. Collective: yes."""
        self.wait(self._mailbox.empty)
        self.failures.forget()
        while self._comms and not self.failures.lost:
            self._comms.pop().Free()


def _brought_by(cluster: Cluster, mailbox: Mailbox, ranks: set[int]) -> dict[int, Any]:
    """Wait for a value from each of `ranks` that lives; return the values by rank."""
    values: dict[int, Any] = {}

    def complete() -> bool:
        for rank in ranks - set(values):  # one from each; a rank may have sent later ones, too
            for brought in mailbox.brought_by(rank):
                values[rank] = brought
        return ranks <= set(values) | cluster.failures.lost

    cluster.wait(complete)
    return values
