"""Trials by all ranks: MPI library, windows, remote reads and links."""

import contextlib
import platform
import statistics
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from mpips import __version__
from mpips.errors import UserError
from mpips.layout.roles import Roles
from mpips.mpi import collectives
from mpips.mpi.abort import ulfm_is_on
from mpips.mpi.process import cpu_name
from mpips.mpi.start import TAG_PLAIN, any_thread_may_call, is_open_mpi, library_text, mpi_name
from mpips.mpi.waiting import Background, Backoff, all_done
from mpips.mpi.window import Field, Plan, Window, shared_bytes_free
from mpips.mpi.world import Cluster
from mpips.planning.needs import check_memory, memory_bytes
from mpips.ps.design import Design
from mpips.tools.bench.link import Sides
from mpips.tools.bench.measure import in_turn
from mpips.tools.bench.vector import gradient_of, make_job
from mpips.tools.doctor.machine import Library
from mpips.tools.doctor.network import BUSY_S, Link, Need, RemoteGet, pairs
from mpips.tools.doctor.report import Finding, fail, ok

TRANSPORTS = {"libucp": "UCX", "libfabric": "libfabric", "libpsm2": "PSM2"}
FIELD = "numbers"
N = 1 << 16  # elements of each rank's segment in a trial of windows
READS = 20
PAGES = 1 << 20  # doubles that a busy owner reads and writes
SIZE = 4 << 20
TIMES = (2, 16)  # smallest and largest number of transfers in one turn
TURN_S = 0.05
REPEATS = 2
WAIT_S = 0.01


def gather_library() -> Library:
    """Return the software and the processor of this rank."""
    maps = Path("/proc/self/maps").read_text()
    lines = library_text().splitlines()
    device = next((x.partition(":")[2].strip() for x in lines if x.startswith("MPICH Dev")), "")
    versions = {
        "mpips": __version__, "python": platform.python_version(),
        "numpy": np.__version__, "mpi4py": metadata.version("mpi4py"),
    }  # fmt: skip
    return Library(
        mpi_name(),
        device,
        tuple(name for file, name in TRANSPORTS.items() if file in maps),
        any_thread_may_call(),
        tuple(versions.items()),
        cpu_name(),
    )


def try_ulfm(cluster: Cluster) -> Finding:
    """Check whether a job can continue without dead ranks. Collective: yes.

    If MPI supports it, the check revokes and shrinks a communicator (User Level Failure Mitigation,
    MPI Forum's proposal for MPI 5; Bland et al., IJHPCA 2013).
    """
    if not ulfm_is_on():
        hint = "; mpirun --with-ft ulfm switches it on" if is_open_mpi() else ""
        text = f"a dead rank ends the job, which resumes from its checkpoint{hint}"
        return ok("ulfm", f"off: {text}")
    size = collectives.count_survivors(cluster.comm, cluster.wait)
    if size != cluster.world:
        remedy = "start the job without --with-ft ulfm"
        return fail("ulfm", f"on, but {size} of {cluster.world} ranks are left", remedy)
    return ok("ulfm", "on: a revoked communicator shrinks to the ranks that live")


def gather_need(cluster: Cluster, parameters: int) -> Need:
    """Return the memory that a model of this size needs on this rank's host. Collective: yes."""
    mode = "async" if cluster.world > 1 else "sync"
    job = make_job(cluster, parameters, mode, optimizer="adam")
    here = [r for r in range(cluster.world) if cluster.hosts[r] == cluster.hosts[cluster.rank]]
    if mode == "async":
        design = Design.of(job)
        needed = sum(design.plan(cluster, rank).nbytes for rank in here)
    else:  # the replica, the gradient and two slots
        needed = 4 * parameters * job.dtype.itemsize
    refused = ""
    try:
        workers = sum(rank in job.cluster.roles.workers for rank in here)
        check_memory(job.layout, job.config, workers, job.cluster.nodes)
    except UserError as error:
        refused = str(error).partition("; ")[0]
    cluster.roles = Roles((), tuple(range(cluster.world)))  # the roles before make_job
    return Need(needed, shared_bytes_free(), memory_bytes(), refused)


# Windows -------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(cluster: Cluster) -> Iterator[Window]:
    """Create a window with ``rank + 1`` in all elements; free it after the block. Collective: yes.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    window = Window(cluster, [Plan((Field(FIELD, "f8", (N,)),))] * cluster.world)
    window.view(cluster.rank, FIELD)[:] = cluster.rank + 1
    yield window
    cluster.barrier()
    window.free()


def _get(cluster: Cluster, window: Window, target: int, count: int) -> np.ndarray:
    """Return the first `count` elements of a rank of another node, by Get."""
    out = np.zeros(count)
    requests = window.get(target, FIELD, out)
    cluster.wait(lambda: all(request.Test() for request in requests))
    return out


def try_window(cluster: Cluster) -> tuple[list[int], float]:
    """Create a window, and read the segments of other ranks in it. Collective: yes.

    Each rank reads all ranks of its node, and by Get one rank of another node.

    Returns:
        The ranks whose segments this rank read wrongly, and the seconds to create the window.
    """
    start = time.perf_counter()
    with opened(cluster) as window:
        seconds = time.perf_counter() - start
        window.make_visible()
        seen = {r: window.view(r, FIELD) for r in cluster.my_node}
        remote = [r for r in range(cluster.world) if not cluster.is_local(r)]
        target = next((r for r in remote if r > cluster.rank), remote[0] if remote else None)
        if target is not None:
            seen[target] = _get(cluster, window, target, N)
        return [r for r, numbers in seen.items() if not np.all(numbers == r + 1)], seconds


# Remote reads -----------------------------------------------------------------------------------


def try_remote_get(cluster: Cluster) -> RemoteGet | None:
    """Time the reads of node 1's first rank from node 0's first rank. Collective: yes.

    Returns:
        The times on the reader; None on other ranks, and with one node.
    """
    if cluster.nodes == 1:
        return None
    owner, reader = cluster.node_of.index(0), cluster.node_of.index(1)
    background = Background(cluster.progress)
    times = None
    with opened(cluster) as window:
        if cluster.rank == reader:
            times = RemoteGet(
                statistics.median(_read(cluster, window, owner) for _ in range(READS)),
                _read_while(cluster, window, owner, "busy"),
                statistics.median(_read_while(cluster, window, owner, "helped") for _ in range(3)),
            )
            cluster.send(owner, "end")
        elif cluster.rank == owner:
            _be_read(cluster, background)
        cluster.barrier()
    background.end()
    return times


def _read(cluster: Cluster, window: Window, owner: int) -> float:
    start = time.perf_counter()
    _get(cluster, window, owner, 8)
    return time.perf_counter() - start


def _read_while(cluster: Cluster, window: Window, owner: int, kind: str) -> float:
    """Read from the owner while it computes, and wait until it has finished; returns seconds."""
    cluster.send(owner, kind)
    time.sleep(BUSY_S / 10)  # until it computes
    seconds = _read(cluster, window, owner)
    replies: list[object] = []

    def done() -> bool:
        replies.extend(cluster.poll())
        return bool(replies)

    cluster.wait(done)
    return seconds


def _be_read(cluster: Cluster, background: Background) -> None:
    """Poll, and compute at each request of the reader, until the reader ends the trial."""
    backoff = Backoff(cluster.ranks_per_core)
    while True:
        for source, kind, _ in cluster.poll():
            if kind == "end":
                return
            with background if kind == "helped" else contextlib.nullcontext():
                _compute()
            cluster.send(source, "done")
            backoff.reset()
        cluster.progress()
        backoff.pause()


def _compute() -> None:
    """Compute for `BUSY_S` without calling MPI."""
    a, b = np.zeros(PAGES), np.zeros(PAGES)
    ends = time.perf_counter() + BUSY_S
    while time.perf_counter() < ends:
        gradient_of(a, b)


def try_links(cluster: Cluster) -> list[Link]:
    """Measure the links of some pairs of ranks, one after another. Collective: yes."""
    return [_try_link(cluster, pair) for pair in pairs(cluster.node_of)]


def _try_link(cluster: Cluster, pair: tuple[int, int]) -> Link:
    """Measure the link of two ranks while the others sleep. Collective: yes."""
    comm = collectives.cluster_subset(cluster, pair)
    rates = np.zeros(4)
    if cluster.rank in pair:
        node_size = 0 if cluster.node_of[pair[0]] == cluster.node_of[pair[1]] else 1
        two = Cluster(comm, node_size=node_size)
        rates[:] = _measure(two, node_size)
        two.free()
    collectives.free(comm)
    done = collectives.begin_broadcast(cluster.comm, rates, pair[0])
    while not done.Test():
        time.sleep(WAIT_S)
    return Link((cluster.hosts[pair[0]], cluster.hosts[pair[1]]), pair, *rates.tolist())


def _measure(two: Cluster, node_size: int) -> list[float]:
    """Return the rates of send, pull, push and Allreduce, in bytes/s."""
    sides = Sides(two, SIZE, prefetch=False, node_size=node_size)
    data = np.ones(SIZE // 4, "f4")
    first = in_turn(two, {"send": lambda: _send(two, data, 1)}, 1)["send"]
    times = max(TIMES[0], min(TIMES[1], round(TURN_S / max(min(first), 1e-6))))
    times = collectives.broadcast(two.comm, times)
    sides.times = times
    turns = {
        "send": lambda: _send(two, data, times),
        "pull": sides.pull,
        "push": sides.push,
        "allreduce": lambda: _allreduce(two, data, times),
    }
    seconds = in_turn(two, turns, REPEATS)
    sides.free()
    return [times * SIZE / statistics.median(seconds[name]) for name in turns]


def _send(two: Cluster, data: np.ndarray, times: int) -> None:
    """Send from rank 1 to rank 0, as a worker does to a server."""
    for _ in range(times):
        if two.rank == 1:
            two.wait_request(two.arrays.begin_send(data, 0, TAG_PLAIN))
        else:
            two.wait_request(two.arrays.begin_receive(data, 1, TAG_PLAIN))


def _allreduce(two: Cluster, data: np.ndarray, times: int) -> None:
    data[:] = 0
    for _ in range(times):
        request = collectives.begin_sum(two.comm, data)
        two.wait(lambda: all_done([request]))  # noqa: B023  (waited for in this turn)
