"""Judgement of shared memory, windows, and reads of other nodes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpips.errors import human_bytes
from mpips.tools.doctor.facts import SHARED_MEMORY, Facts
from mpips.tools.doctor.finding import Finding, fail, ok, per_host, warn_if

SLOW_MAKING_S = 2.0
BUSY_S = 0.3
LATE_S = 0.05
SLOW_READ_S = 2e-3


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


def judge_needs(needs: Mapping[str, Need], parameters: int) -> list[Finding]:
    """Judge the shared memory of each host, by host name."""
    return per_host(needs, lambda need: _judge_need(need, parameters))


def _judge_need(need: Need, parameters: int) -> Finding:
    free, needed = (human_bytes(size) for size in (need.free, need.needed))
    figures = {"free_bytes": float(need.free), "needed_bytes": float(need.needed)}
    text = f"{free} free in {SHARED_MEMORY}, windows for {parameters:,} parameters take {needed}"
    if need.memory:
        remedy = "use a smaller model, or more nodes with fewer ranks each"
        return fail("memory", need.memory, remedy, **figures)
    if need.free < need.needed:
        remedy = "enlarge it (docker: --shm-size, or mount -o remount,size=), use more nodes, or "
        return fail("memory", text, f"{remedy}--window private", **figures)
    return ok("memory", text, **figures)


def judge_quota(facts: Sequence[Facts], needs: Mapping[str, Need]) -> list[Finding]:
    """Judge the memory limit of each host's control group: shared memory counts in it."""
    found = []
    for host, limit in {f.host: f.memory for f in facts}.items():
        if limit < needs[host].needed and not needs[host].memory:
            text = f"{host}: {human_bytes(limit)} of memory, for windows of "
            remedy = "ask for more memory (--mem, docker --memory)"
            found.append(fail("memory", text + human_bytes(needs[host].needed), remedy))
    return found


def judge_window(ranks: Sequence[tuple[Sequence[int], float]]) -> Finding:
    """Judge which others each rank reads wrongly, and how long a window took to make."""
    for reader, (wrong, _) in enumerate(ranks):
        if wrong:
            text = f"rank {reader} does not read what rank {wrong[0]} wrote"
            return fail("window", text, "use another MPI, or another transport (see mpi above)")
    seconds = max(spent for _, spent in ranks)
    text = f"made in {seconds * 1e3:.1f} ms, all ranks read what others wrote"
    remedy = "expect as much at each start; another transport may be faster"
    return warn_if(seconds > SLOW_MAKING_S, "window", text, remedy, making_s=seconds)


class RemoteGet(NamedTuple):
    """Seconds of a Get of 64 bytes across nodes.

    Attributes:
        polling_s: From an owner that polls; the median.
        busy_s: From an owner that computes for `BUSY_S` and does not enter MPI.
        helped_s: From one that computes, with mpips's thread that enters MPI; the median.
    """

    polling_s: float
    busy_s: float
    helped_s: float


def judge_remote_get(found: RemoteGet) -> list[Finding]:
    """Judge the times of remote reads."""
    poll = found.polling_s
    text = f"{poll * 1e6:.0f} us from an owner that polls"
    figures = {"polling_us": poll * 1e6, "busy_ms": found.busy_s * 1e3}
    figures["helped_ms"] = found.helped_s * 1e3
    remedy = "give each rank a core (see cores), or use another transport"
    remote_get = warn_if(poll > SLOW_READ_S, "remote get", text, remedy, **figures)
    busy = f"{found.busy_s * 1e3:.0f} ms from one that computes for {BUSY_S * 1e3:.0f} ms"
    helped = f"{found.helped_s * 1e3:.1f} ms with a thread that enters MPI"
    remedy = "leave a core for the thread (fewer ranks on a host), use an MPI with "
    remedy += "MPI_THREAD_MULTIPLE, or servers, which poll (--servers)"
    late = found.helped_s > LATE_S
    return [remote_get, warn_if(late, "busy owner", f"{busy}, {helped}", remedy, **figures)]
