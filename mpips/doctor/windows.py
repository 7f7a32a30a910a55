"""Windows: the shared memory that a job needs, making one, and reads from afar."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpips.bench.vector import gradient_of, make_job
from mpips.cluster import Background, Backoff, Cluster
from mpips.doctor.facts import SHARED_MEMORY, Facts
from mpips.doctor.finding import Finding, fail, ok, per_host, warn
from mpips.errors import UserError
from mpips.job import check_memory
from mpips.metrics import human_bytes
from mpips.roles import Roles
from mpips.strategies.async_sgd import plan
from mpips.window import Field, Plan, Window, shared_bytes_free

FIELD = "numbers"
N = 1 << 16  # items of a segment that is tried
READS = 20
BUSY_S = 0.3
SLOW_MAKING_S = 2.0
LATE_S = 0.05
SLOW_READ_S = 2e-3
PAGES = 1 << 20  # doubles that a busy owner goes over


class Need(NamedTuple):
    """What the windows of a host's ranks take and what there is, in bytes.

    Attributes:
        needed: Of the windows of an asynchronous run with Adam.
        free: Of shared memory.
        memory: Why the model is too large for the host's memory; empty if it is not.
    """

    needed: int
    free: int
    memory: str


def gather_need(cluster: Cluster, parameters: int) -> Need:
    """Return what a model of that many parameters needs on this rank's host. Collective: yes."""
    mode = "async" if cluster.world > 1 else "sync"
    job = make_job(cluster, parameters, mode, optimizer="adam")
    here = [r for r in range(cluster.world) if cluster.hosts[r] == cluster.hosts[cluster.rank]]
    if mode == "async":
        needed = sum(plan(job, rank).nbytes for rank in here)
    else:  # the replica, the gradient and two slots
        needed = 4 * parameters * job.dtype.itemsize
    refused = ""
    try:
        check_memory(job.layout, job.config, sum(r in job.cluster.roles.workers for r in here))
    except UserError as error:
        refused = str(error).partition("; ")[0]
    cluster.roles = Roles((), tuple(range(cluster.world)))  # as they were
    return Need(needed, shared_bytes_free(), refused)


def judge_needs(needs: Mapping[str, Need], parameters: int) -> list[Finding]:
    """Judge the shared memory of each host, by host name."""
    return per_host(needs, lambda need: _judge_need(need, parameters))


def _judge_need(need: Need, parameters: int) -> Finding:
    free, needed = (human_bytes(size) for size in (need.free, need.needed))
    figures = {"free_bytes": float(need.free), "needed_bytes": float(need.needed)}
    told = f"{free} free in {SHARED_MEMORY}, windows for {parameters:,} parameters take {needed}"
    if need.memory:
        remedy = "use a smaller model, or more nodes with fewer ranks each"
        return fail("memory", need.memory, remedy, **figures)
    if need.free < need.needed:
        remedy = "enlarge it (docker: --shm-size, or mount -o remount,size=), use more nodes, or "
        return fail("memory", told, f"{remedy}--window private", **figures)
    return ok("memory", told, **figures)


def judge_quota(facts: Sequence[Facts], needs: Mapping[str, Need]) -> list[Finding]:
    """Judge the memory limit of each host's control group: shared memory counts in it."""
    found = []
    for host, limit in {f.host: f.memory for f in facts}.items():
        if limit < needs[host].needed and not needs[host].memory:
            told = f"{host}: {human_bytes(limit)} of memory, for windows of "
            remedy = "ask for more memory (--mem, docker --memory)"
            found.append(fail("memory", told + human_bytes(needs[host].needed), remedy))
    return found


# Making one ----------------------------------------------------------------------------------


def open_window(cluster: Cluster) -> tuple[Window, float]:
    """Make a window that holds a number on every rank. Collective: yes.

    Returns:
        The window, and the seconds that it took.

    Raises:
        UserError: If the shared memory of a host is too small.
    """
    start = time.perf_counter()
    window = Window(cluster, [Plan((Field(FIELD, "f8", (N,)),))] * cluster.world)
    seconds = time.perf_counter() - start
    window.view(cluster.rank, FIELD)[:] = cluster.rank + 1
    return window, seconds


def wrong_reads(cluster: Cluster, window: Window) -> list[int]:
    """Return the ranks whose memory this rank reads otherwise than they wrote it.

    Collective: yes. A far one is read by Get, all ranks at a time, each from the next node.
    """
    window.make_visible()
    seen = {r: window.view(r, FIELD) for r in cluster.my_node}
    far = [r for r in range(cluster.world) if not cluster.near(r)]
    target = next((r for r in far if r > cluster.rank), far[0] if far else None)
    if target is not None:
        out = np.zeros(N)
        requests = window.get(target, FIELD, out)
        cluster.wait(lambda: all(request.Test() for request in requests))
        seen[target] = out
    wrong = [r for r, numbers in seen.items() if not np.all(numbers == r + 1)]
    cluster.barrier()
    return wrong


def judge_window(wrong: Mapping[int, Sequence[int]], seconds: float) -> Finding:
    """Judge how long a window took to make, and which ranks read which others wrongly."""
    bad = {reader: list(read) for reader, read in wrong.items() if read}
    if bad:
        reader, read = next(iter(bad.items()))
        told = f"rank {reader} does not read what rank {read[0]} wrote"
        return fail("window", told, "use another MPI, or another transport (see mpi above)")
    told = f"made in {seconds * 1e3:.1f} ms, all ranks read what others wrote"
    if seconds > SLOW_MAKING_S:
        remedy = "expect as much at each start; another transport may be faster"
        return warn("window", told, remedy, making_s=seconds)
    return ok("window", told, making_s=seconds)


# Far reads -----------------------------------------------------------------------------------


class FarGet(NamedTuple):
    """Seconds of a Get of 64 bytes across nodes.

    Attributes:
        polling_s: From an owner that polls; the median.
        busy_s: From an owner that computes for `BUSY_S` and does not enter MPI.
        helped_s: From one that computes, with mpips's thread that enters MPI; the median.
    """

    polling_s: float
    busy_s: float
    helped_s: float


def try_far_get(cluster: Cluster, window: Window) -> FarGet | None:
    """Time a rank of node 1 that reads from the first of node 0. Collective: yes.

    Returns:
        The times on the reader, None elsewhere.
    """
    owner, reader = cluster.node_of.index(0), cluster.node_of.index(1)
    background = Background(cluster.progress)
    found = None
    if cluster.rank == reader:
        found = FarGet(
            statistics.median(_read(cluster, window, owner) for _ in range(READS)),
            _read_while(cluster, window, owner, "busy"),
            statistics.median(_read_while(cluster, window, owner, "helped") for _ in range(3)),
        )
        cluster.send(owner, "end")
    elif cluster.rank == owner:
        _own(cluster, background)
    cluster.barrier()
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
    actions: dict[str, Callable[[], None]] = {
        "busy": _compute,
        "helped": lambda: _compute_with(background),
    }
    backoff = Backoff(cluster.crowded)
    while True:
        for source, kind, _ in cluster.poll():
            if kind == "end":
                return
            actions[kind]()
            cluster.send(source, "done")
            backoff.reset()
        cluster.progress()
        backoff.pause()


def _compute_with(background: Background) -> None:
    with background:
        _compute()


def _compute() -> None:
    """Compute for a while, without a look at MPI."""
    a, b = np.zeros(PAGES), np.zeros(PAGES)
    ends = time.perf_counter() + BUSY_S
    while time.perf_counter() < ends:
        gradient_of(a, b)


def judge_far_get(found: FarGet) -> list[Finding]:
    """Judge the times of far reads."""
    poll = found.polling_s
    told = f"{poll * 1e6:.0f} us from an owner that polls"
    figures = {"polling_us": poll * 1e6, "busy_ms": found.busy_s * 1e3}
    figures["helped_ms"] = found.helped_s * 1e3
    out = []
    if poll > SLOW_READ_S:
        remedy = "give each rank a core (see cores), or use another transport"
        out.append(warn("far get", told, remedy, **figures))
    else:
        out.append(ok("far get", told, **figures))
    busy = f"{found.busy_s * 1e3:.0f} ms from one that computes for {BUSY_S * 1e3:.0f} ms"
    helped = f"{found.helped_s * 1e3:.1f} ms with a thread that enters MPI"
    told = f"{busy}, {helped}"
    if found.helped_s > LATE_S:
        remedy = "leave a core for the thread (fewer ranks on a host), use an MPI with "
        remedy += "MPI_THREAD_MULTIPLE, or servers that do not compute (--mode async)"
        out.append(warn("busy owner", told, remedy, **figures))
    else:
        out.append(ok("busy owner", told, **figures))
    return out
