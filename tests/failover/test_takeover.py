"""What a server needs to go on for another: as the server of its shard, and as the coordinator."""

import copy
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.config import Config
from mpips.datasets.ledger import EXHAUSTED, Range, SampleAllocator
from mpips.failover import coordinator_log
from mpips.failover.coordinator_failover import SurvivingCoordinator
from mpips.failover.coordinator_log import (
    CoordinatorLog,
    SurvivingDispatcher,
    record_fields,
    take_back,
)
from mpips.failover.takeover import Failover, Takeover, ended
from mpips.kernels.atomics import observe, publish
from mpips.layout import Layout, Shard
from mpips.layout.roles import Roles
from mpips.layout.tables import Table
from mpips.mpi.process import STARTED, stat_of
from mpips.ps.consistency import VectorClock
from mpips.ps.coordinator import Checkpoints
from mpips.ps.dispatch import AHEAD, TAKEN, BatchQueue, coordinator_fields, worker_fields
from mpips.snapshot.agreement import Phase, SnapshotAgreement
from mpips.transport.remote_reads import CLOCK


@pytest.mark.parametrize("state", ["running", "stopped", "gone"])
def test_a_process_is_gone(state: str) -> None:
    """Also one that is stopped; another one of its number is left alone."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = int(stat_of(process.pid)[STARTED])
    if state == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
    if state == "gone":
        assert ended(process.pid, started + 1)
        time.sleep(0.05)
        assert process.poll() is None, "it was another one"
        process.kill()
        process.wait(10)
    assert ended(process.pid, started)
    assert process.wait(10) == -signal.SIGKILL


def clocks(workers: int) -> VectorClock:
    return VectorClock(
        np.zeros(8, "i8"), np.zeros(workers, "i8"), range(workers), lambda *what: None
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_clock_of_a_shard_that_is_taken_over(seed: int) -> None:
    """It is never ahead of what is applied, and right once the shard has all."""
    chance, workers, most = random.Random(seed), 3, 60
    pushed = [[n for n in range(most) if n % workers == w] for w in range(workers)]

    def grow(ledger: list[int], issued: int) -> list[int]:
        left = [sum(n < issued for n in numbers) for numbers in pushed]
        return [chance.randint(count, n) for count, n in zip(ledger, left, strict=True)]

    def apply(ledger: list[int], more: list[int]) -> None:
        news = [n for w in range(workers) for n in pushed[w][ledger[w] : more[w]]]
        for n in chance.sample(news, len(news)):
            its.advance(n)
        ledger[:] = its._applied[:] = more
        its.publish()
        done = {n for w in range(workers) for n in pushed[w][: ledger[w]]}
        truth = next(n for n in range(most + 1) if n not in done) // workers
        assert observe(its._header, CLOCK) <= truth
        if its._learned is None and learned:
            assert observe(its._header, CLOCK) == truth

    its, learned, issued = clocks(workers), False, chance.randint(20, 50)
    ledger = grow([0] * workers, issued)
    its._applied[:] = ledger
    its._header[CLOCK] = min(ledger)
    its.take_over()
    for _ in range(2):  # a coordinator that dies is asked by its successor once more
        asked = list(ledger)
        apply(ledger, grow(ledger, issued))
        known = grow([0] * workers, issued)
        missing = [
            n for w in range(workers)
            for n in [m for m in pushed[w][known[w] :] if m < issued][max(0, asked[w] - known[w]) :]
        ]  # fmt: skip
        its.learn(issued, missing, known)
        learned = True
        issued = chance.randint(issued, most)
    apply(ledger, grow(ledger, issued))
    apply(ledger, [len(numbers) for numbers in pushed])
    assert its._learned is None
    assert observe(its._header, CLOCK) == most // workers


def test_a_snapshot_goes_on_without_a_server() -> None:
    """Each waits for what all have applied; a shard that another takes over says it once more."""
    ranks: Any = SimpleNamespace(roles=SimpleNamespace(servers=(0, 1, 2)), sent=[])
    ranks.send = lambda to, kind, what: ranks.sent.extend((rank, kind, what) for rank in to)
    committer = SimpleNamespace(note=lambda step: None)
    snapshots = Checkpoints(SimpleNamespace(cluster=ranks, base_samples=0), committer)
    ledgers = [np.array(ledger) for ledger in ([3, 0], [0, 5], [1, 1])]
    servers = [
        SnapshotAgreement(
            ledger, False, False, lambda said, number=number: snapshots.hear(0, (number, said))
        )
        for number, ledger in enumerate(ledgers)
    ]
    snapshots.begin(0)
    for server in servers[::2]:
        server.begin(snapshots.begun)
        assert not server.advance(1)
        assert not server.advance(0)
    snapshots.forget(2)
    ledgers[2][:] = 4, 4  # as its successor goes on, which has not heard of the snapshot
    servers[1].begin(snapshots.begun)
    assert not servers[1].advance(0)
    assert [kind for _, kind, _ in ranks.sent] == ["snapshot"] * 3
    snapshots.hear(0, (2, ledgers[2].tolist()))
    assert ranks.sent[3:] == [(rank, "agreed", [4, 5]) for rank in (0, 1, 2)]
    for server, ledger in zip(servers, ledgers, strict=True):
        server.agree_on([4, 5])
        assert not server.advance(0)
        ledger[:] = 4, 5
        assert server.advance(0)


def test_a_snapshot_is_given_up() -> None:
    """Whatever a server waits for, but for the live shard to be written."""
    server = SnapshotAgreement(np.array([1]), False, False, lambda said: None)
    server.begin(7)
    server.advance(0)
    server.give_up()
    server.agree_on([9])
    assert (server.phase, server.begun) == (Phase.FREE, 7)
    server.phase = Phase.HOLD
    server.give_up()
    assert server.phase is Phase.HOLD


# A coordinator: what was under way ends, and nothing comes twice --------------------------------

ROLES = Roles((0, 1, 2, 3), (4, 5, 6))
COORDINATOR = (*coordinator_fields(3), *record_fields())
WORKERS, SAMPLES, BATCH, EPOCHS = 3, 50, 4, 3


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


def dispatcher_of(ranks: Any, allocator: SampleAllocator | None = None) -> SurvivingDispatcher:
    """Return what begins to assign batches, or goes on with what the one before has noted."""
    record = CoordinatorLog(ranks, 0)
    if allocator is None:
        allocator = SampleAllocator(1000, 10, 3, epochs=1)
        record.save(allocator, {})
    return SurvivingDispatcher(ranks, ranks, allocator, record=record)


def test_the_end_of_an_epoch_is_told_again() -> None:
    """A server that has taken a shard over evicts old rows, and so do all of a new coordinator.

    Before a new coordinator begins a snapshot, it hears of the last one that the others began.
    """
    ranks: Any = Ranks()
    ranks.failures.lost, ranks.hosts = {3}, ["here"] * 7
    job: Any = SimpleNamespace(
        cluster=ranks, base_samples=0, evaluations=None, config=Config(optimizer="sgd"),
        problem=SimpleNamespace(layout=Layout.of({"w": (9,)}, {"t": Table(9, 2, evict_after=1)})),
        rate=lambda rate: rate, dtype=np.dtype("f8"),
    )  # fmt: skip
    nothing = lambda *what, **more: None  # noqa: E731
    log: Any = SimpleNamespace(
        due=bool, heard=nothing, event=nothing, warn=nothing, start_at=nothing, warnings=[],
        last_eval=None,
    )  # fmt: skip
    committer: Any = SimpleNamespace(
        poll=bool, busy=False, refused=False, note=nothing,
        give_up_shard=lambda *what: False, is_due=lambda *what: False,
    )  # fmt: skip
    allocator = SampleAllocator(SAMPLES, SAMPLES, WORKERS, EPOCHS)
    allocator.applied(0, *filter(None, [allocator.next(0)]))
    server: Any = SimpleNamespace(version=1, ledger=[1, 0, 0])
    snapshots = Checkpoints(job, committer)
    dispatcher = dispatcher_of(ranks, allocator)
    coordinator = SurvivingCoordinator(job, server, dispatcher, snapshots, log)

    def told() -> list[Any]:
        coordinator.advance()
        coordinator.advance()
        found = [payload for _, kind, payload in ranks.sent if kind == "over"]
        ranks.sent.clear()
        return found

    assert told() == [(1, [1, 0, 0])]
    assert told() == []
    coordinator.handle(1, "taken over", ({3}, 3, 0, [1, 0, 0], 0.0, False))
    assert told() == [(1, [1, 0, 0])]
    state = {"samples_more": 0, "lost": {}, "stop": None, "diverged": None, "serving": {3: 1}}
    coordinator.go_on(state)
    for rank, begun in enumerate((4, 5, 3)):
        for kind in ("files", "applied"):
            coordinator.handle(rank, kind, "an answer to the dead")
        assert told() == []
        coordinator.handle(rank, "settled", begun)
    assert told() == [(1, [1, 0, 0])]
    assert snapshots.begun == 6, "the next one"


def test_a_successor_counts_as_the_coordinator_did() -> None:
    """It may not have heard of a dead worker's last push, or may hear more from it too late."""
    ranks: Any = Ranks()
    ranks.failures.lost, ranks.node_of = {0, 5}, [0] * 7
    nothing = lambda *what: None  # noqa: E731
    half: Any = SimpleNamespace(
        window=ranks, receiver=None, design=SimpleNamespace(kept=False, shards=[Shard(0, 8)] * 4)
    )
    home: Any = SimpleNamespace(
        rank=0, serve_beside=nothing, agreement=SimpleNamespace(begun=0),
        store=SimpleNamespace(ledger=[1, 0, 3]),
    )  # fmt: skip
    coordinator: Any = SimpleNamespace(lost={5: 2})
    failover = Failover(
        SimpleNamespace(cluster=ranks), half, lambda _: (coordinator, Takeover(home, 0.0, 4, False))
    )
    loop: Any = SimpleNamespace(
        shards=[SimpleNamespace(give_up=nothing)], handlers={}, final={}, coordinator=None
    )
    loop.finished, loop.become = loop.final.__setitem__, partial(setattr, loop, "coordinator")
    failover.join(loop)
    loop.handlers["lost"](0, None)
    for rank in (5, 6):
        loop.handlers["fin"](rank, 3)
    assert loop.final == {5: 2, 6: 3}


def test_the_hand_out_goes_on() -> None:
    """What is noted and not given is given; who is dead, or has had the last, is given nothing."""
    ranks: Any = Ranks()
    dispatcher = dispatcher_of(ranks)
    feeds = [BatchQueue(ranks.like(4 + worker), ranks, worker) for worker in range(3)]
    dispatcher.serve()
    given: list[list[Range]] = [batch_queue.news() for batch_queue in feeds]
    assert [len(batches) for batches in given] == [AHEAD] * 3
    dispatcher._next(0)  # noted, and then the coordinator dies
    dispatcher._put(2, (*EXHAUSTED, 0))
    for rank in ROLES.workers:
        publish(ranks.view(rank, "taken"), TAKEN, 1)
    allocator, _ = CoordinatorLog(ranks, 0).load()
    assert allocator.issued == 7
    successor = dispatcher_of(ranks, allocator)
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
    dispatcher = dispatcher_of(coordinator)
    batch_queue = BatchQueue(worker, coordinator, 1)
    batch_queue.open()
    dispatcher.answer(5)  # to the first of its two requests, and then the coordinator dies
    if came == 2:
        dispatcher.answer(5)
    grants = [what for _, kind, what in coordinator.sent if kind == "grant"]
    for grant in grants[:came]:
        batch_queue.granted(grant)
    successor = dispatcher_of(coordinator, CoordinatorLog(coordinator, 0).load()[0])
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
    memory: Any = Ranks()
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


def test_a_state_of_many_workers_is_saved() -> None:
    """Each of them holds the batches of a block of a file."""
    memory: Any = Ranks()
    allocator = SampleAllocator(10**7, 32, 1000, epochs=1, chunk=80)
    for worker in range(allocator.workers):
        allocator.next(worker)
    CoordinatorLog(memory, 0).save(allocator, {})
    assert CoordinatorLog(memory, 0).load() is not None


def test_notes_that_nobody_can_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none are saved, a state is too large, or more has been assigned than is kept."""
    monkeypatch.setattr(coordinator_log, "LOG", 3)
    memory: Any = Ranks()
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
