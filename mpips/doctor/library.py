"""The MPI library: version, transport, thread level, and whether dead ranks can be survived."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpips import __version__
from mpips.cluster import Cluster, mpi_name
from mpips.doctor.finding import Finding, fail, ok, warn
from mpips.job import cpu_name

TRANSPORTS = {"libucp": "UCX", "libfabric": "libfabric", "libpsm2": "PSM2"}
FT_ENABLE = "OMPI_MCA_mpi_ft_enable"


@dataclass(frozen=True)
class Library:
    """What a rank runs on.

    Attributes:
        mpi: Library and version.
        device: The library's own word for its transport; empty if it has none.
        loaded: Transport libraries that are mapped into the process.
        multiple: Whether any thread may call MPI at any time.
        versions: Of mpips, Python, NumPy and mpi4py.
        cpu: Model of the processor.
    """

    mpi: str
    device: str
    loaded: tuple[str, ...]
    multiple: bool
    versions: tuple[tuple[str, str], ...]
    cpu: str


def gather_library() -> Library:
    """Return what this rank runs on."""
    import mpi4py

    maps = Path("/proc/self/maps").read_text()
    lines = MPI.Get_library_version().replace("\x00", "").splitlines()
    device = next((x.partition(":")[2].strip() for x in lines if x.startswith("MPICH Dev")), "")
    versions = {
        "mpips": __version__, "python": platform.python_version(),
        "numpy": np.__version__, "mpi4py": mpi4py.__version__,
    }  # fmt: skip
    return Library(
        mpi_name(),
        device,
        tuple(name for library, name in TRANSPORTS.items() if library in maps),
        MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        tuple(versions.items()),
        cpu_name(),
    )


def judge_libraries(ranks: Sequence[Library], nodes: int) -> list[Finding]:
    """Judge what the ranks run on; they should all run on the same."""
    first = ranks[0]
    found = [_judge_mpi(ranks, nodes)]
    told = ", ".join(f"{name} {version}" for name, version in first.versions)
    if len({r.versions for r in ranks}) > 1:
        others = {f"{k} {v}" for r in ranks for k, v in r.versions if (k, v) not in first.versions}
        remedy = "start the same virtual environment on all hosts"
        found.append(fail("software", f"{told}; elsewhere {', '.join(sorted(others))}", remedy))
    else:
        found.append(ok("software", told))
    cpus = sorted({r.cpu for r in ranks})
    if len(cpus) > 1:
        remedy = "ask for nodes of one kind (--constraint) where the same bits are wanted each time"
        found.append(warn("processor", "; ".join(cpus), remedy))
    else:
        found.append(ok("processor", cpus[0]))
    return found


def _judge_mpi(ranks: Sequence[Library], nodes: int) -> Finding:
    first = ranks[0]
    names = sorted({r.mpi for r in ranks})
    if len(names) > 1:
        return fail("mpi", " and ".join(names), "start the same virtual environment on all hosts")
    way = [f"device {first.device}"] if first.device else []
    way += [f"{' and '.join(first.loaded)} loaded"] if first.loaded else []
    told = ", ".join([first.mpi, *way])
    if not all(r.multiple for r in ranks):
        remedy = "use an MPI built with MPI_THREAD_MULTIPLE: else ranks that compute do not answer"
        return (warn if nodes > 1 else _fine)("mpi", f"{told}, without threads", remedy)
    return ok("mpi", f"{told}, threads allowed")


def _fine(check: str, found: str, remedy: str) -> Finding:
    return ok(check, f"{found} (which several nodes would want)")


def try_ulfm(cluster: Cluster) -> list[Finding]:
    """Find out whether a job can go on without dead ranks. Collective: yes.

    Where it is switched on, a communicator is revoked and shrunk (User Level Failure Mitigation,
    MPI Forum's proposal for MPI 5; Bland et al., IJHPCA 2013).
    """
    if os.environ.get(FT_ENABLE, "") not in ("1", "true"):
        how = "mpirun --with-ft ulfm switches it on" if "Open MPI" in mpi_name() else ""
        told = f"a dead rank ends the job, which resumes from its checkpoint{how and f'; {how}'}"
        return [ok("ulfm", f"off: {told}")]
    comm = cluster.comm.Dup()
    if cluster.rank == 0:
        comm.Revoke()
    cluster.wait(comm.Is_revoked)
    shrunk = comm.Shrink()
    size = shrunk.size
    shrunk.Free()
    comm.Free()
    if size != cluster.world:
        remedy = "start the job without --with-ft ulfm"
        return [fail("ulfm", f"on, but {size} of {cluster.world} ranks are left", remedy)]
    return [ok("ulfm", "on: a revoked communicator shrinks to the ranks that live")]
