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


def work(rig: Rig) -> list[object]:
    wrong: list[object] = []
    puller, sender = rig.puller, rig.sender
    for seq in range(1, pushes_of(rig.id) + 1):
        rig.cluster.wait(lambda seq=seq: sender.writable(seq))
        puller.pull(rig.replica)
        while not puller.usable:
            puller.pull(rig.replica)
        version = puller.versions[0]
        if (puller.versions != version).any():
            wrong.append(puller.versions.copy())
        if np.abs(rig.replica[::2] - version).max() > 1e-12:
            wrong.append((version, rig.replica[::2].min(), rig.replica[::2].max()))
        sender.buffer(seq)[:] = gradient(rig.id, seq)
        sender.push((0, seq, seq + 1), samples(rig.id, seq), 0.0, puller.versions)
    rig.finish()
    return wrong


@pytest.mark.parametrize("backup", [pytest.param(0, marks=SMALL), pytest.param(1, marks=SMALL), 2])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_round_takes_the_first(cluster: Cluster, servers: int, backup: int) -> None:
    if cluster.world - servers <= backup:
        pytest.skip("leaves no worker to a round")
    with Rig(cluster, N, servers, backup=backup) as rig:
        if rig.worker:
            rig.wrong += work(rig)
        else:
            rig.wrong += serve(rig, backup)


def serve(rig: Rig, backup: int) -> list[object]:
    """Serve slowly, and compare with the reference; that a round ended early, it is told."""
    workers, wrong = len(rig.roles.workers), list[object]()
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
            if not serial.round or any(taken[w] < pushes_of(w) for w in others):
                wrong.append(("ended early", taken, serial.round))
            serial.end()

    rig.serve(apply, follow)
    follow()
    server, total = rig.server, sum(taken)
    if np.abs(server.params - serial.w).max() > 1e-12:
        wrong.append(server.params - serial.w)
    counts = (server.version, server.tally.dropped, server.tally.handled)
    if counts != (serial.version, serial.dropped, total) or serial.round:
        wrong.append((*counts, serial.version, serial.dropped, total))
    if total != sum(pushes_of(w) for w in range(workers)):
        wrong.append(("pushes", total))
    if workers > 1 and backup == 0 and server.tally.dropped:
        wrong.append("dropped without a backup worker")
    return wrong
