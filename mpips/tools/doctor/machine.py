"""Judgement of hosts: cores, threads, leftovers, pages and limits."""

import math
import mmap
from collections.abc import Iterator, Sequence

from mpips.errors import counted, human_bytes
from mpips.tools.doctor.facts import SHARED_MEMORY, THREADS, Facts
from mpips.tools.doctor.finding import Finding, ok, per_host, warn, warn_if

SPARE_FILES = 64
FILES_A_RANK = 4  # a socket each way, and what MPI opens beside it
STACK_BYTES = 1 << 20
LOCKED_BYTES = 64 << 20
STALE_SHARE = 0.01


def by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Return the ranks' facts by host, in the order of the ranks."""
    found: dict[str, list[Facts]] = {}
    for one in facts:
        found.setdefault(one.host, []).append(one)
    return found


def judge_machines(facts: Sequence[Facts]) -> list[Finding]:
    """Judge what all ranks see of their hosts."""
    hosts = by_host(facts)
    world = len(facts)
    return [
        *per_host(hosts, judge_cores),
        *per_host(hosts, judge_threads),
        *per_host(hosts, judge_namespaces),
        *per_host(hosts, judge_leftovers),
        *per_host(hosts, judge_pages),
        *per_host(hosts, lambda ranks: judge_limits(ranks[0], world)),
    ]


def judge_cores(ranks: Sequence[Facts]) -> Finding:
    """Judge the cores of one host's ranks: affinity masks, oversubscription, quotas."""
    n, cores = len(ranks), frozenset[int]().union(*(r.cores for r in ranks))
    quota, online = ranks[0].quota, ranks[0].online
    found = f"{counted(n, 'rank')} on {counted(len(cores), 'core')}"
    figures = {"ranks": float(n), "cores": float(len(cores))}
    if n > len(cores) and online >= n:
        remedy = "let the launcher give each rank a core of its own: srun --cpu-bind=cores, "
        remedy += "mpirun --bind-to core (MPICH: -bind-to core), --cpus-per-task"
        return warn("cores", f"{found}, of {online} there are", remedy, **figures)
    if n > len(cores):
        remedy = f"start at most {counted(len(cores), 'rank')} on a host like this; more take turns"
        return warn("cores", found, remedy, **figures)
    if quota < n:
        remedy = "ask for as many cores as ranks (docker --cpus, --cpus-per-task)"
        return warn("cores", f"{found}, with the time of {quota:.3g} cores", remedy, **figures)
    if crowd := _shared_mask(ranks):
        remedy = "bind ranks to cores of their own, or to none: mpirun --bind-to none"
        return warn("cores", f"{found}, but {crowd}", remedy, **figures)
    return ok("cores", found, **figures)


def _shared_mask(ranks: Sequence[Facts]) -> str:
    """Return a text on ranks that share fewer cores than they are, or nothing."""
    for mask in {r.cores for r in ranks}:
        bound = sum(r.cores <= mask for r in ranks)
        if bound > len(mask):
            return f"{bound} of them are bound to {counted(len(mask), 'core')}"
    return ""


def judge_threads(ranks: Sequence[Facts]) -> Finding:
    """Judge the variables that say how many threads a rank's libraries start."""
    cores = frozenset[int]().union(*(r.cores for r in ranks))
    share = max(1, len(cores) // len(ranks))
    set_to = {k: r.variables[k] for r in ranks for k in THREADS if k in r.variables}
    large = {k: v for k, v in set_to.items() if v.isdigit() and int(v) > share}
    if large:
        text = ", ".join(f"{k}={v}" for k, v in large.items())
        remedy = f"export {' '.join(f'{k}={share}' for k in large)}: a rank's share of the cores"
        return warn("threads", f"{text}, for {share} a rank", remedy)
    text = ", ".join(f"{k}={v}" for k, v in set_to.items())
    return ok("threads", f"{share} a rank, set by mpips for BLAS{text and f'; {text}'}")


def judge_namespaces(ranks: Sequence[Facts]) -> Finding:
    """Judge whether ranks of a host may read each other's memory, as MPICH copies messages."""
    spaces = len({rank.namespace for rank in ranks})
    if spaces == 1:
        return ok("namespaces", "one, so that MPI may copy from rank to rank")
    remedy = "start a node's ranks in one container; until then, with MPICH, "
    remedy += "export MPIR_CVAR_CH4_CMA_ENABLE=0, which mpips sets where it sees that"
    return warn("namespaces", f"{len(ranks)} ranks in {spaces} user namespaces", remedy)


def judge_leftovers(ranks: Sequence[Facts]) -> Finding:
    """Judge what killed jobs have left in shared memory."""
    stale, total = ranks[0].stale, ranks[0].shared_total
    text = f"{human_bytes(stale)} of dead jobs in {SHARED_MEMORY}"
    remedy = "python -m mpips doctor --clean, on that host"
    return warn_if(bool(total) and stale > STALE_SHARE * total, "leftovers", text, remedy)


def judge_pages(ranks: Sequence[Facts]) -> Finding:
    """Tell which pages tables of rows lie on; to change it is not a job's."""
    if size := ranks[0].large_page:
        return ok("pages", f"tables of rows are put into pages of {size >> 20} MiB")
    text = f"tables of rows stay in pages of {mmap.PAGESIZE >> 10} KiB"
    return ok("pages", f"{text}: Linux 6.1 and later put shared memory into large ones")


def judge_limits(rank: Facts, world: int) -> list[Finding]:
    """Judge the limits of a rank's process (`ulimit`) in a world of that many ranks."""
    found = list(_limits_to_mend(rank, world))
    if found:
        return found
    sizes = {
        name: f"{limit:.0f}" if name == "open files" else human_bytes(limit)
        for name, limit in rank.limits.items()
        if math.isfinite(limit)
    }
    limits = [f"{name} {sizes.get(name, 'unlimited')}" for name in rank.limits]
    return [ok("limits", ", ".join(limits))]


def _limits_to_mend(rank: Facts, world: int) -> Iterator[Finding]:
    has, needed = rank.limits, SPARE_FILES + FILES_A_RANK * world
    if has["open files"] < needed:
        remedy = f"ulimit -n {needed} before the launcher, on every host"
        yield warn("limits", f"{has['open files']:.0f} open files, for {world} ranks", remedy)
    if has["stack"] < STACK_BYTES:
        remedy = "ulimit -s 8192 before the launcher"
        yield warn("limits", f"a stack of {human_bytes(has['stack'])}", remedy)
    if any("/" in name for name in rank.networks) and has["locked memory"] < LOCKED_BYTES:
        locked = human_bytes(has["locked memory"])
        remedy = "ask for an unlimited memlock (ulimit -l): InfiniBand registers memory by it"
        yield warn("limits", f"{locked} of locked memory, with InfiniBand", remedy)
    if has["address space"] < rank.memory:
        space = human_bytes(has["address space"])
        remedy = "ulimit -v unlimited: each rank maps the memory of all ranks of its node"
        yield warn("limits", f"an address space of {space}", remedy)
    if has["core file"] > 0 and not rank.core_pattern.startswith("|"):
        remedy = "ulimit -c 0, or a crash writes the memory of every rank to the disk"
        yield warn("limits", f"core files are written, to {rank.core_pattern or 'core'}", remedy)
