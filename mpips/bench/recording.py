"""What ``--record`` costs: push and pull by consistent reads, with a record beside without.

The same exchanges in the same world, in turn. What a record takes depends on the pushes, and not on
their size: small ones are the worst case.
"""

from collections.abc import Callable
from pathlib import Path

from mpips.bench.jobs import temporary_folder
from mpips.bench.measure import Options, Row, bytes_text, compare, in_turn
from mpips.bench.pushpull import Exchange
from mpips.bench.vector import make_job
from mpips.cluster.world import Cluster
from mpips.ps.recording import Recorder

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
QUICK = (64 << 10,)
STEPS = (3, 100)  # at least and at most in one repeat
WORK_BYTES = 128 << 20  # moved by a worker's pulls in one repeat
REACH, FROM = 0.99, 1 << 20  # bytes


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare at each size; one server, the other ranks are workers. Collective: yes."""
    with temporary_folder() as folder:
        return [_at(cluster, size, options, folder) for size in options.pick(SIZES, QUICK)]


def _at(cluster: Cluster, size: int, options: Options, folder: Path) -> Row:
    exchange = Exchange(make_job(cluster, size // 4, "async", servers=1, read="consistent"))
    least, most = STEPS
    steps = max(least, min(most, WORK_BYTES // size))
    recorder = None
    if exchange.server is not None:
        params = exchange.server.store.params
        recorder = Recorder(folder / f"{size}", {"part": 1}, params, whole=True)

    def side(used: Recorder | None) -> Callable[[], None]:
        def work() -> None:
            if exchange.server is not None:
                exchange.server.store.recorder = used
            exchange.exchange(steps)

        return work

    sides = {"recorded": side(recorder), "plain": side(None)}
    times = in_turn(cluster, sides, options.repeats)
    if recorder is not None:
        recorder.close()
    exchange.free()
    mine, other, ratio = compare(times["recorded"], times["plain"])
    workers = cluster.world - 1
    pushes = workers * steps
    case = f"{bytes_text(size)}, 1 server, {workers} worker{'s' * (workers > 1)}"
    rates, reach = (pushes / mine, pushes / other), REACH if size >= FROM else None
    return Row("recording", case, rates[0], "pushes/s", "no record", rates[1], ratio, reach)
