"""The bound on clocks: what a read has to hold, however slow the servers are."""

import itertools
import time

import numpy as np
import pytest
from rig import Rig

from mpips.errors import UserError
from mpips.mpi.world import Cluster
from mpips.ps.consistency import ClockController, ReadRequirement
from mpips.transport.push import Push

pytestmark = pytest.mark.mpi(min_size=2)
SMALL = pytest.mark.world(max_size=4)

ROWS = 64  # lines of a counter a worker: every shard has some
PUSHES = 6


def pushes_of(worker: int) -> int:
    """Workers end at different clocks, so that some go on without the others."""
    return PUSHES + 2 * worker


def numbers_of(workers: int) -> dict[tuple[int, int], int]:
    """Return the number of each (push, worker), as if they were assigned in turn."""
    pushes = [(seq, w) for w in range(workers) for seq in range(1, pushes_of(w) + 1)]
    return {push: number for number, push in enumerate(sorted(pushes))}


def make(cluster: Cluster, servers: int, bound: int, *options: bool) -> Rig:
    """Build a rig of counters; options: consistent, aggregate."""
    if servers >= cluster.world:
        pytest.skip("leaves no worker")
    consistent, aggregate = options or (False, False)
    n = ROWS * (cluster.world - servers)
    return Rig(cluster, n, servers, consistent=consistent, aggregate=aggregate, bound=bound)


def push(rig: Rig) -> None:
    """Add 1 to this worker's counter in every line."""
    seq = rig.sender.seq + 1
    rig.cluster.wait(lambda: rig.sender.writable(seq))
    grad = rig.sender.buffer(seq)
    grad.fill(0)
    grad.reshape(ROWS, -1)[:, rig.id] = 1
    rig.sender.push((0, seq, seq + 1), 1, 0.0, rig.puller.versions, rig.number)
    rig.number = numbers_of(len(rig.roles.workers)).get((seq + 1, rig.id), -1)


def ready(rig: Rig) -> bool:
    """Whether a read would wait for nobody."""
    assert rig.puller.controller is not None
    return rig.puller.controller.ready() and rig.puller.advance()


def pull(rig: Rig) -> None:
    """Pull as a worker's loop does: while it waits, its node's pushes get on."""
    rig.puller.begin(rig.replica)
    rig.puller.fetch()

    def here() -> bool:
        rig.sender.push_sender.resting()
        return ready(rig)

    rig.cluster.wait(here)
    rig.puller.finish()


def errors(rig: Rig, bound: int) -> list[object]:
    """Compare the counters read with what a read at this clock has to hold."""
    clock, counts = rig.clock(), rig.replica.reshape(ROWS, -1)
    workers = len(rig.roles.workers)
    held = np.zeros(workers)
    for (_, worker), number in numbers_of(workers).items():
        held[worker] += number // workers <= clock - bound - 1
    wrong: list[object] = []
    if (counts.min(0) < held).any():
        wrong.append((f"clock {clock} misses pushes", counts.min(0), held))
    if (counts[:, rig.id] != rig.sender.seq).any():
        wrong.append((f"clock {clock} does not hold all of its own", counts[:, rig.id]))
    return wrong


@pytest.mark.parametrize(
    ("servers", "bound", "consistent", "aggregate"),
    [
        pytest.param(1, 0, False, False, marks=SMALL),
        (2, 0, False, False),
        pytest.param(1, 2, False, False, marks=SMALL),
        pytest.param(2, 1, True, False, marks=SMALL),
        (2, 1, False, True),
        (1, 0, True, True),
    ],
)
def test_a_read_holds_what_its_clock_says(
    cluster: Cluster, servers: int, bound: int, consistent: bool, aggregate: bool
) -> None:
    with make(cluster, servers, bound, consistent, aggregate) as rig:
        if rig.worker:
            for _ in range(pushes_of(rig.id)):
                pull(rig)
                rig.wrong += errors(rig, bound)
                push(rig)
            rig.finish()
            controller = rig.puller.controller
            if controller is None or controller.distance_max > bound:
                rig.wrong.append(("distance", controller))
        else:
            turn = itertools.count(rig.id)

            def slowly(push: Push) -> None:
                time.sleep(0.003 * (next(turn) % 2))
                rig.server.apply(push)

            rig.serve(slowly)


def hold(rig: Rig) -> None:
    """Answer reads and apply nothing, until every worker has been told."""
    told = 0
    while told < len(rig.roles.workers):
        rig.server.serve_reads()
        for source, kind, payload in rig.cluster.poll():
            if kind == "told":
                told += 1
            else:
                rig.answer(source, kind, payload)
    rig.cluster.barrier()


def tell(rig: Rig) -> None:
    """End `hold` on the servers; no read is under way."""
    for rank in rig.roles.servers:
        rig.cluster.send(rank, "told")
    rig.cluster.barrier()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_broken_bound_is_an_error(
    cluster: Cluster, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that do not wait are found out by the clocks that they came with."""
    monkeypatch.setattr(ClockController, "needs", lambda controller: ReadRequirement())
    with make(cluster, servers, 1) as rig:
        if rig.worker:
            push(rig)
            rig.puller.pull(rig.replica)  # a distance of 1 is as it should be
            push(rig)
            try:
                rig.puller.pull(rig.replica)
                rig.wrong.append("no error")
            except UserError as error:
                if "clock distance 2, expected a distance of at most 1" not in str(error):
                    rig.wrong.append(error)
            tell(rig)
            rig.finish()
        else:
            hold(rig)
            rig.serve(lambda push: None if rig.server.apply(push) else rig.wrong.append(push))


@pytest.mark.parametrize("servers", [1, 2])
def test_a_read_that_waits_can_be_given_up(cluster: Cluster, servers: int) -> None:
    """As by a worker that is told to stop as it waits; and the servers answer none twice."""
    with make(cluster, servers, 0) as rig:
        if rig.worker:
            push(rig)
            rig.puller.begin(rig.replica)
            rig.puller.fetch()
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                cluster.progress()
                if ready(rig):
                    rig.wrong.append("ready, and nothing was applied")
            rig.puller.abandon()
            if rig.puller.reading:
                rig.wrong.append("the read goes on")
            tell(rig)
            pull(rig)
            rig.wrong += errors(rig, 0)
            rig.finish()
        else:
            hold(rig)
            rig.serve(lambda push: None if rig.server.apply(push) else rig.wrong.append(push))
