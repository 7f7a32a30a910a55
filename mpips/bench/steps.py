"""The steps of one world, for ``--scale``: seconds of exchanges and rounds, memory of servers.

Sizes go up, and those that a step would take too long for, or that do not fit into the memory of
a host, are left out.
"""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mpips.bench.measure import Options, bytes_text, in_turn
from mpips.bench.points import Memory, Point, Points, Series
from mpips.bench.pushpull import Exchange
from mpips.bench.rounds import Rounds
from mpips.bench.vector import make_job
from mpips.bench.world import facts
from mpips.cluster.collectives import gather_all
from mpips.cluster.segments import SHARED_MEMORY
from mpips.cluster.window import shared_bytes_free
from mpips.cluster.world import Cluster
from mpips.planning.job import Job
from mpips.planning.memory import available_bytes
from mpips.ps.design import Design

SIZES = tuple(64 << 10 + 2 * k for k in range(7))  # 64 KB to 256 MB
QUICK = (64 << 10, 1 << 20)
MESSAGES = 16 << 20  # bytes of the parameters where a host's pushes are sent as if from afar
SERVERS = (1, 2, 4)
STEPS = (3, 2000)  # at least and at most in one repeat
REPEAT_S, QUICK_S = 0.1, 0.02  # of steps in one repeat
ALL_S = 2.0  # of steps in all repeats, as far as one repeat is shorter
LONG_S = 6.0  # a step that is not taken
ROOM = 0.8  # of the free memory may be used


def measure(cluster: Cluster, options: Options) -> Points:
    """Measure a step of each kind at each size. Collective: yes; all ranks return the same."""
    times: list[Point] = []
    memory: list[Memory] = []
    left_out: list[str] = []
    kinds = [0] + [s for s in SERVERS if s <= max(1, cluster.world // 2)] * (cluster.world > 1)
    last: dict[int, Point] = {}
    for size in sorted(options.pick(SIZES, QUICK)):
        why = _too_large(cluster, size)
        for servers in kinds:
            expected_s = last[servers].step_s * size / last[servers].size if servers in last else 0
            if why or expected_s > LONG_S:
                reason = why or f"a step would take {expected_s:.0f} s"
                left_out.append(f"{_name(cluster, servers)}, {bytes_text(size)}: {reason}")
                continue
            point, used = _step(cluster, size, servers, options)
            last[servers] = point
            times.append(point)
            memory += used
    if 1 in last and cluster.nodes == 1:
        memory.append(_as_if_far(cluster, min(MESSAGES, last[1].size)))
    return Points((facts(),), tuple(times), tuple(memory), tuple(left_out), options.quick)


def _name(cluster: Cluster, servers: int) -> str:
    roles = f"async, {servers} of" if servers else "sync,"
    return f"{roles} {cluster.world} ranks, {cluster.nodes} hosts"


def _step(
    cluster: Cluster, size: int, servers: int, options: Options
) -> tuple[Point, list[Memory]]:
    """Measure one step, with servers an exchange, without a round. Collective: yes."""
    crowded = any(gather_all(cluster.comm, cluster.ranks_per_core > 1))
    series = Series("async" if servers else "sync", cluster.nodes, cluster.world, servers, crowded)
    if not servers:
        rounds = Rounds(cluster, size)
        seconds = _seconds(cluster, rounds.exchange, options)
        rounds.free()
        return Point(series, size, seconds), []
    job = make_job(cluster, size // 4, "async", servers=servers)
    exchange = Exchange(job)
    seconds = _seconds(cluster, exchange.exchange, options)
    memory = memory_of_servers(job, exchange, size, cluster.nodes)
    exchange.free()
    return Point(series, size, seconds), [memory]


def _seconds(cluster: Cluster, steps: Callable[[int], None], options: Options) -> float:
    """Return the seconds of one of the steps that `steps(count)` takes. Collective: yes."""
    steps(2)  # both gradient buffers are written for the first time
    (once,) = in_turn(cluster, {"": lambda: steps(1)}, 1)[""]
    if once > ALL_S:
        return once
    least, most = STEPS
    count = max(least, min(most, int((QUICK_S if options.quick else REPEAT_S) / once)))
    repeats = max(1, min(options.repeats, int(ALL_S / (count * once))))
    return statistics.median(in_turn(cluster, {"": lambda: steps(count)}, repeats)[""]) / count


def _as_if_far(cluster: Cluster, size: int) -> Memory:
    """Return a server's memory where each rank counts as a node, so that pushes are messages."""
    apart = Cluster(cluster.comm, node_size=1)
    job = make_job(apart, size // 4, "async", servers=1)
    exchange = Exchange(job)
    exchange.exchange(8)
    memory = memory_of_servers(job, exchange, size, cluster.nodes)
    exchange.free()
    apart.free()
    return memory


# Memory --------------------------------------------------------------------------------------


def memory_of_servers(job: Job, exchange: Exchange, size: int, hosts: int) -> Memory:
    """Return what the server that holds most has beyond its shard. Collective: yes.

    Args:
        job: What the exchange was made from.
        exchange: Whose servers are asked.
        size: Bytes of the parameters.
        hosts: Number of real hosts.
    """
    cluster, beyond = job.cluster, 0
    if exchange.server is not None:
        segment = Design.of(job).plan(cluster, cluster.rank).nbytes
        beyond = _beyond(exchange.server.store.params, segment)
    most = max(gather_all(cluster.comm, beyond))
    servers = len(cluster.roles.servers)
    return Memory(hosts, cluster.nodes, cluster.world, servers, size, most)


def _beyond(params: np.ndarray, segment: int) -> int:
    """Return the bytes that this server has in use beyond its shard.

    The rest of its segment of the window, its private memory, and its part of what MPI shares on
    the node. The other segments are the memory of other ranks, also where this one reads them.
    """
    used = segment - params.nbytes
    for begin, end, path, sizes in mappings():
        window = begin <= params.ctypes.data < end
        used += sizes["Anonymous"]
        if window and not path:  # a node of one rank may have its window in private memory
            used -= segment
        elif not window and path.startswith((f"{SHARED_MEMORY}", "/SYSV", "/memfd")):
            used += sizes["Pss"]
    return used


def mappings() -> Iterator[tuple[int, int, str, dict[str, int]]]:
    """Yield begin, end, path and sizes in bytes of each mapping of this process."""
    current: tuple[int, int, str, dict[str, int]] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split(None, 5)
        if not words[0].endswith(":"):
            if current:
                yield current
            begin, _, end = words[0].partition("-")
            path = words[5] if len(words) > 5 else ""
            current = int(begin, 16), int(end, 16), path, {}
        elif current and words[-1] == "kB":
            current[3][words[0][:-1]] = int(words[1]) * 1024
    if current:
        yield current


def _too_large(cluster: Cluster, size: int) -> str:
    """Return why that many parameters do not fit somewhere, or nothing. Collective: yes."""
    here = cluster.hosts.count(cluster.hosts[cluster.rank])
    needed = (3 * here + 1) * size  # of each worker a replica and two gradients, and the shards
    free = int(ROOM * min(available_bytes(), shared_bytes_free()))
    short = [(n, f) for n, f in gather_all(cluster.comm, (needed, free)) if n > f]
    if not short:
        return ""
    return f"it takes {short[0][0] / 1e9:.1f} GB of a host, which has {short[0][1] / 1e9:.1f} GB"
