"""Coordinator's log in its node's memory, from which a successor continues.

Now and then, and when it decides something, it saves the state of its duty: which batches there
are, who has them, why the run is to end. Each dispatch after that is an entry of a log, written
before the worker sees the batch: assigning is a function of who asked in which order, so who goes
on repeats it. States lie in two halves of memory, of which one is whole at any moment. What is
applied needs no note: the ledger of the coordinator's shard says that.

A state that is larger than its memory is not saved, and nobody can go on until one is saved that is
not: so it is where a run is resumed that had a great many batches in hand.
"""

import pickle
from collections.abc import Collection
from typing import Any

import numpy as np

from mpips.datasets.ledger import EXHAUSTED, SampleAllocator
from mpips.kernels.atomics import no_limit, observe, publish
from mpips.mpi.window import Field, Window
from mpips.ps.dispatch import CLOSED, GIVEN, RING, Dispatcher, Grant

COUNT, SAVED = range(2)  # words: entries of the log, and the state that holds, from 1 on; 0: none
LOG = 1 << 13  # entries
EVERY = LOG >> 3  # a state is saved after so many
STATE_BYTES = 1 << 18
HEAD = 16  # bytes before a state: the entries that it holds, and its size
WORKER_BITS = 21


def record_fields() -> tuple[Field, ...]:
    """Return the fields of the coordinator's segment that it notes its duty in."""
    states = Field("duty", "u1", (2, HEAD + STATE_BYTES))
    return (Field("noted", "i8", (8,)), Field("handed", "i8", (LOG,)), states)


class CoordinatorLog:
    """A coordinator's notes, in the segment of the first one. Collective: no. Blocks: no.

    Args:
        window: Of the store.
        rank: Of server 0, which lives or not.
    """

    def __init__(self, window: Window, rank: int) -> None:
        self._noted = window.view(rank, "noted")
        self._log, self._states = window.view(rank, "handed"), window.view(rank, "duty")
        self._count, self._serial = observe(self._noted, COUNT), observe(self._noted, SAVED)
        self._at = self._count  # entries in the last state

    @property
    def due(self) -> bool:
        """Whether it is time to save the state again."""
        return self._count - self._at >= EVERY

    def gave(self, worker: int) -> None:
        """Note that a worker is given the next batch."""
        self._append(worker << 1)

    def took_back(self, worker: int, pushes: int) -> None:
        """Note that a worker has died, and what it had is taken back but for so many pushes."""
        self._append((pushes << WORKER_BITS | worker) << 1 | 1)

    def _append(self, entry: int) -> None:
        self._log[self._count % LOG] = entry
        self._count += 1
        publish(self._noted, COUNT, self._count)

    def save(self, allocator: SampleAllocator, more: dict[str, Any]) -> None:
        """Save the state of the duty.

        Args:
            allocator: Of all that is noted.
            more: What else is to be known.
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
        """Return the sample allocator as the coordinator has left it, and what else it saved.

        None if lost.
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
            repeat(allocator, int(self._log[k % LOG]))
        allocator.stopped = stopped
        return allocator, more


class SurvivingDispatcher(Dispatcher):
    """Gives batches where ranks may die. Collective: no.

    A worker for which no batch is left waits until all that the others have are applied: they may
    come back, by `take_back`.

    Args:
        args: See `Dispatcher`.
        record: Where assignments are noted first, if another may have to go on.

    Attributes:
        record: As given.
    """

    def __init__(self, *args: Any, record: CoordinatorLog | None = None) -> None:
        super().__init__(*args)
        self.record = record
        # Workers that wait until it is clear that all is done; remote ones as often as they ask.
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
            self.record.gave(worker)
        return grant

    def _give(self, worker: int) -> None:
        if worker in self._gone:
            return  # it has asked before it died
        grant = self._next(worker)
        if grant[:3] == EXHAUSTED and self.allocator.may_come_back:
            self._waiting.append(worker)
        else:
            self._pass_on(worker, grant)

    def go_on(self, lost: Collection[int]) -> None:
        """Give on where a coordinator has died; what it has noted and not given is given now.

        Args:
            lost: Workers whose batches were taken back.
        """
        self._gone.update(lost)
        for worker in self._local.tolist():
            ring = self._grants[worker]
            given = observe(ring, GIVEN)
            self._behind[worker] = given - self._ahead
            at = 8 + 8 * ((given - 1) % RING)
            last = ring[at : at + 4].tolist() if given else []
            if worker in lost or tuple(last[:3]) == EXHAUSTED:
                self._open[worker] = CLOSED
            elif self.allocator.given(worker) > given:
                batch, number = self.allocator.open_to(worker)[-1]
                self._put(worker, (*batch, number))

    def go_on_remote(self, rank: int, asked: tuple[int, int]) -> None:
        """Give on to a remote worker where a coordinator has died.

        Args:
            rank: Of the worker.
            asked: How many batches it has asked for that have not come, and how many have come:
                those that were on their way are given once more.
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
        """Give a worker that has died no more, and what it had to others, but for its pushes.

        Returns:
            See `SampleAllocator.take_back`.
        """
        self._gone.add(worker)
        self._open[worker] = CLOSED
        if self.record is not None:
            self.record.took_back(worker, pushes)
        return take_back(self.allocator, worker, pushes)


def repeat(allocator: SampleAllocator, entry: int) -> None:
    """Do with a sample allocator what an entry of the log says was done."""
    rest, taken_back = divmod(entry, 2)
    pushes, worker = divmod(rest, 1 << WORKER_BITS)
    if taken_back:
        take_back(allocator, worker, pushes)
    else:
        allocator.next(worker)


def take_back(allocator: SampleAllocator, worker: int, pushes: int) -> list[int]:
    """Assign to others what a worker has that has died, but for all its pushes.

    Returns:
        See `SampleAllocator.take_back`.
    """
    return allocator.take_back(worker, pushes - allocator.clocks[worker] + allocator.before[worker])
