"""What the coordinator counts of pushes that its server has applied."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from headers import pack

from mpips.datasets.ledger import SampleAllocator
from mpips.ps.coordinator import Coordinator
from mpips.transport.push import HEADER_WORDS, Push, batches_of

WORKERS = 3


class Losses(list[tuple[float, int]]):
    """A log that keeps what it is told."""

    def count(self, *batches: tuple[float, int]) -> None:
        self.extend(batches)

    def heard(self, *_: object) -> None:
        raise AssertionError("no message has come")


def coordinator() -> tuple[Coordinator, Losses]:
    problem = SimpleNamespace(layout=SimpleNamespace(tables={}))
    job: Any = SimpleNamespace(cluster=None, base_samples=40, problem=problem, config=None)
    log: Any = Losses()
    allocator = SampleAllocator(100, 7, WORKERS, epochs=2)
    fakes: Any = SimpleNamespace(answer=None, handlers={}, allocator=allocator)
    return Coordinator(job, fakes, fakes, fakes, log), log


def test_pushes_of_a_loop_are_counted_as_one_by_one() -> None:
    (one, losses), (other, more) = coordinator(), coordinator()
    said, random = np.zeros((20, HEADER_WORDS), np.int64), np.random.default_rng(0)
    for seq, worker in enumerate(random.integers(WORKERS, size=len(said)).tolist()):
        batch = one.allocator.next(worker)
        assert batch is not None
        assert other.allocator.next(worker) == batch
        pack(said[seq], worker, seq, batch, batch[2] - batch[1], random.random(), seq)
    for words in said:
        one.applied(Push.unpack(words, np.zeros(0)).batches)
    for part in (said[:1], said[1:18], said[18:]):
        other.applied(batches_of(part))
    assert one.allocator.state() == other.allocator.state()
    assert one.allocator.samples_done == other.allocator.samples_done == one.samples - 40
    assert one.samples == other.samples
    assert losses == more
    assert len(more) == 20
