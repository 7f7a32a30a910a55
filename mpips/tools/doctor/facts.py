"""Facts of a rank's host and its own limits, read without MPI.

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
from mpips.mpi.pages import shared_page
from mpips.mpi.process import STARTED, namespace_of, stat_of
from mpips.mpi.segments import SHARED_MEMORY
from mpips.planning.binding import Nodes, numa_nodes, text_of
from mpips.planning.needs import installed_bytes

LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "stack": resource.RLIMIT_STACK,
    "address space": resource.RLIMIT_AS,
    "core file": resource.RLIMIT_CORE,
}
VARIABLES = ("SLURM_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "UCX_", "FI_")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
NO_LIMIT = 1 << 60  # control groups write a number near 2**63


@dataclass(frozen=True)
class Facts:
    """What a rank sees; sizes in bytes.

    Attributes:
        host: Host name.
        cores: Numbers of the cores that this process may run on.
        online: Cores of the host.
        quota: Cores' worth of time that the control group may take; infinite without a quota.
        memory: Memory of the host, or of the control group where that has less.
        shared_total: Bytes of the file system that holds shared memory.
        stale: Bytes in it of dead jobs of this user.
        large_page: Of shared memory that is put into large pages; 0 where it is not.
        limits: Soft limits (`getrlimit`); infinite where there is none.
        core_pattern: Where the kernel puts core files.
        variables: Of the environment: SLURM's, the MPIs', the thread limits.
        networks: Bits a second of each network device that says so and is up.
        namespace: The user namespace; empty where the kernel has none.
        numa: Online cores of each NUMA node; empty where the kernel names none.
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
        memory=min(installed_bytes(), memory_limit(groups("memory"))),
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
    """Return the seconds since this process was started."""
    ticks = int(stat_of(os.getpid())[STARTED])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")


def _limit(number: int) -> float:
    soft = resource.getrlimit(number)[0]
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


# Control groups ------------------------------------------------------------------------------


def groups(controller: str, root: Path = Path("/sys/fs/cgroup"), own: str = "") -> list[Path]:
    """Return the control groups of this process, from its own up to the root, both versions.

    Args:
        controller: "cpu" or "memory".
        root: Where control groups are mounted.
        own: Text of ``/proc/self/cgroup``; read if empty.
    """
    found = []
    for line in (own or text_of(Path("/proc/self/cgroup"))).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / controller if names else root
        here = base / path.strip("/")
        found += [p for p in (here, *here.parents) if p == base or base in p.parents]
    return found


def quota(of: list[Path]) -> float:
    """Return the least quota of control groups, in cores; infinite if none has one."""
    found = [math.inf]
    for path in of:
        words = text_of(path / "cpu.max").split()
        words = words or [text_of(path / f"cpu.cfs_{part}_us") for part in ("quota", "period")]
        if all(word.isdigit() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found)


def memory_limit(of: list[Path]) -> float:
    """Return the least memory limit of control groups, in bytes; infinite if none has one."""
    found = [math.inf]
    for path in of:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = text_of(path / name)
            if text.isdigit() and int(text) < NO_LIMIT:
                found.append(int(text))
    return min(found)


# Networks ------------------------------------------------------------------------------------


def networks(root: Path) -> dict[str, float]:
    """Return the bits a second of network devices that are up, InfiniBand's ports included.

    Virtual ones are left out: what they say of themselves is made up.
    """
    found: dict[str, float] = {}
    for device in sorted((root / "net").glob("*")):
        mbit = text_of(device / "speed")
        up = text_of(device / "operstate") == "up"
        if up and mbit.isdigit() and (device / "device").exists():
            found[device.name] = int(mbit) * 1e6
    for port in sorted((root / "infiniband").glob("*/ports/*")):
        words = text_of(port / "rate").split()  # 100 Gb/sec (4X EDR)
        if words[1:2] == ["Gb/sec"] and "ACTIVE" in text_of(port / "state"):
            found[f"{port.parent.parent.name}/{port.name}"] = float(words[0]) * 1e9
    return found
