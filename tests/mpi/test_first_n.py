"""Rounds with backup workers, against a serial reference written from the paper."""

import itertools
import time

import numpy as np
import pytest
from rig import Rig

from mpips.mpi.world import Cluster
from mpips.transport.push import Push

pytestmark = pytest.mark.mpi(min_size=2)
SMALL = pytest.mark.world(max_size=4)

N = 400
PUSHES = 7


def gradient(worker: int, seq: int) -> np.ndarray:
    """Ones, so that version v leaves v, and between them numbers of this push."""
    grad = np.ones(N)
    grad[1::2] = np.sin(np.arange(N // 2) + worker + 5 * seq)
    return grad


def samples(worker: int, seq: int) -> int:
    return 1 + (worker + seq) % 4


def pushes_of(worker: int) -> int:
    """Workers end in different rounds, the last of them alone."""
    return PUSHES + 2 * worker


class Serial:
    """One shard after Chen et al., algorithm 4; the rule is SGD with rate -1."""

    def __init__(self, part: slice, workers: int, backup: int) -> None:
        self.part, self.needed = part, workers - backup
        self.w, self.version, self.dropped = np.zeros(N)[part], 0, 0
        self.round: list[Push] = []

    def take(self, push: Push) -> None:
        if push.version < self.version:
            self.dropped += 1
            return
        self.round.append(push)
        if len(self.round) == self.needed:
            self.end()

    def end(self) -> None:
        total = sum(samples(p.worker, p.seq) for p in self.round)
        for p in self.round:
            self.w += samples(p.worker, p.seq) * gradient(p.worker, p.seq)[self.part] / total
        self.version += 1
        self.round = []


def work(rig: Rig) -> None:
    puller = rig.puller
    for seq in range(1, pushes_of(rig.id) + 1):
        puller.pull(rig.replica)
        while not puller.usable:
            puller.pull(rig.replica)
        version = puller.versions[0]
        rig.expect((puller.versions == version).all(), puller.versions.copy())
        rig.expect(np.abs(rig.replica[::2] - version).max() <= 1e-12, version, rig.replica[::2])
        rig.push(gradient(rig.id, seq), samples=samples(rig.id, seq))
    rig.finish()


@pytest.mark.parametrize("backup", [pytest.param(0, marks=SMALL), pytest.param(1, marks=SMALL), 2])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_round_takes_the_first(cluster: Cluster, servers: int, backup: int) -> None:
    if cluster.world - servers <= backup:
        pytest.skip("leaves no worker to a round")
    with Rig(cluster, N, servers, backup=backup) as rig:
        if rig.worker:
            work(rig)
        else:
            serve(rig, backup)


def serve(rig: Rig, backup: int) -> None:
    """Serve slowly, and compare with the reference; that a round ended early, it is told."""
    workers = len(rig.roles.workers)
    serial = Serial(rig.shard.range, workers, backup)
    turn, taken = itertools.count(rig.id), [0] * workers

    def apply(push: Push) -> None:
        follow()
        time.sleep(0.002 * (next(turn) % 2))
        serial.take(push)
        rig.server.apply(push)
        taken[push.worker] += 1

    def follow() -> None:
        if rig.server.version > serial.version:
            others = set(range(workers)) - {push.worker for push in serial.round}
            over = serial.round and all(taken[w] >= pushes_of(w) for w in others)
            rig.expect(over, "ended early", taken, serial.round)
            serial.end()

    rig.serve(apply, follow)
    follow()
    server, total = rig.server, sum(taken)
    rig.expect(np.abs(server.params - serial.w).max() <= 1e-12, server.params - serial.w)
    counts, dropped = (server.version, server.tally.handled), server.tally.dropped
    rig.expect(counts == (serial.version, total) and dropped == serial.dropped, counts, dropped)
    rig.expect(not serial.round and total == sum(map(pushes_of, range(workers))), total)
    rig.expect(workers == 1 or backup or not dropped, "dropped without a backup worker")
