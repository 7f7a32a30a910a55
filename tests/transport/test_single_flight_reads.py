"""Which fetches of its neighbours a worker joins, without MPI."""

from typing import Any

import numpy as np
import pytest

from mpips.layout import Shard
from mpips.transport import single_flight
from mpips.transport.remote_reads import RemoteReads
from mpips.transport.single_flight import REPLICAS, Neighbour, SingleFlightReads

N = 8
OWNERS = [(0, 0, Shard(0, N))]
NOBODY: Any = None  # stands for a cluster that nothing is asked of


class Scripted(RemoteReads):
    """A read that gets on when it is told to: its version is known, then all is here."""

    def __init__(self) -> None:
        super().__init__(NOBODY, OWNERS, 1)
        self.known = self.here = False
        self.asked = self.version = 0

    def begin(self, out: np.ndarray) -> None:
        self.known = self.here = False
        self._out = out

    def fetch(self) -> None:
        self.asked += 1

    def stamped(self) -> bool:
        return self.known

    def advance(self) -> bool:
        if self.here:
            self._out[:] = self.version
        return self.here

    def result(self, versions: np.ndarray) -> int:
        versions[0] = self.version
        return 0


class Worker:
    """A worker of the node, its own reads scripted."""

    def __init__(self, node: list[Neighbour], me: int) -> None:
        self.own, self.replica = Scripted(), node[me].replicas[0]
        self.reads = SingleFlightReads(NOBODY, OWNERS, 1, self.own, node, me)

    def joins(self) -> bool:
        """Want the shards; returns whether a neighbour's fetch is joined."""
        asked = self.own.asked
        self.reads.begin(self.replica)
        self.reads.fetch()
        return self.own.asked == asked

    def know(self, version: int) -> None:
        """Hear which version its own read will bring."""
        self.own.known, self.own.version = True, version
        assert not self.reads.advance()

    def done(self, version: int) -> None:
        """End the read, which has brought that version."""
        self.own.here = True
        assert self.reads.advance()
        versions = np.zeros(1, "i8")
        self.reads.result(versions)
        assert versions[0] == version
        assert (self.replica == version).all()


@pytest.fixture
def workers() -> list[Worker]:
    """Three workers of one node."""
    fetched, before = (REPLICAS, 3), (REPLICAS, 3)
    shapes = (8,), fetched, before
    node = [Neighbour(*(np.zeros(s, "i8") for s in shapes), np.zeros((1, N))) for _ in range(3)]
    return [Worker(node, me) for me in range(3)]


def test_fetches_out_of_step_come_into_step(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, third = workers
    assert not one.joins()
    assert third.joins()
    with monkeypatch.context() as patch:  # as if two had not seen yet what one does
        patch.setattr(single_flight, "PATIENCE_S", -1.0)
        patch.setattr(single_flight, "PATIENCE", 0.0)
        assert two.joins()
        two.reads.advance()
        assert two.own.asked == 1
    one.know(10)
    two.know(11)
    two.done(11)
    assert not two.joins(), "one's fetch may be older than what two has"
    one.done(10)
    third.done(10)
    assert one.joins(), "two's began when one knew its versions"
    assert third.joins(), "two's began when one, from whom third had them, knew its versions"
    two.know(20)
    for worker in (two, one, third):
        worker.done(20)


def test_what_is_overwritten_while_it_is_copied_is_not_used(workers: list[Worker]) -> None:
    """By a later read into the same replica, even by one that joins another worker's."""
    one, two, third = workers
    assert not one.joins()
    assert third.joins()
    one.know(10)
    one.done(10)
    assert not two.joins(), "nothing is under way"
    two.know(11)
    assert one.joins()
    two.done(11)
    one.done(11)  # third has not copied what one fetched
    assert not third.reads.advance(), "it may have seen half an element"
    assert third.own.asked == 1
    assert third.reads.joined == 0
    third.know(12)
    third.done(12)
    assert third.reads.result(np.zeros(1, "i8")) == 0
