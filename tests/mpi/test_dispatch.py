"""How batches reach the workers: each exactly once, local and remote."""

import itertools

import pytest
from verdict import check

from mpips.datasets.ledger import Range, SampleAllocator
from mpips.layout.roles import assign
from mpips.mpi.waiting import Backoff
from mpips.mpi.window import Plan, Window
from mpips.mpi.world import Cluster
from mpips.ps import dispatch
from mpips.ps.dispatch import AHEAD, BatchQueue, Dispatcher

pytestmark = pytest.mark.mpi(min_size=2)


class Handing:
    """A coordinator that gives batches, and workers that take them; nothing is computed."""

    def __init__(self, cluster: Cluster, ahead: int = AHEAD, wanted: int = 1) -> None:
        self.ahead, self.wanted = ahead, wanted
        self.numbers: list[int] = []
        cluster.roles = assign("async", cluster.hosts, cluster.node_of, 1)
        self.cluster, self.roles = cluster, cluster.roles
        self.workers = len(self.roles.workers)
        coordinator = Plan(dispatch.coordinator_fields(self.workers))
        worker = Plan(dispatch.worker_fields())
        plans = [
            coordinator if r == self.roles.coordinator else worker for r in range(cluster.world)
        ]
        self.window = Window(cluster, plans)

    def give(self, allocator: SampleAllocator) -> list[tuple[int, Range]]:
        """Serve until every worker has ended; returns what each said that it took, in order."""
        cluster = self.cluster
        dispatcher = Dispatcher(cluster, self.window, allocator, self.ahead)
        backoff, ended = Backoff(cluster.ranks_per_core), 0
        taken: list[tuple[int, Range]] = []
        while ended < self.workers:
            dispatcher.serve()
            for source, kind, payload in cluster.poll():
                worker = self.roles.workers.index(source)
                if kind == "more":
                    dispatcher.answer(source)
                elif kind == "took":
                    taken.append((worker, payload))
                    allocator.applied(worker, payload)
                else:
                    ended += 1
            cluster.progress()
            backoff.pause()
        for rank in self.roles.workers:
            cluster.send(rank, "end")
        vars(dispatcher).clear()
        return taken

    def take(self) -> list[Range]:
        """Take until there is nothing more; returns the batches, in order."""
        cluster, mine = self.cluster, []
        me = self.roles.workers.index(cluster.rank)
        source = BatchQueue(cluster, self.window, me, self.ahead)
        source.open(self.wanted)
        queue: list[Range] = []
        numbers: list[int] = []

        def ready() -> bool:
            for _, _, grant in cluster.poll():
                source.granted(grant)
            queue.extend(source.news())
            assert len(queue) == len(source.numbers) <= max(self.ahead, self.wanted), queue
            return len(queue) >= self.wanted or source.exhausted

        while cluster.wait(ready) >= 0 and queue:
            batch = queue.pop(0)
            numbers.append(source.take())
            mine.append(batch)
            cluster.send(self.roles.coordinator, "took", batch)
        assert numbers == sorted(set(numbers))
        self.numbers = numbers
        assert source.exhausted
        assert not source.news()
        cluster.send(self.roles.coordinator, "ended")
        cluster.wait(lambda: any(kind == "end" for _, kind, _ in cluster.poll()))
        vars(source).clear()
        return mine

    def run(self, allocator: SampleAllocator) -> tuple[list[Range], list[object]]:
        """Hand out everything; returns all that was taken, and on the coordinator what is wrong."""
        cluster = self.cluster
        coordinator = cluster.rank == self.roles.coordinator
        told: list[tuple[int, Range]] = []
        mine: list[Range] = []
        if coordinator:
            told = self.give(allocator)
        else:
            mine = self.take()
        by_rank = cluster.comm.allgather(mine)
        numbers = cluster.comm.allgather(self.numbers)
        wrong: list[object] = []
        if coordinator:
            for worker, rank in enumerate(self.roles.workers):
                if [batch for w, batch in told if w == worker] != by_rank[rank]:
                    wrong.append((worker, by_rank[rank]))
            if sorted(itertools.chain(*numbers)) != list(range(len(told))):
                wrong.append(numbers)
            if allocator.unfinished():
                wrong.append(allocator.unfinished())
        vars(self).pop("window").free()
        return [batch for batches in by_rank for batch in batches], wrong


def everything(samples: int, batch_size: int, epochs: int) -> list[Range]:
    edges = [(b, min(b + batch_size, samples)) for b in range(0, samples, batch_size)]
    return [(epoch, *edge) for epoch in range(epochs) for edge in edges]


@pytest.mark.parametrize(
    ("chunk", "ahead", "wanted"),
    [(1, AHEAD, 1), (3, AHEAD, 1), (1, 1, 1), (1, 1, 3), (1, AHEAD, 7)],
)
def test_every_batch_is_granted_exactly_once(
    cluster: Cluster, chunk: int, ahead: int, wanted: int
) -> None:
    """Also where workers are more than batches, and where ranges are pending."""
    pending = [(0, 4, 6), (0, 0, 2)]
    for options, expected in (
        ({"samples": 103, "batch_size": 10, "epochs": 3}, everything(103, 10, 3)),
        ({"samples": 5, "batch_size": 10, "epochs": 1}, [(0, 0, 5)]),
        (
            {"samples": 20, "batch_size": 2, "epochs": 1, "cursor": (0, 10), "pending": pending},
            sorted(pending + everything(20, 2, 1)[5:]),
        ),
    ):
        handing = Handing(cluster, ahead, wanted)
        options |= {"workers": handing.workers, "chunk": chunk}
        taken, wrong = handing.run(SampleAllocator(**options))
        check(cluster.comm, sorted(taken) == expected and not wrong, (taken, wrong))
