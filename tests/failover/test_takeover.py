"""What a server needs to go on for another: its process gone, its clock, its part in a snapshot."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mpips.failover.takeover import ended
from mpips.kernels.atomics import observe
from mpips.mpi.process import STARTED, stat_of
from mpips.ps.consistency import VectorClock
from mpips.snapshot.agreement import Posted
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


def test_a_cut_goes_on_without_a_server() -> None:
    """The others wait for what it says.

    Who takes over its shard says it, unless it has been said.
    """
    posts = [np.zeros(3, "i8") for _ in range(3)]
    servers = [Posted(posts, own) for own in range(3)]
    outs = [np.zeros(2, "i8") for _ in range(3)]
    for server in (0, 1):
        servers[server].begin(np.array([server, 5 - server]), outs[server])
    assert not servers[0].done()
    taken_over = Posted(posts, 2)
    taken_over.catch_up(1, [4, 4])
    taken_over.catch_up(1, [9, 9])
    assert servers[0].done()
    assert servers[1].done()
    np.testing.assert_array_equal(outs[:2], [[4, 5], [4, 5]])
    for server in (servers[0], servers[1], taken_over):
        assert server.number == 1
        server.begin(np.array([7, 7]), outs[2])
    assert taken_over.done()
    np.testing.assert_array_equal(outs[2], [7, 7])
