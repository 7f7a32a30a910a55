"""Judgement of hosts: software, launch, cores, threads, leftovers and limits.

Environment:
    SLURM_JOB_NUM_NODES: Nodes of a job, which the doctor compares with those that have ranks.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpips.errors import counted, human_bytes
from mpips.planning.binding import judge_binding, spread_text
from mpips.tools.doctor.facts import SHARED_MEMORY, THREADS, Facts
from mpips.tools.doctor.report import Finding, fail, ok, per_host, warn, warn_if

SPARE_FILES = 64
FILES_A_RANK = 4  # a socket in each direction, and other files of MPI
STACK_BYTES = 1 << 20
LOCKED_BYTES = 64 << 20
STALE_SHARE = 0.01
COPIES = "MPIR_CVAR_CH4_CMA_ENABLE"
SLOW_START_S = 60.0
SLOW_LOADING_S = 5.0


def judge_machines(facts: Sequence[Facts]) -> list[Finding]:
    """Judge the facts of all ranks, host by host."""
    hosts: dict[str, list[Facts]] = {}
    for rank in facts:
        hosts.setdefault(rank.host, []).append(rank)
    judges = judge_cores, judge_threads, judge_namespaces, judge_leftovers, judge_pages
    findings = [finding for judge in judges for finding in per_host(hosts, judge)]
    return [*findings, *per_host(hosts, lambda ranks: judge_limits(ranks[0], len(facts)))]


def judge_cores(ranks: Sequence[Facts]) -> Finding:
    """Judge the cores of one host's ranks: oversubscription, CPU quota and binding."""
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
    masks, nodes = [r.cores for r in ranks], ranks[0].numa
    wrong, remedy = judge_binding(masks, nodes)
    if wrong:
        return warn("cores", f"{found}, but {wrong}", remedy, **figures)
    return ok("cores", found + spread_text(masks, nodes), **figures)


def judge_threads(ranks: Sequence[Facts]) -> Finding:
    """Judge the variables that set the number of threads of a rank's libraries."""
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
    """Judge whether ranks of a host may read each other's memory, which MPICH does for messages."""
    spaces, remedy = len({rank.namespace for rank in ranks}), f"export {COPIES}=1"
    if spaces > 1:
        text = f"{len(ranks)} ranks in {spaces} user namespaces, between which MPI cannot copy"
        remedy = f"run mpirun in a container; or ch-run --join or apptainer instance, and {remedy}"
        return warn("namespaces", text, remedy)
    text = f"one, so that MPI may copy from rank to rank, unless {COPIES}=0"
    denied = len(ranks) > 1 and ranks[0].variables.get(COPIES) == "0"
    return warn_if(denied, "namespaces", text, remedy)


def judge_leftovers(ranks: Sequence[Facts]) -> Finding:
    """Judge the size of files that killed jobs have left in shared memory."""
    stale, total = ranks[0].stale, ranks[0].shared_total
    text = f"{human_bytes(stale)} of dead jobs in {SHARED_MEMORY}"
    remedy = "python -m mpips doctor --clean, on that host"
    return warn_if(bool(total) and stale > STALE_SHARE * total, "leftovers", text, remedy)


def judge_pages(ranks: Sequence[Facts]) -> Finding:
    """Report the page size of table rows, which a job cannot change."""
    if size := ranks[0].large_page:
        return ok("pages", f"tables of rows are put into pages of {size >> 20} MiB")
    text = f"tables of rows stay in pages of {mmap.PAGESIZE >> 10} KiB"
    return ok("pages", f"{text}: Linux 6.1 and later put shared memory into large ones")


def judge_limits(rank: Facts, world: int) -> list[Finding]:
    """Judge the limits of a rank's process (`ulimit`) for a world of `world` ranks."""
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


@dataclass(frozen=True)
class Library:
    """Software and processor of a rank.

    Attributes:
        mpi: MPI library and its version.
        device: Name of MPICH's device; empty for other libraries.
        loaded: Transport libraries that are mapped into the process.
        multiple: Whether any thread may call MPI at any time.
        versions: Versions of mpips, Python, NumPy and mpi4py, by name.
        cpu: Model of the processor.
    """

    mpi: str
    device: str
    loaded: tuple[str, ...]
    multiple: bool
    versions: tuple[tuple[str, str], ...]
    cpu: str


def judge_libraries(ranks: Sequence[Library], nodes: int) -> list[Finding]:
    """Judge whether all ranks have the same software and processor."""
    first = ranks[0]
    findings = [_judge_mpi(ranks, nodes)]
    text = ", ".join(f"{name} {version}" for name, version in first.versions)
    if len({r.versions for r in ranks}) > 1:
        others = {f"{k} {v}" for r in ranks for k, v in r.versions if (k, v) not in first.versions}
        remedy = "start the same virtual environment on all hosts"
        findings.append(fail("software", f"{text}; elsewhere {', '.join(sorted(others))}", remedy))
    else:
        findings.append(ok("software", text))
    cpus = sorted({r.cpu for r in ranks})
    remedy = "ask for nodes of one kind (--constraint) where the same bits are wanted each time"
    return [*findings, warn_if(len(cpus) > 1, "processor", "; ".join(cpus), remedy)]


def _judge_mpi(ranks: Sequence[Library], nodes: int) -> Finding:
    first = ranks[0]
    names = sorted({r.mpi for r in ranks})
    if len(names) > 1:
        return fail("mpi", " and ".join(names), "start the same virtual environment on all hosts")
    transport = [f"device {first.device}"] if first.device else []
    transport += [f"{' and '.join(first.loaded)} loaded"] if first.loaded else []
    text = ", ".join([first.mpi, *transport])
    if not all(r.multiple for r in ranks):
        text += ", without threads, which several nodes want"
        remedy = "use an MPI built with MPI_THREAD_MULTIPLE: else ranks that compute do not answer"
        return warn("mpi", text, remedy) if nodes > 1 else ok("mpi", text)
    return ok("mpi", f"{text}, threads allowed")


def judge_slurm(variables: Mapping[str, str], world: int, hosts: int, cores: int) -> list[Finding]:
    """Compare SLURM's allocation with the ranks, hosts and cores in use.

    Args:
        variables: Environment variables of rank 0.
        world: Number of ranks.
        hosts: Number of hosts with ranks.
        cores: Number of cores that rank 0 may run on.
    """
    if "SLURM_JOB_ID" not in variables:
        return [ok("slurm", "not in a SLURM job")]
    tasks, nodes, each = (
        int(text) if (text := variables.get(name, "")).isdigit() else 0
        for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK")
    )
    findings = []
    text = f"{counted(world, 'rank')} in an allocation of {counted(tasks, 'task')}"
    if tasks > world and nodes != tasks:  # mpirun's own step has one task per node
        remedy = f"start {counted(tasks, 'rank')}, or ask for --ntasks={world}"
        findings.append(warn("slurm", text, remedy))
    if 0 < tasks < world and tasks != hosts:
        remedy = f"ask for --ntasks={world}, or start {counted(tasks, 'rank')}"
        findings.append(warn("slurm", text, remedy))
    if nodes > hosts:
        remedy = f"ask for --nodes={hosts}, or spread the ranks: --ntasks-per-node"
        findings.append(warn("slurm", f"ranks on {hosts} of {nodes} nodes", remedy))
    if each > cores:
        remedy = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun, or give srun -c"
        findings.append(warn("slurm", f"{cores} cores a rank, where {each} were asked for", remedy))
    where = f"{counted(world, 'rank')} on {counted(hosts, 'node')}, as asked for"
    return findings or [ok("slurm", f"job {variables['SLURM_JOB_ID']}: {where}")]


def judge_start(seconds: Sequence[float]) -> Finding:
    """Judge the time from the start of each rank's process until MPI was initialized."""
    longest = max(seconds)
    text = f"Python and MPI were up after {longest:.1f} s"
    remedy = "put the virtual environment on a disk of each node (sbcast, $TMPDIR)"
    return warn_if(longest > SLOW_START_S, "start", text, remedy, longest_s=longest)


def judge_kernels(compiled_s: float, loaded_s: float, turns: float) -> Finding:
    """Judge the time to compile loops, and to load them from the cache.

    Args:
        compiled_s: Longest time of the first rank of a host, which compiles them.
        loaded_s: Longest time of the other ranks, which load them from the cache.
        turns: Number of ranks per core.
    """
    text = f"compiled or loaded in {compiled_s:.1f} s, by a host's other ranks in {loaded_s:.1f} s"
    figures = {"compiled_s": compiled_s, "loaded_s": loaded_s}
    remedy = "set XDG_CACHE_HOME to a folder on a local disk that each rank can write"
    return warn_if(loaded_s > SLOW_LOADING_S * max(1.0, turns), "kernels", text, remedy, **figures)
