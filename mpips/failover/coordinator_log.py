"""Coordinator's log in its node's memory, from which a successor continues.

The coordinator saves its state at intervals and at each decision: the batches, their workers, the
reason to stop. Each later dispatch is an entry of the log, written before the worker sees the
batch. Assignment is a function of the order of requests, so a successor repeats it. Two halves of
memory hold the states in turn, and one of them is complete at any moment. The ledger of the
coordinator's shard already contains the applied pushes.

A state that is larger than its memory is not saved. Until a smaller one is saved, no server can
take over.
"""

import pickle
from collections.abc import Collection
from typing import Any

import numpy as np

from mpips.datasets.ledger import EXHAUSTED, SampleAllocator
from mpips.kernels.atomics import no_limit, observe, publish
from mpips.mpi.window import Field, Window
from mpips.ps.dispatch import CLOSED, GRANTED, RING, Dispatcher, Grant

COUNT, SAVED = range(2)  # words: number of entries; number of the newest state, from 1 (0: none)
LOG = 1 << 13  # entries
EVERY = LOG >> 3  # a state is saved after as many entries
STATE_BYTES = 1 << 21  # for a thousand workers, each with the batches of a block of a file
HEAD = 16  # bytes before a state: number of entries that it includes, and its size
WORKER_BITS = 21


def record_fields() -> tuple[Field, ...]:
    """Return the fields of the coordinator's segment that hold its log."""
    states = Field("duty", "u1", (2, HEAD + STATE_BYTES), sparse=True)
    return (Field("noted", "i8", (8,)), Field("handed", "i8", (LOG,)), states)


class CoordinatorLog:
    """Log of a coordinator, in the segment of the first coordinator. Collective: no. Blocks: no.

    Args:
        window: Window of the store.
        rank: Rank of server 0, alive or dead.
    """

    def __init__(self, window: Window, rank: int) -> None:
        self._noted = window.view(rank, "noted")
        self._log, self._states = window.view(rank, "handed"), window.view(rank, "duty")
        self._count, self._serial = observe(self._noted, COUNT), observe(self._noted, SAVED)
        self._at = self._count  # entries included in the last state

    @property
    def due(self) -> bool:
        """Whether it is time to save the state again."""
        return self._count - self._at >= EVERY

    def log_assignment(self, worker: int) -> None:
        """Log that a worker gets the next batch."""
        self._append(worker << 1)

    def log_taken_back(self, worker: int, pushes: int) -> None:
        """Log that a worker has died, and that its batches beyond `pushes` are taken back."""
        self._append((pushes << WORKER_BITS | worker) << 1 | 1)

    def _append(self, entry: int) -> None:
        self._log[self._count % LOG] = entry
        self._count += 1
        publish(self._noted, COUNT, self._count)

    def save(self, allocator: SampleAllocator, more: dict[str, Any]) -> None:
        """Save the coordinator's state.

        Args:
            allocator: Sample allocator, with all logged assignments.
            more: Other state.
        """
        self._at = self._count
        state = np.frombuffer(pickle.dumps((allocator, more)), "u1")
        if state.size > STATE_BYTES:
            publish(self._noted, SAVED, 0)
            return
        self._serial += 1
        half = self._states[self._serial % 2]
        half[:HEAD].view("i8")[:] = self._count, state.size
        half[HEAD : HEAD + state.size] = state
        publish(self._noted, SAVED, self._serial)

    def load(self) -> tuple[SampleAllocator, dict[str, Any]] | None:
        """Return the sample allocator with all logged assignments, and the other state.

        None if the state is lost.
        """
        serial = observe(self._noted, SAVED)
        if not serial:
            return None
        half = self._states[serial % 2]
        at, size = half[:HEAD].view("i8").tolist()
        if self._count - at > LOG:
            return None
        allocator: SampleAllocator
        allocator, more = pickle.loads(half[HEAD : HEAD + size].tobytes())
        stopped, allocator.stopped = allocator.stopped, False
        for k in range(at, self._count):
            rest, taken_back = divmod(int(self._log[k % LOG]), 2)
            pushes, worker = divmod(rest, 1 << WORKER_BITS)
            if taken_back:
                take_back(allocator, worker, pushes)
            else:
                allocator.next(worker)
        allocator.stopped = stopped
        return allocator, more


class SurvivingDispatcher(Dispatcher):
    """Dispatcher of a run that survives deaths of ranks. Collective: no.

    If no batch is left for a worker, it waits until all batches of the others are applied:
    `take_back` may return some of them.

    Args:
        args: See `Dispatcher`.
        record: Log of the assignments, if another rank may have to continue.

    Attributes:
        record: As given.
    """

    def __init__(self, *args: Any, record: CoordinatorLog | None = None) -> None:
        super().__init__(*args)
        self.record = record
        # Workers that wait until all batches are applied; a remote one once for each request.
        self._waiting: list[int] = []
        self._gone: set[int] = set()

    def serve(self) -> None:
        """See `Dispatcher.serve`."""
        if self._waiting and (self.allocator.pending or not self.allocator.may_come_back):
            waiting, self._waiting = self._waiting, []
            for worker in waiting:
                if worker not in self._local:
                    self._give(worker)
                elif worker not in self._gone:
                    self._open[worker] = no_limit(1)[0]
        super().serve()

    def _next(self, worker: int) -> Grant:
        grant = super()._next(worker)
        if self.record is not None and grant[:3] != EXHAUSTED:
            self.record.log_assignment(worker)
        return grant

    def _give(self, worker: int) -> None:
        if worker in self._gone:
            return  # it made this request before it died
        grant = self._next(worker)
        if grant[:3] == EXHAUSTED and self.allocator.may_come_back:
            self._waiting.append(worker)
        else:
            self._pass_on(worker, grant)

    def go_on(self, lost: Collection[int]) -> None:
        """Continue the dispatch of a dead coordinator; grants its logged batches that lack a grant.

        Args:
            lost: Workers whose batches were taken back.
        """
        self._gone.update(lost)
        for worker in self._local.tolist():
            ring = self._grants[worker]
            given = observe(ring, GRANTED)
            self._behind[worker] = given - self._ahead
            at = 8 + 8 * ((given - 1) % RING)
            last = ring[at : at + 4].tolist() if given else []
            if worker in lost or tuple(last[:3]) == EXHAUSTED:
                self._open[worker] = CLOSED
            elif self.allocator.given(worker) > given:
                batch, number = self.allocator.open_to(worker)[-1]
                self._put(worker, (*batch, number))

    def go_on_remote(self, rank: int, asked: tuple[int, int]) -> None:
        """Continue the dispatch of a dead coordinator to a remote worker.

        Args:
            rank: Rank of the worker.
            asked: Number of batches that it has requested and not received, and number received.
                Batches lost on their way are sent again.
        """
        worker, (waits, got) = self._cluster.roles.workers.index(rank), asked
        if worker in self._gone:
            return
        lost = self.allocator.given(worker) - got
        for batch, number in self.allocator.open_to(worker)[-lost:] if lost else ():
            self._cluster.send(rank, "grant", (*batch, number))
        for _ in range(waits - lost):
            self._give(worker)

    def take_back(self, worker: int, pushes: int) -> list[int]:
        """Stop dispatch to a dead worker, and return its batches beyond `pushes` to the allocator.

        Args:
            worker: Worker number.
            pushes: Number of its pushes that are applied.

        Returns:
            See `SampleAllocator.take_back`.
        """
        self._gone.add(worker)
        self._open[worker] = CLOSED
        if self.record is not None:
            self.record.log_taken_back(worker, pushes)
        return take_back(self.allocator, worker, pushes)


def take_back(allocator: SampleAllocator, worker: int, pushes: int) -> list[int]:
    """Take back the batches of a dead worker beyond `pushes`, the number of its pushes in all.

    Returns:
        See `SampleAllocator.take_back`.
    """
    return allocator.take_back(worker, pushes - allocator.clocks[worker] + allocator.before[worker])
