"""Windows: needed memory, a trial, and reads across nodes."""

import contextlib
import statistics
import time
from collections.abc import Iterator

import numpy as np

from mpips.errors import UserError
from mpips.layout.roles import Roles
from mpips.mpi.waiting import Background, Backoff
from mpips.mpi.window import Field, Plan, Window, shared_bytes_free
from mpips.mpi.world import Cluster
from mpips.planning.memory import check_memory
from mpips.ps.design import Design
from mpips.tools.bench.vector import gradient_of, make_job
from mpips.tools.doctor.memory import BUSY_S, Need, RemoteGet

FIELD = "numbers"
N = 1 << 16  # items of a segment that is tried
READS = 20
PAGES = 1 << 20  # doubles that a busy owner goes over


def gather_need(cluster: Cluster, parameters: int) -> Need:
    """Return what a model of that many parameters needs on this rank's host. Collective: yes."""
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
    cluster.roles = Roles((), tuple(range(cluster.world)))  # as they were
    return Need(needed, shared_bytes_free(), refused)


# Making one ----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(cluster: Cluster) -> Iterator[Window]:
    """Make a window that holds a number on every rank, and free it. Collective: yes.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    window = Window(cluster, [Plan((Field(FIELD, "f8", (N,)),))] * cluster.world)
    window.view(cluster.rank, FIELD)[:] = cluster.rank + 1
    yield window
    cluster.barrier()
    window.free()


def try_window(cluster: Cluster) -> tuple[list[int], float]:
    """Make a window, and read what others wrote in it. Collective: yes.

    A remote rank is read by Get, all ranks at a time, each from the next node.

    Returns:
        The ranks whose memory this one reads otherwise than they wrote it, and the seconds that
        making the window took.
    """
    start = time.perf_counter()
    with opened(cluster) as window:
        seconds = time.perf_counter() - start
        window.make_visible()
        seen = {r: window.view(r, FIELD) for r in cluster.my_node}
        remote = [r for r in range(cluster.world) if not cluster.is_local(r)]
        target = next((r for r in remote if r > cluster.rank), remote[0] if remote else None)
        if target is not None:
            out = np.zeros(N)
            requests = window.get(target, FIELD, out)
            cluster.wait(lambda: all(request.Test() for request in requests))
            seen[target] = out
        return [r for r, numbers in seen.items() if not np.all(numbers == r + 1)], seconds


# Remote reads -----------------------------------------------------------------------------------


def try_remote_get(cluster: Cluster) -> RemoteGet | None:
    """Time a rank of node 1 that reads from the first of node 0. Collective: yes.

    Returns:
        The times on the reader, None elsewhere, and on one node.
    """
    if cluster.nodes == 1:
        return None
    owner, reader = cluster.node_of.index(0), cluster.node_of.index(1)
    background = Background(cluster.progress)
    found = None
    with opened(cluster) as window:
        if cluster.rank == reader:
            found = RemoteGet(
                statistics.median(_read(cluster, window, owner) for _ in range(READS)),
                _read_while(cluster, window, owner, "busy"),
                statistics.median(_read_while(cluster, window, owner, "helped") for _ in range(3)),
            )
            cluster.send(owner, "end")
        elif cluster.rank == owner:
            _own(cluster, background)
        cluster.barrier()
    background.end()
    return found


def _read(cluster: Cluster, window: Window, owner: int) -> float:
    out = np.zeros(8)
    start = time.perf_counter()
    requests = window.get(owner, FIELD, out)
    cluster.wait(lambda: all(request.Test() for request in requests))
    return time.perf_counter() - start


def _read_while(cluster: Cluster, window: Window, owner: int, how: str) -> float:
    """Have the owner compute, read from it meanwhile, and wait until it is done."""
    cluster.send(owner, how)
    time.sleep(BUSY_S / 10)  # it has begun
    seconds = _read(cluster, window, owner)
    replies: list[object] = []

    def done() -> bool:
        replies.extend(cluster.poll())
        return bool(replies)

    cluster.wait(done)
    return seconds


def _own(cluster: Cluster, background: Background) -> None:
    """Be read from: poll, compute when asked to, until the reader ends it."""
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
    """Compute for a while, without a look at MPI."""
    a, b = np.zeros(PAGES), np.zeros(PAGES)
    ends = time.perf_counter() + BUSY_S
    while time.perf_counter() < ends:
        gradient_of(a, b)
