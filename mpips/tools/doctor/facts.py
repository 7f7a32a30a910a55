"""Facts about a rank's host and its limits, read without MPI.

Environment:
    OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, NUMBA_NUM_THREADS: Threads of BLAS and numba. The doctor
        warns if those of BLAS exceed a rank's share of the cores.
    SLURM_, OMPI_MCA_, PRTE_MCA_, MPIR_CVAR_, UCX_, FI_: Variables that begin so: the doctor saves
        them, and compares the hosts.
"""

import math
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpips.mpi import segments
from mpips.mpi.pages import shared_page, text_of
from mpips.mpi.process import STARTED, namespace_of, stat_of
from mpips.mpi.segments import SHARED_MEMORY
from mpips.planning.binding import Nodes, numa_nodes
from mpips.planning.needs import groups, memory_bytes

LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "stack": resource.RLIMIT_STACK,
    "address space": resource.RLIMIT_AS,
    "core file": resource.RLIMIT_CORE,
}
VARIABLES = ("SLURM_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "UCX_", "FI_")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Facts:
    """Facts about one rank and its host; sizes in bytes.

    Attributes:
        host: Host name.
        cores: Numbers of the cores that this process may run on.
        online: Number of cores of the host.
        quota: CPU quota of the control group, in cores; infinite without a quota.
        memory: Memory of the host, or the memory limit of the control group if that is less.
        shared_total: Size of the file system for shared memory.
        stale: Bytes in shared memory of dead jobs of this user.
        large_page: Size of the large pages that shared memory uses; 0 if it uses none.
        limits: Soft limits (`getrlimit`); infinite for no limit.
        core_pattern: The kernel's pattern for the names of core files.
        variables: Environment variables of SLURM and MPI, and thread limits.
        networks: Rate of each active network device that reports it, in bit/s.
        namespace: User namespace; empty if the kernel has none.
        numa: Online cores of each NUMA node; empty if the kernel lists none.
    """

    host: str
    cores: frozenset[int]
    online: int
    quota: float
    memory: float
    shared_total: int
    stale: int
    large_page: int
    limits: Mapping[str, float]
    core_pattern: str
    variables: Mapping[str, str]
    networks: Mapping[str, float]
    namespace: str = ""
    numa: Nodes = field(default_factory=dict)


def gather_facts() -> Facts:
    """Return the facts of this process."""
    shared = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return Facts(
        host=platform.node(),
        cores=frozenset(os.sched_getaffinity(0)),
        online=os.cpu_count() or 1,
        quota=quota(groups("cpu")),
        memory=memory_bytes(),
        shared_total=shared.f_blocks * shared.f_frsize if shared else 0,
        stale=sum(segments.left_over().values()),
        large_page=shared_page(),
        limits={name: _limit(number) for name, number in LIMITS.items()},
        core_pattern=text_of(Path("/proc/sys/kernel/core_pattern")),
        variables={k: v for k, v in os.environ.items() if k.startswith(VARIABLES) or k in THREADS},
        networks=networks(Path("/sys/class")),
        namespace=namespace_of(os.getpid()),
        numa=numa_nodes(),
    )


def process_age_s() -> float:
    """Return the time since the start of this process, in seconds."""
    ticks = int(stat_of(os.getpid())[STARTED])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")


def _limit(number: int) -> float:
    soft = resource.getrlimit(number)[0]
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


# Control groups ------------------------------------------------------------------------------


def quota(of: list[Path]) -> float:
    """Return the smallest CPU quota of some control groups, in cores; infinite without one."""
    quotas = [math.inf]
    for path in of:
        words = text_of(path / "cpu.max").split()
        words = words or [text_of(path / f"cpu.cfs_{part}_us") for part in ("quota", "period")]
        if all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


# Networks ------------------------------------------------------------------------------------


def networks(root: Path) -> dict[str, float]:
    """Return the rate of each active network device and InfiniBand port, in bit/s.

    Virtual devices are left out, since the rate that they report is arbitrary.
    """
    rates: dict[str, float] = {}
    for device in sorted((root / "net").glob("*")):
        mbit = text_of(device / "speed")
        up = text_of(device / "operstate") == "up"
        if up and mbit.isdigit() and (device / "device").exists():
            rates[device.name] = int(mbit) * 1e6
    for port in sorted((root / "infiniband").glob("*/ports/*")):
        words = text_of(port / "rate").split()  # 100 Gb/sec (4X EDR)
        if words[1:2] == ["Gb/sec"] and "ACTIVE" in text_of(port / "state"):
            rates[f"{port.parent.parent.name}/{port.name}"] = float(words[0]) * 1e9
    return rates
