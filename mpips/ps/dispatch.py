"""Dispatch of batches to workers; both halves.

On the coordinator's node a worker publishes how many batches it has taken and the coordinator
publishes grants in a ring of shared memory, two ahead; every word has one writer. From another node
a worker asks by message, two ahead as well, and the coordinator answers each request by a message.
A worker whose batches take long to read has more of them ahead: it asks for more at first, or, on
the coordinator's node, counts some as taken on which no work has begun. Each batch comes with its
number in the order in which they are assigned, from 0 in each job.
"""

from collections import deque

import numpy as np

from mpips.datasets.ledger import EXHAUSTED, Range, SampleAllocator
from mpips.kernels.atomics import find_ahead, no_limit, observe, publish
from mpips.kernels.vectors import addresses_of
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster

AHEAD = 2
RING = 4  # more than AHEAD, so that an entry is read before it is written again
Grant = tuple[int, int, int, int]  # a batch and its number
GIVEN = 0  # word of a worker's ring: grants given
TAKEN = 0  # word of a worker's segment: grants taken, or read and to be replaced
CLOSED = np.iinfo(np.int64).min


def coordinator_fields(workers: int) -> tuple[Field, ...]:
    """Return the fields of the coordinator's segment: a line of words a worker."""
    return (Field("grants", "i8", (workers, 8 + 8 * RING)),)


def worker_fields() -> tuple[Field, ...]:
    """Return the fields of a worker's segment."""
    return (Field("taken", "i8", (8,)),)


class Dispatcher:
    """The coordinator's half: gives batches to workers. Collective: no.

    Args:
        allocator: Which batches there are.
        ahead: Batches granted beside the one that a worker works on.

    Attributes:
        allocator: As given.
        wants: What `mpips.kernels.atomics.find_ahead` finds where a local worker wants a batch.
    """

    def __init__(
        self, cluster: Cluster, window: Window, allocator: SampleAllocator, ahead: int = AHEAD
    ) -> None:
        assert ahead < RING, "an entry would be written before it is read"
        self._cluster, self.allocator, self._ahead = cluster, allocator, ahead
        self._grants = window.view(cluster.roles.owners[0], "grants")
        workers = list(enumerate(cluster.roles.workers))
        local = [(w, r) for w, r in workers if cluster.is_local(r)]
        words = addresses_of((window.view(r, "taken") for _, r in local), TAKEN)
        self._local = np.array([w for w, _ in local], np.int64)
        self._behind = np.full(len(workers), -ahead)  # grants given, less those ahead
        self._open = no_limit(len(workers))  # or `CLOSED`: nothing more is given
        self.wants = words, self._local, self._behind, self._open

    def serve(self) -> None:
        """Top up the rings of local workers. Blocks: no."""
        while True:
            found = find_ahead(*self.wants, 0)
            if found < 0:
                return
            self._give(int(self._local[found]))

    def answer(self, rank: int, _: None = None) -> None:
        """Answer a remote worker's request for a batch."""
        self._give(self._cluster.roles.workers.index(rank))

    def _give(self, worker: int) -> None:
        self._pass_on(worker, self._next(worker))

    def _pass_on(self, worker: int, grant: Grant) -> None:
        rank = self._cluster.roles.workers[worker]
        if self._cluster.is_local(rank):
            self._put(worker, grant)
        else:
            self._cluster.send(rank, "grant", grant)

    def _next(self, worker: int) -> Grant:
        number = self.allocator.issued
        batch = self.allocator.next(worker)
        if batch is None:
            self._open[worker] = CLOSED
        return (*(EXHAUSTED if batch is None else batch), number)

    def _put(self, worker: int, grant: Grant) -> None:
        ring = self._grants[worker]
        given = int(self._behind[worker]) + self._ahead
        at = 8 + 8 * (given % RING)
        ring[at : at + 4] = grant
        self._behind[worker] += 1
        publish(ring, GIVEN, given + 1)


class BatchQueue:
    """A worker's half: the batches granted to it, oldest first. Collective: no.

    Args:
        ahead: Batches asked for beside the one that is worked on.

    Attributes:
        numbers: Of the batches that have come and on which no work has begun, oldest first.
        exhausted: Whether no grant will follow those that have come.
    """

    def __init__(
        self, cluster: Cluster, window: Window, worker_id: int, ahead: int = AHEAD
    ) -> None:
        self._cluster, self._coordinator, self._ahead = cluster, cluster.roles.coordinator, ahead
        self._taken = window.view(cluster.rank, "taken")
        local = cluster.is_local(self._coordinator)
        self._ring = window.view(self._coordinator, "grants")[worker_id] if local else None
        self._come: deque[Grant] = deque()
        self.numbers: deque[int] = deque()
        self._seen = self._used = self._more = 0
        self._waits = self._got = 0  # batches asked for that have not come, and those that have
        self.exhausted = False

    def open(self, ahead: int = 0) -> None:
        """Ask for the first batches. On the coordinator's node they come unasked.

        Args:
            ahead: Batches that this worker wants beside those taken, if that is more.
        """
        self._more = max(0, ahead - self._ahead)
        if self._ring is None:
            for _ in range(self._ahead + self._more):
                self._ask()

    def _ask(self) -> None:
        self._waits += 1
        self._cluster.send(self._coordinator, "more")

    def follow(self, coordinator: int) -> None:
        """Ask another coordinator from now on: the one before has died.

        On its node nothing changes.
        """
        if self._ring is None:
            self._coordinator = coordinator
            self._cluster.send(coordinator, "asked", (self._waits, self._got))

    def granted(self, grant: Grant) -> None:
        """Note a grant that came by message."""
        self._waits -= 1
        self._got += grant[:3] != EXHAUSTED
        self._come.append(grant)

    def news(self) -> list[Range]:
        """Return the batches granted since the last call. Blocks: no."""
        if self._ring is not None:
            given = observe(self._ring, GIVEN)
            for k in range(self._seen, given):
                at = 8 + 8 * (k % RING)
                epoch, begin, end, number = self._ring[at : at + 4].tolist()
                self._come.append((epoch, begin, end, number))
            self._seen = given
            if self._more:
                self._show_taken()
        grants = [grant for grant in self._come if grant[:3] != EXHAUSTED]
        self.exhausted |= len(grants) < len(self._come)
        self._come.clear()
        self.numbers.extend(number for *_, number in grants)
        return [grant[:3] for grant in grants]

    def take(self) -> int:
        """Say that work on the oldest batch begins, so that another may be granted.

        Returns:
            The number of the batch.
        """
        self._used += 1
        if self._ring is not None:
            self._show_taken()
        elif not self.exhausted:
            self._ask()
        return self.numbers.popleft()

    def _show_taken(self) -> None:
        """Let the coordinator grant more.

        Entries of the ring that are not read yet have to stay.
        """
        publish(self._taken, TAKEN, min(self._used + self._more, self._seen))
