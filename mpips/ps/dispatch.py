"""Dispatch of batches to workers: the coordinator's half and the workers' half.

A **grant** assigns a batch to a worker. On the coordinator's node, a worker publishes the number of
batches that it has taken. The coordinator writes grants into a ring in shared memory, two ahead of
that number. Every word has one writer. A worker on another node requests batches by message, also
two ahead, and the coordinator answers each request with a message. A worker whose batches take long
to read gets more of them ahead. For this it requests more at first or, on the coordinator's node,
counts batches as taken early. Each batch has a number, in the order in which batches are assigned,
from 0 in each job.
"""

from collections import deque

import numpy as np

from mpips.datasets.ledger import EXHAUSTED, Range, SampleAllocator
from mpips.kernels.atomics import find_ahead, no_limit, observe, publish
from mpips.kernels.vectors import addresses_of
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster

AHEAD = 2
RING = 4  # more than AHEAD, so that a worker reads an entry before it is written again
Grant = tuple[int, int, int, int]  # a batch and its number
GRANTED = 0  # word of a worker's ring: number of grants
TAKEN = 0  # word of a worker's segment: number of grants taken, or counted as taken early
CLOSED = np.iinfo(np.int64).min


def coordinator_fields(workers: int) -> tuple[Field, ...]:
    """Return the fields of the coordinator's segment: a ring for each worker."""
    return (Field("grants", "i8", (workers, 8 + 8 * RING)),)


def worker_fields() -> tuple[Field, ...]:
    """Return the fields of a worker's segment."""
    return (Field("taken", "i8", (8,)),)


class Dispatcher:
    """Coordinator's half: assigns batches to workers. Collective: no.

    Args:
        cluster: The job's ranks.
        window: The window of the store.
        allocator: Returns the next batch of a worker.
        ahead: Number of batches granted to a worker beyond those that it has taken.

    Attributes:
        allocator: See Args.
        wants: Arguments of `mpips.kernels.atomics.find_ahead`, without `first`; it finds a local
            worker that needs a batch.
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
        self._behind = np.full(len(workers), -ahead)  # number of grants, minus `ahead`
        self._open = no_limit(len(workers))  # `CLOSED` for workers that get no more grants
        self.wants = words, self._local, self._behind, self._open

    def serve(self) -> None:
        """Fill the rings of local workers. Blocks: no."""
        while (found := find_ahead(*self.wants, 0)) >= 0:
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
        publish(ring, GRANTED, given + 1)


class BatchQueue:
    """Worker's half: batches granted to this worker, oldest first. Collective: no.

    Args:
        cluster: The job's ranks.
        window: The window of the store.
        worker_id: Number of this worker.
        ahead: Number of batches requested beyond the current one.

    Attributes:
        numbers: Numbers of the batches that have come and are not taken, oldest first.
        exhausted: Whether no more grants will come.
    """

    def __init__(
        self, cluster: Cluster, window: Window, worker_id: int, ahead: int = AHEAD
    ) -> None:
        self._cluster, self._coordinator, self._ahead = cluster, cluster.roles.coordinator, ahead
        self._taken = window.view(cluster.rank, "taken")
        local = cluster.is_local(self._coordinator)
        self._ring = window.view(self._coordinator, "grants")[worker_id] if local else None
        self._arrived: deque[Grant] = deque()
        self.numbers: deque[int] = deque()
        self._entries_read = self._taken_count = self._extra = 0
        self._requested = self._received = 0  # unanswered requests; batches that have come
        self.exhausted = False

    def open(self, ahead: int = 0) -> None:
        """Request the first batches. On the coordinator's node they come without a request.

        Args:
            ahead: Number of batches that this worker wants beyond the taken ones; has an effect
                only if it is larger than the queue's own.
        """
        self._extra = max(0, ahead - self._ahead)
        if self._ring is None:
            for _ in range(self._ahead + self._extra):
                self._ask()

    def _ask(self) -> None:
        self._requested += 1
        self._cluster.send(self._coordinator, "more")

    def follow(self, coordinator: int) -> None:
        """Send requests to another coordinator from now on: the old one has died.

        On the old coordinator's node nothing changes.
        """
        if self._ring is None:
            self._coordinator = coordinator
            self._cluster.send(coordinator, "asked", (self._requested, self._received))

    def granted(self, grant: Grant) -> None:
        """Note a grant that came by message."""
        self._requested -= 1
        self._received += grant[:3] != EXHAUSTED
        self._arrived.append(grant)

    def news(self) -> list[Range]:
        """Return the batches that have come since the last call. Blocks: no."""
        if self._ring is not None:
            given = observe(self._ring, GRANTED)
            for k in range(self._entries_read, given):
                at = 8 + 8 * (k % RING)
                epoch, begin, end, number = self._ring[at : at + 4].tolist()
                self._arrived.append((epoch, begin, end, number))
            self._entries_read = given
            if self._extra:
                self._publish_taken()
        grants = [grant for grant in self._arrived if grant[:3] != EXHAUSTED]
        self.exhausted |= len(grants) < len(self._arrived)
        self._arrived.clear()
        self.numbers.extend(number for *_, number in grants)
        return [grant[:3] for grant in grants]

    def take(self) -> int:
        """Take the oldest batch, so that another one may be granted.

        Returns:
            Number of the batch.
        """
        self._taken_count += 1
        if self._ring is not None:
            self._publish_taken()
        elif not self.exhausted:
            self._ask()
        return self.numbers.popleft()

    def _publish_taken(self) -> None:
        """Publish the number of taken grants, so that the coordinator may grant more.

        It never exceeds the number of entries read from the ring: the coordinator may write those
        again.
        """
        publish(self._taken, TAKEN, min(self._taken_count + self._extra, self._entries_read))
