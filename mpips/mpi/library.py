"""The loaded MPI library, and a check of its launcher."""

import os

import mpi4py

from mpips.errors import UserError
from mpips.mpi.process import world_told
from mpips.mpi.start import MPI, Comm

MPI4PY = mpi4py.__version__


def library_text() -> str:
    """Return what the library says of itself, in several lines."""
    return MPI.Get_library_version().replace("\x00", "")


def mpi_name() -> str:
    """Return the MPI library and version in a few words."""
    words = library_text().split("\n")[0].replace("\t", " ")
    return " ".join(words.split(",")[0].split()[:4])


def is_open_mpi() -> bool:
    """Whether the library that this process has loaded is Open MPI's, or one made from it.

    Whose `mpirun` is found is another question: see `mpips.launch.mpirun.is_open_mpi`.
    """
    return "Open MPI" in library_text()


def any_thread_may_call() -> bool:
    """Whether MPI was started with MPI_THREAD_MULTIPLE."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def check_world(comm: Comm) -> None:
    """Refuse a world of one rank where the launcher started several.

    A wrong ``srun --mpi``, or the mpirun of another MPI, silently starts N worlds of one rank.

    Raises:
        UserError: If the launcher's variables tell of more tasks than the one rank that MPI sees.
    """
    tasks = world_told()
    if comm.size > 1 or tasks == 1:
        return
    mine = ("Open MPI", "pmix") if is_open_mpi() else ("MPICH", "pmi2")
    if "Intel" in library_text():
        mine = ("Intel MPI", "pmi2")
    slurm = "SLURM_STEP_NUM_TASKS" in os.environ
    where = "a SLURM step" if slurm else "a launch"
    remedy = f"use srun --mpi={mine[1]}" if slurm else f"use the mpirun of {mine[0]}"
    raise UserError(f"a world of 1 rank in {where} of {tasks} tasks", f"a world of {tasks}", remedy)
