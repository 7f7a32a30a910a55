"""Share of a core that an idle rank uses.

A server of an asynchronous run waits for pushes, and a worker waits for a batch, each for a second
before the measurement.
"""

import itertools
import statistics
import time

from mpips.mpi.collectives import gather_all
from mpips.mpi.waiting import Backoff
from mpips.mpi.world import Cluster
from mpips.tools.bench.measure import Options, Row
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.vector import make_job

SIZE = 1 << 18
BEFORE_S, WATCHED_S = 1.0, 1.0
QUICK_S = 0.1
REACH = 0.05


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Measure one idle server and the idle workers. Collective: yes."""
    exchange = Exchange(make_job(cluster, SIZE, "async", servers=1))
    before, watched = (QUICK_S, QUICK_S) if options.quick else (BEFORE_S, WATCHED_S)
    exchange.exchange(1)
    shares = _shares(exchange, before, watched, options.repeats)
    found = gather_all(cluster.comm, (cluster.roles.name(cluster.rank), shares))
    exchange.free()
    rows = []
    for role in ("server", "worker"):
        used = max(statistics.median(s) for name, s in found if name.startswith(role))
        used = max(used, 1e-6)  # the clock may not have ticked
        case = f"{role} that has waited for {before:g} s"
        beside = "of a core"
        bound = 100 * REACH
        rows.append(Row("idle", case, 100 * used, "%", beside, bound, REACH / used, 1.0))
    return rows


def _shares(exchange: Exchange, before: float, watched: float, repeats: int) -> list[float]:
    """Wait while idle, and return the CPU seconds per second, `repeats` times."""
    cluster = exchange.cluster
    backoff = Backoff(cluster.ranks_per_core)
    start = time.perf_counter()
    ends = [start + before + k * watched for k in range(repeats + 1)]
    marks: list[tuple[float, float]] = []
    while len(marks) < len(ends):
        now = time.perf_counter()
        if now >= ends[len(marks)]:
            marks.append((now, time.process_time()))
        if exchange.server is not None:
            exchange.server.turn()
        else:
            cluster.progress()
            cluster.poll()
        backoff.pause()
    return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks)]
