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


def make(cluster: Cluster, servers: int, bound: int, **options: bool) -> Rig:
    """Build a rig of counters."""
    return Rig(cluster, ROWS * (cluster.world - servers), servers, bound=bound, **options)


def push(rig: Rig) -> None:
    """Add 1 to this worker's counter in every line."""
    workers = len(rig.roles.workers)
    rig.push(np.tile(np.arange(workers) == rig.id, ROWS))
    rig.numbers[0] = numbers_of(workers).get((rig.sender.seq + 1, rig.id), -1)


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


def check_counts(rig: Rig, bound: int) -> None:
    """Compare the counters read with what a read at this clock has to hold."""
    counts, workers = rig.replica.reshape(ROWS, -1), len(rig.roles.workers)
    clock = rig.numbers[0] // workers
    held = np.zeros(workers)
    for (_, worker), number in numbers_of(workers).items():
        held[worker] += number // workers <= clock - bound - 1
    rig.expect((counts.min(0) >= held).all(), f"clock {clock} misses pushes", counts, held)
    rig.expect((counts[:, rig.id] == rig.sender.seq).all(), f"clock {clock} misses its own", counts)


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
    with make(cluster, servers, bound, consistent=consistent, aggregate=aggregate) as rig:
        if rig.worker:
            for _ in range(pushes_of(rig.id)):
                pull(rig)
                check_counts(rig, bound)
                push(rig)
            rig.finish()
            controller = rig.puller.controller
            rig.expect(controller is not None and controller.distance_max <= bound, controller)
        else:
            turn = itertools.count(rig.id)

            def slowly(push: Push) -> None:
                time.sleep(0.003 * (next(turn) % 2))
                rig.server.apply(push)

            rig.serve(slowly)


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
            with pytest.raises(
                UserError, match="clock distance 2, expected a distance of at most 1"
            ):
                rig.puller.pull(rig.replica)
            rig.see_enough()
            cluster.barrier()
            rig.finish()
        else:
            rig.serve_reads()
            cluster.barrier()
            rig.serve(rig.server.apply)


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
                rig.expect(not ready(rig), "ready, and nothing was applied")
            rig.puller.abandon()
            rig.expect(not rig.puller.reading, "the read goes on")
            rig.see_enough()
            cluster.barrier()
            pull(rig)
            check_counts(rig, 0)
            rig.finish()
        else:
            rig.serve_reads()
            cluster.barrier()
            rig.serve(rig.server.apply)
