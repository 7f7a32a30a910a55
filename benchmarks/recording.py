"""Cost of ``--record``: push and pull by consistent reads, with and without a record.

The same exchanges in the same world, in turn. The cost depends on the number of pushes, and not on
their size. So small pushes without computation are the worst case.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.switched import BusyExchange, with_and_without
from mpips.mpi.world import Cluster
from mpips.ps.replay_log import Recorder, warm
from mpips.ps.shard import Observer
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row
from mpips.tools.bench.vector import make_job

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
QUICK = (64 << 10,)
STEPS = (3, 100)  # smallest and largest number in one repeat
COMPUTED = 64 << 10, 1e-3  # bytes and seconds of a gradient in the case with computation
REACH, FROM = 0.99, 1 << 20  # aim, and from how many bytes on it holds without computation


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare at each size, with one server and all other ranks as workers. Collective: yes."""
    with temporary_folder() as folder:
        cases = [*((size, 0.0) for size in options.pick(SIZES, QUICK)), COMPUTED]
        return [_at(cluster, *case, options, folder / f"{k}") for k, case in enumerate(cases)]


def _at(cluster: Cluster, size: int, compute_s: float, options: Options, folder: Path) -> Row:
    job = make_job(cluster, size // 4, "async", servers=1, read="consistent")
    exchange = BusyExchange(job, compute_s)
    server, recorder = exchange.server, None
    if server is not None:
        about = {"part": 1, "workers": cluster.roles.workers, "samples": [job.info.n_train]}
        warm()
        recorder = Recorder(folder, about, server.store.params, whole=True)

    @contextmanager
    def recorded() -> Iterator[None]:
        if recorder is None:
            yield
            return
        server.store.observers.append(observer := Observer(recorder.note))
        yield
        server.store.observers.remove(observer)

    case, *found = with_and_without(exchange, size, STEPS, options, recorded)
    if recorder is not None:
        recorder.close()
    exchange.free()
    rate, other, ratio = found
    reach = REACH if compute_s or size >= FROM else None
    return Row("recording", case, rate, "pushes/s", "no record", other, ratio, reach)
