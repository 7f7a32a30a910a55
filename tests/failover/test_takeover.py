"""What a server needs to go on for another: its process gone, its clock, its part in a snapshot."""

import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.failover.takeover import ended
from mpips.kernels.atomics import observe
from mpips.mpi.process import STARTED, stat_of
from mpips.ps.consistency import VectorClock
from mpips.ps.coordinator import Checkpoints
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
    its.take_over(clocks(workers))
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
