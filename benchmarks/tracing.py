"""Cost of ``--trace``: push and pull with and without a trace of each rank.

The same exchanges in the same world, in turn. A rank records each change of its phase. So very
short steps are the worst case.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.switched import BusyExchange, with_and_without
from mpips.health import status_board
from mpips.health.trace_file import Trace
from mpips.mpi.world import Cluster
from mpips.ps.shard import Observer, trace_push
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row
from mpips.tools.bench.vector import make_job

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
QUICK = (64 << 10,)
STEPS = (3, 2000)  # smallest and largest number in one repeat
COMPUTED = 64 << 10, 1e-3  # bytes and seconds of a gradient in the case with computation
REACH, FROM = 0.97, 1 << 20  # aim, and from how many bytes on it holds without computation


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare at each size, with one server and all other ranks as workers. Collective: yes."""
    with temporary_folder() as folder:
        cases = [*((size, 0.0) for size in options.pick(SIZES, QUICK)), COMPUTED]
        return [_at(cluster, *case, options, folder) for case in cases]


def _at(cluster: Cluster, size: int, compute_s: float, options: Options, folder: Path) -> Row:
    exchange = BusyExchange(make_job(cluster, size // 4, "async", servers=1), compute_s)
    with closing(Trace(folder / f"rank-{cluster.rank}", {"rank": cluster.rank})) as trace:

        @contextmanager
        def traced() -> Iterator[None]:
            status_board.trace_by(trace.note)
            if exchange.server is not None:
                exchange.server.store.observers.append(Observer(trace_push))
            yield
            if exchange.server is not None:
                exchange.server.store.observers.remove(Observer(trace_push))
            status_board.trace_by(None)

        case, *found = with_and_without(exchange, size, STEPS, options, traced)
        status_board.trace_by(trace.note)
    exchange.free()
    rate, other, ratio = found
    reach = REACH if compute_s or size >= FROM else None
    return Row("tracing", case, rate, "pushes/s", "no trace", other, ratio, reach)
