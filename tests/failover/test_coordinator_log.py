"""What a coordinator notes: who goes on assigns what was left, and nothing twice."""

import random
from typing import Any

import numpy as np
import pytest

from mpips.datasets.ledger import Range, SampleAllocator
from mpips.failover import coordinator_log
from mpips.failover.coordinator_log import CoordinatorLog, record_fields, take_back

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 50, 4, 3


class Memory:
    """The memory of a node, which outlasts a rank."""

    def __init__(self) -> None:
        self._fields = {f.name: np.zeros(f.shape, f.dtype) for f in record_fields()}

    def view(self, rank: int, name: str) -> np.ndarray:
        return self._fields[name]


class Duty:
    """A coordinator's dispatch; workers push what they have, or some of it, and die."""

    def __init__(self, seed: int, notes: CoordinatorLog, allocator: SampleAllocator) -> None:
        self.chance, self.record, self.allocator = random.Random(seed), notes, allocator
        self.applied: list[Range] = []
        self.pushes = [0] * WORKERS
        self.died: set[int] = set()

    def turn(self) -> None:
        """Do one of the things that a coordinator does."""
        worker = self.chance.choice(sorted(set(range(WORKERS)) - self.died))
        open_to = self.allocator.open_to(worker)
        what = self.chance.random()
        if self.record.due:
            self.record.save(self.allocator, {"pushes": list(self.pushes)})
        if what < 0.02 and len(self.died) < WORKERS - 1:
            self.died.add(worker)
            self.record.log_taken_back(worker, self.pushes[worker])
            take_back(self.allocator, worker, self.pushes[worker])
        elif what < 0.5 and open_to:
            self.allocator.applied(worker, open_to[0][0])
            self.applied.append(open_to[0][0])
            self.pushes[worker] += 1
        elif len(open_to) < 3 and self.allocator.next(worker) is not None:
            self.record.log_assignment(worker)


def state_of(allocator: SampleAllocator) -> Any:
    opened = [allocator.open_to(worker) for worker in range(WORKERS)]
    chunks = [list(chunk) for chunk in allocator._chunks]
    return allocator.state(), list(allocator.pending), chunks, opened, allocator.issued


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("quota", [None, 12])
@pytest.mark.parametrize("seed", range(10))
def test_a_coordinator_dies_at_any_moment(
    seed: int, chunk: int, quota: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor has the same batches in the same order, and so has the next one."""
    monkeypatch.setattr(coordinator_log, "EVERY", 7)
    memory: Any = Memory()
    allocator = SampleAllocator(SAMPLES, BATCH, WORKERS, None if quota else EPOCHS, quota, chunk)
    state = {"cursor": [0, 8], "pending": [(0, 0, 4), (0, 4, 8)], "clocks": [5, 0, 0]}
    allocator.restore(state)
    duty = Duty(seed, CoordinatorLog(memory, 0), allocator)
    duty.record.save(duty.allocator, {})
    for moment in range(300):
        duty.turn()
        if moment % 23 == seed:
            notes = CoordinatorLog(memory, 0)
            found = notes.load()
            assert found is not None
            found[0].catch_up(duty.pushes)
            assert state_of(found[0]) == state_of(duty.allocator)
            assert found[0].taken_back == duty.allocator.taken_back
            duty.allocator, duty.record = found[0], notes
    assert len(set(duty.applied)) == len(duty.applied) > 10
    if not quota:
        everything = EPOCHS * SAMPLES
        assert duty.allocator.samples_done == sum(end - begin for _, begin, end in duty.applied)
        assert duty.allocator.samples_done == everything


def test_notes_that_nobody_can_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none are saved, a state is too large, or more has been assigned than is kept."""
    monkeypatch.setattr(coordinator_log, "LOG", 3)
    memory: Any = Memory()
    allocator = SampleAllocator(SAMPLES, BATCH, 1, epochs=10**6)
    notes = CoordinatorLog(memory, 0)
    assert notes.load() is None
    notes.save(allocator, {"stop": "target"})
    assert CoordinatorLog(memory, 0).load()[1] == {"stop": "target"}  # type: ignore[index]
    notes.save(allocator, {"lost": "x" * coordinator_log.STATE_BYTES})
    assert CoordinatorLog(memory, 0).load() is None
    notes.save(allocator, {})
    for _ in range(coordinator_log.LOG):
        notes.log_assignment(0)
        assert CoordinatorLog(memory, 0).load() is not None
    notes.log_assignment(0)
    assert CoordinatorLog(memory, 0).load() is None
