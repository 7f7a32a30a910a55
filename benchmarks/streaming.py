"""Local steps with whole, fragmented and overlapped exchanges: time of a step, peak of a host.

All ranks are workers on two or more hosts. In a period, each makes 48 local steps of AdamW on 1.1
million parameters; a gradient sleeps for 30 ms. On the other side, the same workers make the same
steps without exchanges. The peak is the largest number of bytes that a host's interface sends
within 0.35 s, which is shorter than the time between two exchanges of a fragment. On one host, each
half of the ranks counts as a node. Then no interface counts their messages, and there are no peaks.
"""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sleeping_model import SleepingModel
from mpips.config import Config
from mpips.config.jobfile import resolve
from mpips.datasets import DataInfo, Dataset, Source
from mpips.datasets.table import MemoryTable
from mpips.layout import Layout
from mpips.layout.roles import assign
from mpips.mpi.collectives import gather_all
from mpips.mpi.world import Cluster
from mpips.optim import warm
from mpips.planning.job import Job
from mpips.problems.accumulate import follow
from mpips.rounds.averaging import AveragingRound
from mpips.rounds.base import Report
from mpips.rounds.streaming import StreamingRound
from mpips.strategies.local_sgd import LocalWorker
from mpips.tools.bench import wire
from mpips.tools.bench.measure import Options, Row, compare, in_turn

SIZE, QUICK_SIZE = 1_100_000, 50_000
GRADIENT_S, QUICK_S = 0.03, 0.002
STEPS = 48
WINDOW_S, LOOK_S = 0.35, 0.005
PEAK, TIME = 3.0, 1 / 1.1  # a third of the peak at most, and 10 % more time than computing alone
DILOCO: dict[str, Any] = {
    "local_steps": STEPS, "local_slots": "keep", "outer_momentum": 0.9, "outer_nesterov": True,
    "outer_lr": 0.7, "optimizer": "adamw", "lr": 1e-4, "schedule": "constant", "batch_size": 1,
}  # fmt: skip
WHOLE, ALONE = "whole", "alone"
OVERLAPPED = {"fragments": 4, "overlap_steps": 6}
SIDES: Mapping[str, Mapping[str, Any]] = {
    WHOLE: {},
    "4 fragments": {"fragments": 4},
    "4 fragments, 6 steps overlapped": OVERLAPPED,
    "4 fragments, 6 steps overlapped, int4": {**OVERLAPPED, "codec": "int4"},
}


Look = tuple[float, dict[str, int]]


class Slow(SleepingModel):
    """A vector of parameters, whose gradient is small and sleeps."""

    def __init__(self, data: DataInfo, config: Config, size: int, seconds: float) -> None:
        super().__init__(data, config)
        self.layout, self._seconds = Layout.of({"w": (size,)}), seconds

    def loss_and_grad(self, params: Any, batch: Any, out: Any) -> float:
        """Return 1 after a sleep."""
        time.sleep(self._seconds)
        out["w"][:] = 1e-3
        return 1.0


class Alone:
    """Interface of rounds for a worker without exchanges."""

    vectors = 0.0

    def __init__(self, job: Job) -> None:
        n = job.layout.size
        self.own_params = np.ones(n, job.dtype)
        self.own_slots = tuple(np.zeros(n, job.dtype) for _ in job.rule.slots)

    def begin(self) -> None:
        """Start with the worker's parameters."""

    def begin_exchange(self, step: int) -> None:
        """Exchange nothing."""

    def getting_on(self) -> AbstractContextManager[None]:
        """Return nothing to get on with."""
        return nullcontext()


class Side:
    """Side of a comparison: one kind of exchange, or none. Collective: yes, all methods.

    Args:
        cluster: The ranks.
        given: Options of the job, in addition to `DILOCO`.
        quick: Whether the model is small and fast.
        exchanges: Whether workers exchange parameters.

    Attributes:
        nbytes: Bytes of the parameters.
    """

    def __init__(
        self, cluster: Cluster, given: Mapping[str, Any], quick: bool, exchanges: bool = True
    ) -> None:
        self._job = job = make_job(cluster, given, quick)
        self._rounds: StreamingRound | AveragingRound | None = None
        self.nbytes = job.layout.size * job.dtype.itemsize
        self._step, workers = 0, cluster.world
        self._batch = (0, 0, job.config.round_steps * workers)
        self._weights = np.full(workers, 1 / workers)
        if exchanges:
            self._rounds = StreamingRound(job) if job.config.streaming else AveragingRound(job)
            self._rounds.params[:] = 1
            self._rounds.publish_start()
        self._worker = LocalWorker(job, self._rounds or Alone(job))

    def period(self) -> None:
        """Make the steps between two exchanges of the same fragment."""
        for _ in range(self._job.config.fragments):
            self._worker.read_ahead(self._batch)
            follow(self._job.problem, self._worker.compute(self._batch, self._step))
            self._step += 1
            if self._rounds is not None:
                self._rounds.exchange(self._step, self._weights, Report())

    def free(self) -> None:
        """Free the resources of this side."""
        self._worker.close()
        del self._worker  # has views of the window
        if self._rounds is not None:
            self._rounds.free()


def make_job(cluster: Cluster, given: Mapping[str, Any], quick: bool) -> Job:
    """Return a job of local steps with all ranks as workers, and set roles. Collective: yes."""
    config = resolve({**DILOCO, **given, "mode": "local_sgd"})
    cluster.roles = assign("local_sgd", cluster.hosts, cluster.node_of, 0)
    n = STEPS * cluster.world
    table = MemoryTable("none", np.zeros((n, 1), "f4"), np.zeros((n, 1), "f4"))
    info = DataInfo("none", n, 0, (1,), (1,), None, "none")
    data = Dataset(info, Source(table, info, range(n)), None)
    size, seconds = (QUICK_SIZE, QUICK_S) if quick else (SIZE, GRADIENT_S)
    job = Job(config, cluster, info, data, Slow(info, config, size, seconds), Path(), 0)
    warm(job.rule, config.dtype, config.in_rounds)
    return job


class Watch:
    """Thread that reads the bytes sent by this host's interfaces, within ``with`` blocks.

    Attributes:
        looks: For each block, a list of times in seconds and bytes of each interface, in order.
    """

    def __init__(self) -> None:
        self.looks: list[list[Look]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        self.looks.append(looks := [])
        over = False
        while not over:
            over = self._over.wait(LOOK_S)  # after the block, read once more
            looks.append((time.perf_counter(), wire.bytes_sent(wire.COUNTERS.read_text())))


def peak(looks: Sequence[Look], window_s: float = WINDOW_S) -> int:
    """Return the largest number of bytes that one interface sent within `window_s`."""
    most, first = 0, 0
    for now, sent in looks:
        while now - looks[first][0] > window_s:
            first += 1
        most = max(most, wire.grown(looks[first][1], sent))
    return most


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare each kind of exchange with computing alone. Collective: yes."""
    if cluster.nodes > 1:
        return _compare(cluster, options, several=True)
    halves = Cluster(cluster.comm, node_size=-(-cluster.world // 2))
    rows = _compare(halves, options, several=False)
    halves.free()
    return rows


def _compare(cluster: Cluster, options: Options, several: bool) -> list[Row]:
    sides = {name: Side(cluster, given, options.quick) for name, given in SIDES.items()}
    sides[ALONE] = Side(cluster, {}, options.quick, exchanges=False)
    watches = {name: Watch() for name in sides}

    def watched(name: str) -> None:
        with watches[name]:
            sides[name].period()

    turns = {name: lambda name=name: watched(name) for name in sides}
    times = in_turn(cluster, turns, options.repeats)
    if several:
        _check_seen(cluster, watches, sides[WHOLE].nbytes)
    for side in sides.values():
        side.free()
    rows = [_time(cluster, name, times, several) for name in SIDES]
    return rows + [_peak(cluster, name, watches) for name in SIDES if several and name != WHOLE]


def _case(cluster: Cluster, name: str) -> str:
    return f"{name}, {cluster.world} workers on {cluster.nodes} nodes"


def _time(cluster: Cluster, name: str, times: Mapping[str, list[float]], several: bool) -> Row:
    mine, other, ratio = compare(times[name], times[ALONE])
    aim = TIME if several and SIDES[name].get("overlap_steps") else None
    ms, beside, case = 1e3 / STEPS, "computing alone", _case(cluster, name)
    return Row("streaming step", case, mine * ms, "ms", beside, other * ms, ratio, aim)


def _peak(cluster: Cluster, name: str, watches: Mapping[str, Watch]) -> Row:
    """Compare the largest peak of a host with that of whole exchanges. Collective: yes."""
    pair = (watches[which].looks[1:] for which in (name, WHOLE))  # the first turn is for warming up
    here = [statistics.median(map(peak, looks)) for looks in pair]
    mine, whole = map(max, zip(*gather_all(cluster.comm, here), strict=True))
    case, mb = _case(cluster, name), 1e-6
    return Row("streaming peak", case, mine * mb, "MB", "whole", whole * mb, whole / mine, PEAK)


def _check_seen(cluster: Cluster, watches: Mapping[str, Watch], size: int) -> None:
    """Check that the interfaces have counted at least the bytes of the sums. Collective: yes.

    Raises:
        UserError: If not.
    """
    looks = watches[WHOLE].looks[-1]
    sent = min(gather_all(cluster.comm, wire.grown(looks[0][1], looks[-1][1])))
    wire.check_counted(sent, size * (cluster.nodes - 1) // cluster.nodes, "a host's exchange")
