"""A server that becomes the coordinator.

What was under way comes to an end, and the sample allocator goes on.
"""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.datasets.ledger import EXHAUSTED, Range, SampleAllocator
from mpips.failover.coordinator_failover import Settling
from mpips.failover.coordinator_log import CoordinatorLog, SurvivingDispatcher, record_fields
from mpips.kernels.atomics import observe, publish
from mpips.layout.roles import Roles
from mpips.ps.dispatch import AHEAD, TAKEN, BatchQueue, coordinator_fields, worker_fields

ROLES = Roles((0, 1, 2, 3), (4, 5, 6))
COORDINATOR = (*coordinator_fields(3), *record_fields())


class Ranks:
    """Ranks of one node, which note what they are sent, and their memory."""

    def __init__(self) -> None:
        self.roles, self.rank, self.nodes = ROLES, 1, 1
        self.failures = SimpleNamespace(lost={0})
        self.sent: list[tuple[int, str, Any]] = []
        fields = {0: COORDINATOR, **dict.fromkeys(ROLES.workers, worker_fields())}
        self._fields = {
            rank: {f.name: np.zeros(f.shape, f.dtype) for f in some}
            for rank, some in fields.items()
        }

    def like(self, rank: int) -> "Ranks":
        """Return the same as another rank sees them."""
        other = copy.copy(self)
        other.rank = rank
        return other

    def is_local(self, rank: int) -> bool:
        return True

    def send(self, dest: int, kind: str, payload: Any = None) -> None:
        self.sent.append((dest, kind, payload))

    def view(self, rank: int, name: str) -> np.ndarray:
        return self._fields[rank][name]


def test_all_come_to_rest_behind_the_last_snapshot() -> None:
    """When all have told which was the last; one of them dies meanwhile."""
    ranks: Any = Ranks()
    settling = Settling(ranks)
    for source, begun in ((1, 4), (2, 5)):
        assert not settling.done()
        assert settling.handle(source, "settled", begun)
    for kind in ("files", "applied"):
        assert settling.handle(3, kind, "an answer to the dead")
    assert not settling.handle(2, "done", 2)
    assert not settling.done()
    ranks.failures.lost.add(3)
    assert settling.done()
    assert settling.begun == 5


def test_the_hand_out_goes_on() -> None:
    """What is noted and not given is given; who is dead, or has had the last, is given nothing."""
    ranks: Any = Ranks()
    allocator = SampleAllocator(1000, 10, 3, epochs=1)
    record = CoordinatorLog(ranks, 0)
    record.save(allocator, {})
    feeds = [BatchQueue(ranks.like(4 + worker), ranks, worker) for worker in range(3)]
    dispatcher = SurvivingDispatcher(ranks, ranks, allocator, record=record)
    dispatcher.serve()
    given: list[list[Range]] = [batch_queue.news() for batch_queue in feeds]
    assert [len(batches) for batches in given] == [AHEAD] * 3
    dispatcher._next(0)  # noted, and then the coordinator dies
    dispatcher._put(2, (*EXHAUSTED, 0))
    for rank in ROLES.workers:
        publish(ranks.view(rank, "taken"), TAKEN, 1)
    found = CoordinatorLog(ranks, 0).load()
    assert found is not None
    allocator, _ = found
    assert allocator.issued == 7
    successor = SurvivingDispatcher(ranks, ranks, allocator, record=CoordinatorLog(ranks, 0))
    successor.go_on([1])
    successor.serve()
    assert feeds[0].news() == [(0, 60, 70)]
    assert feeds[1].news() == feeds[2].news() == []
    assert feeds[2].exhausted
    publish(ranks.view(4, "taken"), TAKEN, 2)
    successor.serve()
    assert feeds[0].news() == [(0, 70, 80)]
    assert observe(ranks.view(0, "grants")[0], 0) == AHEAD + 2


@pytest.mark.parametrize("came", [0, 1, 2])
def test_a_remote_worker_goes_on(came: int) -> None:
    """What was on its way to it comes again, and what it waits for; nothing comes twice."""
    coordinator: Any = Ranks()
    worker = coordinator.like(5)
    coordinator.is_local = lambda rank: rank < 4
    worker.is_local = lambda rank: False
    allocator = SampleAllocator(1000, 10, 3, epochs=1)
    record = CoordinatorLog(coordinator, 0)
    record.save(allocator, {})
    batch_queue = BatchQueue(worker, coordinator, 1)
    batch_queue.open()
    dispatcher = SurvivingDispatcher(coordinator, coordinator, allocator, record=record)
    dispatcher.answer(5)  # to the first of its two requests, and then the coordinator dies
    if came == 2:
        dispatcher.answer(5)
    grants = [what for _, kind, what in coordinator.sent if kind == "grant"]
    for grant in grants[:came]:
        batch_queue.granted(grant)
    found = CoordinatorLog(coordinator, 0).load()
    assert found is not None
    successor = SurvivingDispatcher(
        coordinator, coordinator, found[0], record=CoordinatorLog(coordinator, 0)
    )
    successor.go_on([])
    batch_queue.follow(1)
    told = coordinator.sent[-1]
    assert told[:2] == (1, "asked")
    coordinator.sent.clear()
    successor.go_on_remote(5, told[2])
    for dest, kind, what in coordinator.sent:
        assert (dest, kind) == (5, "grant")
        batch_queue.granted(what)
    assert batch_queue.news() == [(0, 0, 10), (0, 10, 20)]
    assert list(batch_queue.numbers) == [0, 1]
    assert batch_queue.take() == 0
    assert coordinator.sent[-1] == (1, "more", None)
