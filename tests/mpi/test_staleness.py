"""What servers do about stale pushes, against serial references written from the papers."""

from typing import Any

import numpy as np
import pytest
from rig import Rig

from mpips.config import Config
from mpips.mpi import window as windows
from mpips.mpi.world import Cluster
from mpips.optim.staleness import Staleness
from mpips.transport.push import Push

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4)]

N = 403
PUSHES = 8
LR = -1.0  # of the rig


def gradient(worker: int, seq: int) -> np.ndarray:
    return 0.1 * np.sin(np.arange(N) + worker + 7 * seq)


def origin(worker: int, seq: int) -> np.ndarray:
    return np.cos(np.arange(N) * (worker + 2) - seq)


def version(worker: int, seq: int) -> int:
    """A version that is as old as the start, or two pushes of each before."""
    return 0 if (worker + seq) % 3 == 0 else max(0, seq - 3)


class Serial:
    """One element-wise parameter server after the papers; the rule is SGD."""

    def __init__(self, config: Config, part: slice) -> None:
        self.config, self.part = config, part
        self.w = np.zeros(N)[part]
        self.mean_square = np.zeros(N)[part]
        self.version = self.dropped = 0

    def apply(self, push: Push) -> None:
        grads = [gradient(p.worker, p.seq)[self.part] for p in push]
        old = max(self.version - version(p.worker, p.seq) for p in push)
        self.version += len(grads)
        if self.config.max_staleness is not None and old > self.config.max_staleness:
            self.dropped += len(grads)
            return
        lr = LR / old if self.config.staleness_lr and old > 0 else LR
        g = sum(grads)
        if self.config.delay_compensation:
            late = self.w - origin(push.worker, push.seq)[self.part]
            factor: float | np.ndarray = self.config.delay_compensation
            if self.config.delay_adaptive:
                self.mean_square = 0.95 * self.mean_square + 0.05 * g**2
                factor = factor / np.sqrt(self.mean_square + 1e-7)
            g = g + factor * g * g * late
        self.w = self.w - lr * g


def work(rig: Rig) -> None:
    for seq in range(1, PUSHES + 1):
        read = np.full(len(rig.shards), version(rig.id, seq))
        rig.push(gradient(rig.id, seq), read, origin(rig.id, seq))
    rig.finish()


CASES: dict[str, dict[str, Any]] = {
    "limit": {"max_staleness": 3},
    "limit 0": {"max_staleness": 0},
    "rate": {"staleness_lr": True},
    "limit and rate": {"max_staleness": 4, "staleness_lr": True},
    "compensation": {"delay_compensation": 0.5},
    "adaptive": {"delay_compensation": 0.3, "delay_adaptive": True},
    "all": {
        "max_staleness": 3, "staleness_lr": True, "delay_compensation": 0.2, "delay_adaptive": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "servers", "aggregate"),
    [
        *((name, 1, False) for name in CASES),
        *((name, 1, True) for name, case in CASES.items() if "delay_compensation" not in case),
        *(("all", 2, False), ("limit and rate", 2, True)),  # a shard knows nothing of the others
    ],
)
def test_servers_do_what_the_papers_say(
    cluster: Cluster, name: str, servers: int, aggregate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(**CASES[name])
    if aggregate and cluster.nodes == 1:
        pytest.skip("is the same")
    monkeypatch.setattr(windows, "TRANSFER_MAX_BYTES", 1024)  # bodies of several pieces
    with Rig(cluster, N, servers, aggregate=aggregate, stale=Staleness.of(config)) as rig:
        if rig.worker:
            work(rig)
        else:
            serial = Serial(config, rig.shard.range)

            def apply(push: Push) -> None:
                serial.apply(push)
                rig.server.apply(push)

            rig.serve(apply)
            server, dropped = rig.server, rig.server.tally.dropped
            good = np.allclose(server.params, serial.w, rtol=1e-12, atol=1e-13)
            rig.expect(good, server.params - serial.w)
            counts = server.version, dropped
            rig.expect(counts == (serial.version, serial.dropped), counts)
            rig.expect(config.max_staleness is None or 0 < dropped < server.version, dropped)
            if config.delay_adaptive:
                good = np.allclose(server.slots[-1], serial.mean_square, rtol=1e-12)
                rig.expect(good, server.slots[-1] - serial.mean_square)
