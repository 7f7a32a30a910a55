"""MPI library of a rank: version, transport, threads, fault tolerance."""

import platform
from importlib import metadata
from pathlib import Path

import numpy as np

from mpips import __version__
from mpips.mpi.abort import switched_on
from mpips.mpi.collectives import count_survivors
from mpips.mpi.process import cpu_name
from mpips.mpi.start import any_thread_may_call, is_open_mpi, library_text, mpi_name
from mpips.mpi.world import Cluster
from mpips.tools.doctor.finding import Finding, fail, ok
from mpips.tools.doctor.software import Library

TRANSPORTS = {"libucp": "UCX", "libfabric": "libfabric", "libpsm2": "PSM2"}


def gather_library() -> Library:
    """Return what this rank runs on."""
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
        tuple(name for library, name in TRANSPORTS.items() if library in maps),
        any_thread_may_call(),
        tuple(versions.items()),
        cpu_name(),
    )


def try_ulfm(cluster: Cluster) -> Finding:
    """Find out whether a job can go on without dead ranks. Collective: yes.

    Where it is switched on, a communicator is revoked and shrunk (User Level Failure Mitigation,
    MPI Forum's proposal for MPI 5; Bland et al., IJHPCA 2013).
    """
    if not switched_on():
        how = "mpirun --with-ft ulfm switches it on" if is_open_mpi() else ""
        text = f"a dead rank ends the job, which resumes from its checkpoint{how and f'; {how}'}"
        return ok("ulfm", f"off: {text}")
    size = count_survivors(cluster.comm, cluster.wait)
    if size != cluster.world:
        remedy = "start the job without --with-ft ulfm"
        return fail("ulfm", f"on, but {size} of {cluster.world} ranks are left", remedy)
    return ok("ulfm", "on: a revoked communicator shrinks to the ranks that live")
