"""Steps and server memory of all workers, beside the fewest workers.

In mode async, one server and all workers are compared with one server and one worker. In mode sync,
all ranks are compared with two. With several nodes, these two ranks are on different nodes. At a
ratio of 1, the time of a step is proportional to the number of workers.
"""

from collections.abc import Iterator
from pathlib import Path

from mpips.mpi.collectives import cluster_subset, free, gather_all
from mpips.mpi.world import Cluster
from mpips.tools.bench.measure import Options, Row, bytes_text, in_turn, milliseconds
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.rounds import Rounds
from mpips.tools.bench.vector import make_job

SIZES, QUICK = (64 << 10, 1 << 20, 16 << 20), (64 << 10,)
WORK_BYTES = 256 << 20  # bytes of parameters of all steps in one repeat
STEPS = (3, 500)  # smallest and largest number in one repeat
POWER = 1.25  # aim: the time of a step grows at most by this power of the number of workers
SPARE_MB = 10


def run(cluster: Cluster, options: Options) -> Iterator[Row]:
    """Compare at each size, while ranks without a part in the small world wait. Collective: yes."""
    ranks = (0, cluster.world - 1)
    comm = cluster_subset(cluster, ranks)
    fewest = Cluster(comm) if cluster.rank in ranks else None
    sizes = sorted(options.pick(SIZES, QUICK))
    for size in sizes:
        for mode in ("async", "sync"):
            yield _at(cluster, fewest, mode, size, options)
    yield _memory(cluster, fewest, sizes[-1])
    if fewest is not None:
        fewest.free()
    free(comm)


def _make(cluster: Cluster, mode: str, size: int) -> Exchange | Rounds:
    if mode == "sync":
        return Rounds(cluster, size)
    return Exchange(make_job(cluster, size // 4, mode, servers=1))


def _at(cluster: Cluster, fewest: Cluster | None, mode: str, size: int, options: Options) -> Row:
    steps = options.times(STEPS, WORK_BYTES // size)
    all_ranks = _make(cluster, mode, size)
    few_ranks = _make(fewest, mode, size) if fewest is not None else None

    def few() -> None:
        if few_ranks is not None:
            few_ranks.exchange(steps)

    sides = {"all": lambda: all_ranks.exchange(steps), "few": few}
    times = in_turn(cluster, sides, options.repeats)
    all_ranks.free()
    if few_ranks is not None:
        few_ranks.free()
    servers = int(mode == "async")
    more = (cluster.world - servers) / (2 - servers)
    fewest_times = [more * taken for taken in times["few"]]
    crowded = any(gather_all(cluster.comm, cluster.ranks_per_core > 1))
    aim = None if crowded else more ** (1 - POWER)  # ranks that share cores wait longer
    case = f"{mode}, {bytes_text(size)}, {cluster.world - servers} workers"
    names = "scale", case, f"{more:g} x a step of {2 - servers}"
    return milliseconds(names, steps, (times["all"], fewest_times), aim)


def _memory(cluster: Cluster, fewest: Cluster | None, size: int) -> Row:
    """Compare the private memory of a server. Collective: yes."""
    few = _server_mb(fewest, size) if fewest is not None else 0.0
    bound = max(gather_all(cluster.comm, few)) + SPARE_MB
    used = max(gather_all(cluster.comm, _server_mb(cluster, size)))
    case = f"memory of the server, {bytes_text(size)}, {cluster.world - 1} workers"
    return Row("scale", case, used, "MB", f"with 1, + {SPARE_MB} MB", bound, bound / used, 1.0)


def _server_mb(cluster: Cluster, size: int) -> float:
    """Return the private memory of this rank after an exchange; 0 on a worker. Collective: yes."""
    exchange = Exchange(make_job(cluster, size // 4, "async", servers=1))
    exchange.exchange(3)
    status = Path("/proc/self/status").read_text()
    private = int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6
    exchange.free()
    return private if exchange.server is not None else 0.0
